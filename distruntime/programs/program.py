"""`dr.program`: a function is recorded until two recordings agree, and then replayed by one instruction."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_unflatten

from ..errors import NotSupportedError, UsageError, drop_frames, without_our_frames
from ..log.handle import next_ref
from ..log.line import line_text, user_line
from ..log.tape import recorded
from ..session.ending import outliving
from ..session.fetching import drain_checks
from ..session.session import active_session
from .attempt import Attempt
from .begins import Placed, begins_of
from .handlers import Handlers
from .kinds import Kinds, signature_of
from .plan import Plan
from .returned import Stripped, dressed, laid_out, stripped
from .side_effects import others_run
from .turns import Recorder, Turns

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
        outliving.add(self)

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

    def part(self) -> None:
        """Forget what was recorded in a session that has ended: its places are of no other one."""
        self._kinds, self._last = Kinds(), None

    def __get__(self, owner: object, kind: type | None = None) -> object:
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # A program inside another one is a part of it.
        if recorded.name:
            return self._fn(*args, **kwargs)
        # A mode, such as `FlopCounterMode`, looks at each operator, as derivatives in forward mode do. These
        # would see none of a replay.
        if torch._C._len_torch_dispatch_stack() or _is_watched():
            self.why = "a mode or a transform of torch was on that sees each operator, so it ran op by op"
            return self._fn(*args, **kwargs)
        try:
            return self._call(args, kwargs)
        except BaseException as error:
            drop_frames(error)
            raise

    def _call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> R:
        leaves, signature = signature_of(args, kwargs, self._kinds.names)
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
            if self._verify:
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
        self, args: tuple[object, ...], kwargs: dict[str, object], leaves: list[object], signature: object
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

    # -- recording -------------------------------------------------------------------------------------------

    def _record(
        self,
        anew: _Anew,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        leaves: list[object],
        handlers: Handlers,
    ) -> R:
        runs = self._kinds.runs.get(anew.signature)
        first, lenient = not runs, not runs or not runs[-1].recording.unfit
        why = anew.why_of(leaves)
        self.recordings += 1
        self.why = "it was the first call of its kind" if first else why
        drain_checks(active_session())
        handlers.begin()
        attempt = Attempt(self._name, self._fn, args, kwargs, leaves, self._kinds.names)
        found = attempt.call(first, lenient, handlers)
        try:
            attempt.look_behind(first)
        except NotSupportedError as error:
            # It may be the doing of somebody else.
            beside = f"the signal handler {recorded.struck!r} has run" if recorded.struck else ""
            beside = beside or ("other threads run" if others_run() else "")
            if not beside:
                raise
            self.why = f"it was recorded while {beside}, and {str(error).splitlines()[0]}"
            self._kinds.note(anew.signature, False, self.why)
            return self._as_returned(found)
        self.why = attempt.unfit or self.why
        plan = self._compared(anew, attempt, why)
        given, run = attempt.given, attempt.run
        run.recording.settle()
        # Whoever holds a tensor from here on is not of this call.
        del attempt, found
        if plan is not None:
            plan.guards.settle(given)
        return tree_unflatten(  # type: ignore[no-any-return]
            [laid_out(leaf, one.layout) for leaf, one in zip(given, run.returned)], run.tree
        )

    def _compared(self, anew: _Anew, attempt: Attempt, why: str) -> Plan | None:
        """Compare a recording with those before it. Return the plan that two equal ones make."""
        signature, _, expected, numbers = anew
        run, plan = attempt.run, None
        if attempt.asks_for_begins():
            signature = self._kinds.place(signature, run, "it asks where an argument begins in its memory")
        lasts = self._kinds.runs.get(signature, [])[-1:]
        same, differs = self._kinds.same(signature, run)
        self.why = differs or self.why
        if expected is not None and (odd := expected.differs(run, numbers)):
            self._kinds.forget(signature)
            raise UsageError(
                f"the program {self._name!r} does something else than its replays did: {odd}\n"
                f"  compared at {line_text(user_line())}\n"
                "  something that it reads has changed where nobody can see it (a file, another module): "
                "pass that as an argument. What the last replays have computed may be wrong"
            )
        if same is not None and (odd := attempt.unsteady([same, *lasts])):
            self.why = f"it left {odd} in another state than it found it in"
        elif same is not None and run.recording.acts:
            plan = Plan(attempt, same, self._compile)
            plan.replays = 0 if expected is None else expected.replays
            plan.tries = self._kinds.tries_of(signature)
            new = self._kinds.keep(signature, plan, expected)
            again = "" if "agree yet" in why else f"{why}, so "
            self.why = f"{again}it was recorded, and agrees with one before: the next call is replayed"
            self._kinds.note(signature, new or expected is not None, why)
        else:
            self.why = self.why if run.recording.acts else "it issues nothing on a worker"
            self._kinds.note(signature, False, self.why)
        return plan


def _is_watched() -> bool:
    """Whether something has to see each function of torch: a mode, a transform of `torch.func`, dual numbers.

    A mode that only names a default device does not count.
    """
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    entered = torch._C._len_torch_function_stack()
    modes = map(torch._C._get_function_stack_at, range(entered))
    return entered > 0 and any(type(mode) is not torch.utils._device.DeviceContext for mode in modes)


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
