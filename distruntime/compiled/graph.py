"""A graph of operators that `torch.compile` has traced: from its third call on, it is one instruction.

A graph has no Python of the user's: Dynamo's guards stand before it, and what it reads comes as arguments. So
one recording says what each later call with arguments of the same kind does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule

from ..errors import NotSupportedError, drop_frames
from ..log.current import current_streams
from ..log.handle import Handle, Residence
from ..log.issue import noting
from ..log.line import copied
from ..log.tape import recorded
from ..programs.begins import begins_of
from ..programs.handlers import Handlers
from ..programs.layout import arguments_of
from ..programs.recorder import record, taping
from ..programs.recording import Name, Recording
from ..session.ending import outliving
from ..session.fetching import drain_checks
from ..session.session import Session, active_session
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, MADE
from .lines import Lined
from .plan import Given, Look, Plan, Result, Results, handles_of
from .saved import as_proxies, bundle_of, open_slots
from .shared import SharesMemory, overlap

# A graph of changing sizes has a plan for each size. More than so many are forgotten.
_MOST_PLANS = 64
# A kind of call that could not be recorded so often runs operator by operator from then on.
_MOST_TRIES = 3

# These are the graphs that somebody may call, in the order in which they were traced.
alive: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_numbers = count()


class Graph:
    """A function of a traced graph. It gets its arguments in a list, which it empties.

    `replays` counts the calls that were one instruction for each part.

    `why` says why the last call was none of them, and is empty if it was one.

    What it returns from the start of `saves` on, only its backward graph gets. Autograd minds writes to what
    is in `saves`. If it was traced `apart`, it raises `SharesMemory` where two arguments overlap.
    """

    def __init__(
        self,
        graph: GraphModule,
        name: str,
        compile: str | None,
        saves: slice | None = None,
        apart: bool = False,
    ) -> None:
        self._plain, self._lined = graph.forward, Lined(graph)
        self.name, self._compile, self._saves, self.apart = name, compile, saves, apart
        alive[next(_numbers)] = self
        outliving.add(self)
        # Before there is a plan, this counts the calls of a kind. At the first one nobody knows yet what its
        # operators return.
        self._plans: dict[Hashable, Plan | int] = {}
        self._last: Plan | None = None
        self._session: Session | None = None
        self.replays = 0
        self.why = "it was not called yet"

    def __call__(self, args: list[object]) -> Results:
        try:
            held = bundle_of(args)
            # A compiled function inside a program is a part of it.
            if recorded.name:
                if held is not None:
                    open_slots(args, held)
                self._require_apart(args)
                self.why = "it was called amid a recording"
                # Its guards would look at the functions that stand at the user's lines.
                with torch._C._DisableAutocast():
                    found: Results = self._plain(*as_proxies(args))
                    return found
            session = active_session()
            if session is not self._session or len(self._plans) > _MOST_PLANS:
                self._plans, self._last, self._session = {}, None, session
            last = self._last
            if last is not None and last.layout.usable() and not _is_watched():
                leaves = last.leaves(args, held, session)
                if leaves is not None:
                    self.replays, self.why = self.replays + 1, ""
                    # In a list, as each frame that had it itself would hold it, too.
                    several = [] if held is None or held.several is None else [held.several]
                    held = None
                    return last.replay(args, leaves, several)
            look = Look(args, held)
            if held is not None:
                open_slots(args, held)
                held = None
            leaves = handles_of(args)
            # The arguments of a call like the last one lie as those do.
            self._require_apart(leaves)
            kind = _kind(leaves, session)
            plan = self._plans.get(kind, 0)
            if not isinstance(plan, Plan):
                # Operator by operator, each argument goes behind its last use.
                leaves.clear()
            if plan == 0:
                self._plans[kind] = 1
                self.why = "it was the first call with arguments of this kind"
                return self._run(args)
            if _is_watched():
                leaves.clear()
                self.why = "it was called under a dispatch mode, or with dual numbers"
                return self._run(args)
            if isinstance(plan, int):
                if plan > _MOST_TRIES:
                    return self._run(args)
                self._plans[kind] = plan + 1
                return self._record(args, kind, session)
            if not plan.layout.usable():
                leaves.clear()
                return self._record(args, kind, session)
            self._last, self.replays, self.why = plan, self.replays + 1, ""
            if plan is last or plan.last_seen is None:
                plan.note(look, leaves, session)
            return plan.replay(args, leaves, [])
        except BaseException as error:
            drop_frames(error)
            raise

    def _require_apart(self, leaves: Sequence[object]) -> None:
        if self.apart and overlap(leaves):
            self.why = "its arguments share memory, and it writes to some"
            raise SharesMemory

    def compiled(self) -> str:
        """Ask the worker what the plan that was used last runs as: see `Program.compiled`. Blocks."""
        if self._last is None or self._session is not active_session():
            return "no call was replayed yet"
        return self._last.layout.compiled()

    def part(self) -> None:
        """Forget what was recorded in a session that has ended."""
        self._plans, self._last, self._session = {}, None, None

    def _run(self, args: list[object]) -> Results:
        """Run it operator by operator. Its casts are operators of its own."""
        with torch._C._DisableAutocast():
            found: Results = self._lined.run(as_proxies(args))  # type: ignore[assignment]
            return found

    def _record(self, args: list[object], kind: Hashable, session: Session) -> Results:
        """Run it operator by operator, and keep what it has issued, if a later call may issue that again."""
        drain_checks(session)
        args = as_proxies(args)
        # The arguments themselves are let go of while it runs.
        given = _given(args)
        current, handlers = current_streams.get(), Handlers()
        handlers.begin()
        try:
            with taping(session.logs) as tapes, noting() as notes:
                handlers.run()
                recorded.traced, recorded.waited = True, False
                found = self._run(args)
                recorded.traced = False
                handlers.wait()
            if recorded.waited:
                self.why = "it waits for a value, and what it does next may depend on that"
                return found
            if recorded.mixed:
                self.why = "a signal's handler has issued something meanwhile"
                return found
            try:
                recording = record(tapes, notes, given.names, True, current)
            except NotSupportedError as error:
                self.why = str(error).splitlines()[0]
                return found
            recording.lines = copied(recording.lines)
            results = [_result(leaf, recording, given) for leaf in found]
            self.why = recording.unfit or next((r.why for r in results if r.why), "")
            if not self.why and recording.acts:
                self._plans[kind] = Plan(
                    recording, found, results, given, self.name, self._compile, self._saves
                )
                self.why = "it was recorded: the next call is one instruction"
            recording.settle()
            return found
        finally:
            recorded.traced = False
            handlers.end()


def _is_watched() -> bool:
    """Whether somebody looks at each operator: a dispatch mode, or derivatives in forward mode.

    AOTAutograd makes the first call under a mode of its own.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0


def _given(args: Sequence[object]) -> Given:
    tensors = [(k, arg) for k, arg in enumerate(args) if isinstance(arg, DistributedTensor)]
    names: dict[int, Name] = {tensor._handle.ref: (ARGUMENT, k) for k, tensor in reversed(tensors)}
    others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    return Given(names, arguments_of(args), begins_of(args), others)


def _result(leaf: object, recording: Recording, given: Given) -> Result:
    if leaf is None or isinstance(leaf, (int, float, bool)):
        return Result(None, leaf)
    if not isinstance(leaf, torch.Tensor) and any(leaf is other for other in given.others):
        # The kind of a call has it, such as the mesh of a DTensor.
        return Result(None, leaf)
    if not isinstance(leaf, DistributedTensor):
        return Result(None, None, f"it returns a {type(leaf).__name__} of this process")
    ref = leaf._handle.ref
    if ref in recording.made:
        return Result((MADE, recording.made[ref]))
    if ref in given.names:
        return Result(given.names[ref])
    return Result(None, None, "it returns a tensor that is neither an argument nor its own")


def _kind(leaves: Sequence[object], session: Session) -> Hashable:
    """Return what decides what a graph issues: its arguments, and the current place and streams.

    These are arguments with handles instead of tensors.
    """
    found: list[object] = []
    memories: dict[int, int] = {}
    for k, arg in enumerate(leaves):
        if type(arg) is Handle:
            found += arg.spec, arg.place, memories.setdefault(id(arg.storage), k)
        else:
            found += type(arg), arg
    place: Residence = session.places.current()
    streams = current_streams.get()
    found += place, *((key, entered.number) for key, entered in streams.items())
    return tuple(found)


class CompiledGraph(NamedTuple):
    """A graph: "forward 1" and "backward 1" belong to one call.

    Attributes:
        name: its direction and number.
        replays: how many calls were one instruction for each part of it.
        why: why its last call was none; empty if it was one.
        compiled: what its worker runs: "inductor", "cudagraphs", "compiling", or why it runs operator by
            operator; empty if nothing was asked for.
    """

    name: str
    replays: int
    why: str
    compiled: str


def compiled_graphs() -> list[CompiledGraph]:
    """Return what each graph of remote tensors runs as, in the order in which they were traced.

    Blocks for one round trip for each.
    """
    return [CompiledGraph(one.name, one.replays, one.why, one.compiled()) for one in list(alive.values())]
