"""`dr.program`: a function is recorded until two recordings agree, and then replayed by one instruction."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import NotSupportedError, UsageError, drop_frames, without_our_frames
from ..guards.arithmetic import Arithmetic
from ..guards.reach import Reach
from ..guards.reads import Reads
from ..guards.seen import PLAIN
from ..guards.tracing import traced
from ..log.current import current_streams
from ..log.handle import next_ref
from ..log.issue import noting
from ..log.line import line_text, user_line
from ..log.log import Log
from ..log.tape import Tape, not_in_a_program, recorded
from ..session.session import Session, active_session
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD
from .begins import Placed, begins_of
from .carried import kinds_found, renewed_kinds
from .garbage import young_cycles_end
from .handlers import Handlers
from .kinds import Kinds
from .plan import Found, Plan
from .recorder import record
from .recording import Crossed, Name
from .run import (
    Run,
    Stripped,
    dressed,
    handle_of,
    laid_out,
    replaced,
    require_unchanged,
    returned_from,
    state_behind,
    stripped,
    unsteady,
)
from .signature import local_leaf, signature_of
from .turns import Recorder, Turns
from .watch import LocalDraws, others_run, watched

P = ParamSpec("P")
R = TypeVar("R")


class Program(Generic[P, R]):
    """A function that is replayed; see `program`.

    `recordings` and `replays` count calls. `why` says why the last call was not replayed, and is empty if it
    was.
    """

    def __init__(self, fn: Callable[P, R], verify: bool, compile: str | None = None) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._verify, self._compile = fn, verify, compile
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self.recordings = self.replays = 0
        self.why = "it was not called yet"
        self._kinds, self._turns = Kinds(), Turns()
        self._last: Plan | None = None

    def __repr__(self) -> str:
        return f"<program {self._name!r}, {self.recordings} recordings, {self.replays} replays>"

    @property
    def compiled(self) -> str:
        """Ask the worker what the plan that was used last runs as.

        "inductor" or "cudagraphs" if it is compiled, "compiling" while Inductor is at work, an empty text if
        nobody has asked for that, and else why it is not. A plan begins to compile with its first replay.
        Blocks until what was issued before has run.
        """
        if not self._compile:
            return ""
        return "no call was replayed yet" if self._last is None else self._last.compiled()

    def __get__(self, owner: object, kind: type | None = None) -> object:
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # A program inside another one is a part of it.
        if recorded.name:
            return self._fn(*args, **kwargs)
        # A mode, such as `FlopCounterMode`, looks at each operator. It would not see those of a replay.
        if torch._C._len_torch_dispatch_stack():
            self.why = "a dispatch mode was on, so it ran op by op"
            return self._fn(*args, **kwargs)
        try:
            return self._call(args, kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    def _call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> R:
        leaves, signature = signature_of(args, kwargs)
        turns, plainly = self._turns, False
        with turns.lock:
            if turns.recorder is None:
                found = self._replayed(signature, leaves)
                if type(found) is not _Anew:
                    return found  # type: ignore[return-value]
                plainly = self._runs_plainly(found.signature)
        # No lock is held while the function runs.
        if plainly:
            return self._plainly(args, kwargs)
        return self._anew(args, kwargs, leaves, signature)

    def _replayed(self, signature: object, leaves: list[object]) -> object:
        """Replay a call and return what it returns, or say how it is to be recorded. Call with the lock."""
        if self._kinds.placed and signature in self._kinds.placed:
            signature = Placed(signature, begins_of(leaves))
        # Why one does not fit takes longer to say than that it does not, and a plain call need not know.
        why: str | Plan = "no two recordings agree yet"
        plans = self._kinds.plans.get(signature)
        for plan in tuple(plans or ()):
            if plans is None or not plan.usable():
                self._kinds.forget(signature)
                break
            taken = None
            if not plan.fits(leaves) and (taken := plan.fits_with(leaves)) is None:
                why = plan
                continue
            numbers = plan.numbers(leaves)
            if numbers is None:
                why = "what follows from floats comes out in another way now"
                continue
            if self._due(plan):
                return _Anew(signature, "it was recorded again to compare", plan, numbers)
            found = plan.replay(leaves, numbers, taken)
            self._last = plan
            plan.tries.in_vain = 0
            self.replays += 1
            self.why = ""
            return found
        return _Anew(signature, why)

    def _runs_plainly(self, signature: object) -> bool:
        """Whether recordings of this kind were in vain, so that this call is not recorded."""
        tries = self._kinds.tries_of(signature)
        if self._verify or not tries.over():
            return False
        tries.tell(self._name)
        self.why = f"it runs plainly, as recordings were in vain: {tries.why}"
        return True

    def _plainly(self, args: tuple[object, ...], kwargs: dict[str, object]) -> R:
        """Call the function, and return what a recording would: no graph leaves."""
        # What was there before is returned as it is.
        known = range(next_ref())
        found = stripped(self._fn(*args, **kwargs), known, self._name)  # type: ignore[arg-type]
        return self._as_returned(found)

    def _as_returned(self, found: Stripped) -> R:
        given = [*map(laid_out, dressed(found, (), self._name), found.layouts)]
        return tree_unflatten(given, found.tree)  # type: ignore[no-any-return]

    def _anew(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
        signature: object,
    ) -> R:
        """Record a call, once no other thread's is being recorded. Replay it if it fits by then."""
        if recorded.aside:
            self.why = "a signal handler called it amid a recording, so it ran plainly"
            return self._plainly(args, kwargs)
        turns, mine = self._turns, Recorder()
        try:
            while turns.recorder is not mine:
                with turns.lock:
                    other = turns.recorder
                    if other is None:
                        found = self._replayed(signature, leaves)
                        if not isinstance(found, _Anew):
                            return found  # type: ignore[return-value]
                        turns.recorder = mine
                if other is not None and not mine.waits_for(other):
                    self.why = "another call of it was being recorded meanwhile, so it ran plainly"
                    return self._plainly(args, kwargs)
            handlers = Handlers()
            try:
                return self._record(found, args, kwargs, leaves, handlers)  # type: ignore[arg-type]
            finally:
                handlers.end()
        finally:
            if turns.recorder is mine:
                turns.recorder = None
            mine.end()

    def _due(self, plan: Plan) -> bool:
        """Whether a plan is to be compared with a recording: each one is, if the user wishes."""
        return self._verify

    # -- recording -------------------------------------------------------------------------------------------

    def _record(
        self,
        anew: _Anew,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
        handlers: Handlers,
    ) -> R:
        signature, _, expected, numbers = anew
        why = anew.why_of(leaves)
        runs = self._kinds.runs.get(signature)
        first, lenient = not runs, not runs or not runs[-1].recording.unfit
        self.recordings += 1
        self.why = "it was the first call of its kind" if first else why
        session = active_session()
        for node in session.nodes:
            # What a kernel was wrongly said to return is corrected first.
            if node.failed is None and node.checks.waiting:
                session.drain(node)
        handlers.begin()
        roots: list[tuple[str, object]] = [(self._name, self._fn)]
        roots += [
            (f"argument {k}", leaf)
            for k, leaf in enumerate(leaves)
            if not isinstance(leaf, (DistributedTensor, *PLAIN))
        ]
        # A mesh keeps what each member's rank is. The layouts of DTensors read it.
        roots += [
            (f"the ranks {key} of mesh {mesh.number}", tensor)
            for mesh in session.meshes
            for key, tensor in mesh.residence().numbers.items()
        ]
        before = Reach(roots)
        counted = {key: (tensor, tensor.item()) for key, tensor in before.steps.items()}
        terms = Arithmetic({k: leaf for k, leaf in enumerate(leaves) if type(leaf) is float}, counted)
        paths = before.by_ref()
        arguments = {
            leaf._handle.ref: k
            for k, leaf in reversed([*enumerate(leaves)])
            if isinstance(leaf, DistributedTensor)
        }
        names: dict[int, Name] = {ref: (HELD, path) for ref, path in paths.items()}
        names.update({ref: (ARGUMENT, k) for ref, k in arguments.items()})
        draws = LocalDraws(before.generators)
        memories = [(path, tensor._handle.storage) for path, tensor in before.paths.items()]
        entered = kinds_found(before)
        current = current_streams.get()
        known = [*(tensor for _, tensor in before.tensors.values()), *_tensors(leaves)]
        versions = [(tensor, _version(tensor)) for tensor in known]
        gradients = [
            (k, leaf, leaf.grad)
            for k, leaf in enumerate(tree_flatten((args, kwargs))[0])
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad
        ]
        tapes: list[tuple[Log, Tape]] = []
        found: Stripped
        asked = recorded.asked = []
        reads = Reads(terms)
        try:
            for log in session.logs:
                tapes.append((log, log.begin_tape()))
            with watched(self._name, first, lenient), noting() as notes, young_cycles_end() as young:
                result = traced(reads, self._called, reads, handlers, args, kwargs)
                found = stripped(result, names, self._name)
                del result
                reasons = reads.settle(young.ids())
        finally:
            for log, tape in tapes:
                log.end_tape(tape)
        recorded.name, recorded.first = self._name, first
        try:
            if recorded.mixed:
                raise not_in_a_program("hold what a signal handler has issued", "issue it outside")
            drawn = draws.used()
            self._require_plain(session, tapes, args, kwargs, leaves, gradients)
            recording = record(tapes, notes, names, first, current)
            if drawn:
                reasons.insert(0, drawn)
            reasons += young.reasons
            if reasons:
                recording.unfit = self.why = f"each call is recorded, since {reasons[0]}"
            changed = reads.notes.renew()
            steps = {key: tensor for key, (tensor, was) in counted.items() if tensor.item() == was + 1}
            after = Reach(roots)
            if not first:
                require_unchanged(before, after, steps)
            refs = {handle.ref for leaf in found.leaves if (handle := handle_of(leaf)) is not None}
            state = state_behind(recording, after, paths, arguments, refs, self._refusal, first)
        except NotSupportedError as error:
            # It may be the doing of somebody else.
            beside = f"the signal handler {recorded.struck!r} has run" if recorded.struck else ""
            beside = beside or ("other threads run" if others_run() else "")
            if not beside:
                raise
            self.why = f"it was recorded while {beside}, and {str(error).splitlines()[0]}"
            self._kinds.note(signature, False, self.why)
            return self._as_returned(found)
        finally:
            recorded.name, recorded.first = "", False
        run = Run(
            recording,
            state,
            {path: tensor._handle.spec for path, tensor in after.paths.items()},
            returned_from(found, recording, arguments, paths),
            found.tree,
            terms.values,
            steps,
            changed,
            begins_of(leaves),
            {
                name: spec
                for act in recording.acts
                if isinstance(act, Crossed)
                for name, (spec, _) in zip(recording.cut(act).reads, act.operands)
            },
        )
        kept = {after.paths[path]._handle.ref for path in state}
        handles = [handle_of(leaf) for leaf in found.leaves]
        given = dressed(found, kept, self._name)
        if any(isinstance(leaf, DistributedTensor) and leaf._handle.storage in asked for leaf in leaves):
            signature = self._kinds.place(signature, run, "it asks where an argument begins in its memory")
        same, differs = self._kinds.same(signature, run)
        self.why = differs or self.why
        odd = "" if expected is None else expected.differs(run, numbers)
        if expected is not None and odd:
            self._kinds.forget(signature)
            raise UsageError(
                f"the program {self._name!r} does something else than its replays did: {odd}\n"
                f"  compared at {line_text(user_line())}\n"
                "  something that it reads has changed where nobody can see it (a file, another module): "
                "pass that as an argument. What the last replays have computed may be wrong"
            )
        written = {id(tensor) for tensor, version in versions if _version(tensor) != version}
        changed_paths = [path for path, tensor in before.paths.items() if id(tensor) in written]
        kinds = renewed_kinds(run, entered, after)
        odd = "" if same is None else unsteady(before, after, kinds, run, same)
        if odd:
            self.why = f"it left {odd} in another state than it found it in"
        elif same is not None and recording.acts:
            wrote = [tensor for tensor, version in versions if _version(tensor) != version]
            plan = Plan(
                run,
                same,
                Found(
                    self._name,
                    leaves,
                    after,
                    handles,
                    given,
                    [t for t in wrote if id(t) in after.tensors],
                    [k for k, leaf in enumerate(leaves) if any(leaf is t for t in wrote)],
                    [k for ref, k in arguments.items() if ref in paths],
                    memories,
                    kinds,
                    replaced(before, after, state),
                    changed_paths,
                    reads.notes.found,
                    reads.notes.made,
                    terms.decisions,
                ),
                self._compile,
            )
            if expected is not None:
                plan.replays = plan.verified = expected.replays
            plan.tries = self._kinds.tries_of(signature)
            new = self._kinds.keep(signature, plan, expected)
            # Whoever holds a tensor from here on is not of this call.
            del before, after, known, memories, notes, versions, gradients, wrote, found, handles, reads
            plan.guards.settle()
            again = "" if "agree yet" in why else f"{why}, so "
            self.why = f"{again}it was recorded, and agrees with one before: the next call is replayed"
            self._kinds.note(signature, new or expected is not None, why)
        else:
            self.why = self.why if recording.acts else "it issues nothing on a worker"
            self._kinds.note(signature, False, self.why)
        recording.settle()
        given = [laid_out(leaf, one.layout) for leaf, one in zip(given, run.returned)]
        return tree_unflatten(given, run.tree)  # type: ignore[no-any-return]

    def _called(
        self, reads: Reads, handlers: Handlers, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> R:
        reads.base = id(sys._getframe())
        try:
            handlers.run()
            return self._fn(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            handlers.wait()

    def _require_plain(
        self,
        session: Session,
        tapes: Sequence[object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
        gradients: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]],
    ) -> None:
        if len(session.logs) != len(tapes):
            raise not_in_a_program("make a mesh", "make it before")
        now = [local_leaf(leaf) for leaf in tree_flatten((args, kwargs))[0]]
        if len(now) != len(leaves) or any(a is not b for a, b in zip(now, leaves)):
            raise not_in_a_program("change the lists and dictionaries of its arguments", "return new ones")
        for k, leaf, gradient in gradients:
            if leaf.grad is not gradient:
                raise not_in_a_program(
                    f"leave a gradient in argument {k}, as a replay's argument is another tensor",
                    "return torch.autograd.grad(loss, x), or let the function name the parameter itself",
                )

    def _refusal(self, what: str, where: str, remedy: str) -> NotSupportedError:
        made = f"\n  made at {where}" if where else ""
        return NotSupportedError(
            f"a program cannot {what}{made}\n  in the program {self._name!r}\n  {remedy}"
        )


class _Anew(NamedTuple):
    """How a call is to be recorded: its kind, why, and the plan that it is compared with."""

    signature: object
    why: str | Plan
    expected: Plan | None = None
    numbers: Sequence[float] = ()

    def why_of(self, leaves: Sequence[object]) -> str:
        """Say why. That a plan does not fit is known sooner than why."""
        if isinstance(self.why, str):
            return self.why
        return self.why.missed(leaves) or "the arguments are others"


def _tensors(leaves: Sequence[object]) -> list[DistributedTensor]:
    return [leaf for leaf in leaves if isinstance(leaf, DistributedTensor)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@overload
def program(fn: Callable[P, R], *, compile: str | None = None, verify: bool = False) -> Program[P, R]: ...


@overload
def program(
    fn: None = None, *, compile: str | None = None, verify: bool = False
) -> Callable[[Callable[P, R]], Program[P, R]]: ...


@without_our_frames
def program(
    fn: Callable[P, R] | None = None, *, compile: str | None = None, verify: bool = False
) -> Program[P, R] | Callable[[Callable[P, R]], Program[P, R]]:
    """Make a program of a function: its first calls are recorded, later ones travel as one instruction each.

    What a replay issues is what was recorded, without the function's Python. If something that the function
    can reach has changed since, the call is recorded again. What it returns has no autograd graph.

    Args:
        fn: the function, of remote tensors and plain values. Without it, a decorator is returned.
        compile: "inductor" lets the worker compile it, beside the first replays, which run as they are. Its
            results differ from eager's in the last digits. "cudagraphs" lets the worker launch its kernels
            as one CUDA graph. `compiled` says how far that is, or why it runs as it is.
        verify: record each call, and compare it with what a replay would have done. Nothing is replayed.

    Returns at once. A recorded call waits for a worker that is still to confirm what new operators
    return.

    Raises:
        NotSupportedError: from a call: the function does what no replay can do. The text names the line.
    """
    if compile not in (None, "inductor", "cudagraphs"):
        raise NotSupportedError(
            f'dr.program(compile={compile!r}): there are "inductor" and "cudagraphs". Or leave it out: a '
            "replay runs as straight-line code on the worker"
        )
    if fn is None:
        return lambda function: Program(function, verify, compile)
    if not callable(fn):
        raise UsageError(f"dr.program takes a function, got {type(fn).__name__}")
    return Program(fn, verify, compile)
