"""A graph of operators that `torch.compile` has traced: from its third call on, it is one instruction.

A graph has no Python of the user's: Dynamo's guards stand before it, and what it reads comes as arguments. So
one recording says what each later call with arguments of the same kind does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from itertools import count
from sys import getrefcount
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from ..errors import NotSupportedError, drop_frames
from ..log.current import current_streams
from ..log.handle import Residence
from ..log.issue import noting
from ..log.line import copied
from ..log.storage import Storage
from ..log.tape import recorded
from ..operators.proxies import of_a_function, view_of, wrap, wrap_within
from ..programs.begins import Begins, Moves, begins_of
from ..programs.handlers import Handlers
from ..programs.layout import Layout, memories_of
from ..programs.recorder import record, taping
from ..programs.recording import Name, Recording
from ..session.session import Session, active_session
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, MADE
from .lines import Lined
from .saved import Operand, are_watched, as_proxies, bundle, open_slots, slots

# A graph of changing sizes has a plan for each size. More than so many are forgotten.
_MOST_PLANS = 64
# A kind of call that could not be recorded so often runs operator by operator from then on.
_MOST_TRIES = 3
# In so many replays all arguments may be held by others, as in those with `retain_graph=True`.
_MOST_LOOKS = 8
Results = Sequence[object]

# These are the graphs that somebody may call, in the order in which they were traced.
alive: WeakValueDictionary[int, Graph] = WeakValueDictionary()
_numbers = count()


class Graph:
    """A function of a traced graph. It gets its arguments in a list, which it empties.

    `replays` counts the calls that were one instruction for each part.

    `why` says why the last call was none of them, and is empty if it was one.

    What it returns from the start of `saves` on, only its backward graph gets. Autograd minds writes to what
    is in `saves`.
    """

    def __init__(
        self, graph: GraphModule, name: str, compile: str | None, saves: slice | None = None
    ) -> None:
        self._plain, self._lined = graph.forward, Lined(graph)
        self.name, self._compile, self._saves = name, compile, saves
        alive[next(_numbers)] = self
        # Before there is a plan, this counts the calls of a kind. At the first one nobody knows yet what its
        # operators return.
        self._plans: dict[Hashable, _Plan | int] = {}
        self._last: _Plan | None = None
        self._session: Session | None = None
        self.replays = 0
        self.why = "it was not called yet"

    def __call__(self, args: list[object]) -> Results:
        try:
            open_slots(args)
            # A compiled function inside a program is a part of it.
            if recorded.name:
                self.why = "it was called amid a recording"
                # Its guards would look at the functions that stand at the user's lines.
                with torch._C._DisableAutocast():
                    found: Results = self._plain(*as_proxies(args))
                    return found
            session = active_session()
            if session is not self._session or len(self._plans) > _MOST_PLANS:
                self._plans, self._session = {}, session
            kind = _kind(args, session)
            plan = self._plans.get(kind, 0)
            if plan == 0:
                self._plans[kind] = 1
                self.why = "it was the first call with arguments of this kind"
                return self._run(args)
            # AOTAutograd makes the first call under one of its own.
            if torch._C._len_torch_dispatch_stack():
                self.why = "it was called under a dispatch mode"
                return self._run(args)
            if isinstance(plan, int):
                if plan > _MOST_TRIES:
                    return self._run(args)
                self._plans[kind] = plan + 1
                return self._record(args, kind, session)
            if not plan.layout.usable():
                return self._record(args, kind, session)
            self._last, self.replays, self.why = plan, self.replays + 1, ""
            return plan.replay(args)
        except BaseException as error:
            drop_frames(error)
            raise

    def compiled(self) -> str:
        """Ask the worker what the plan that was used last runs as: see `Program.compiled`. Blocks."""
        if self._last is None or self._session is not active_session():
            return "no call was replayed yet"
        return self._last.layout.compiled()

    def _run(self, args: list[object]) -> Results:
        """Run it operator by operator. Its casts are operators of its own."""
        with torch._C._DisableAutocast():
            found: Results = self._lined.run(as_proxies(args))  # type: ignore[assignment]
            return found

    def _record(self, args: list[object], kind: Hashable, session: Session) -> Results:
        """Run it operator by operator, and keep what it has issued, if a later call may issue that again."""
        session.drain_checks()
        args = as_proxies(args)
        # The arguments themselves are let go of while it runs.
        given = _given(args)
        current, handlers = current_streams.get(), Handlers()
        handlers.begin()
        try:
            with taping(session.logs) as tapes, noting() as notes:
                handlers.run()
                recorded.traced = True
                found = self._run(args)
                recorded.traced = False
                handlers.wait()
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
                self._plans[kind] = _Plan(
                    recording, found, results, given, self.name, self._compile, self._saves
                )
                self.why = "it was recorded: the next call is one instruction"
            recording.settle()
            return found
        finally:
            recorded.traced = False
            handlers.end()


class _Given(NamedTuple):
    """What is known of the arguments of a call when these are gone: the names of tensors by their refs, their
    memories, where they begin, and what are no tensors.
    """

    names: dict[int, Name]
    memories: Sequence[Storage | None]
    begins: Begins
    others: Sequence[object]


def _given(args: Sequence[object]) -> _Given:
    tensors = [(k, arg) for k, arg in enumerate(args) if isinstance(arg, DistributedTensor)]
    names: dict[int, Name] = {tensor._handle.ref: (ARGUMENT, k) for k, tensor in reversed(tensors)}
    others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    return _Given(names, memories_of(args), begins_of(args), others)


class _Result(NamedTuple):
    """A result of a graph: a value with its name, or a plain one; or why it can be neither."""

    name: Name | None
    plain: object = None
    why: str = ""


def _result(leaf: object, recording: Recording, given: _Given) -> _Result:
    if leaf is None or isinstance(leaf, (int, float, bool)):
        return _Result(None, leaf)
    if not isinstance(leaf, torch.Tensor) and any(leaf is other for other in given.others):
        # The kind of a call has it, such as the mesh of a DTensor.
        return _Result(None, leaf)
    if not isinstance(leaf, DistributedTensor):
        return _Result(None, None, f"it returns a {type(leaf).__name__} of this process")
    ref = leaf._handle.ref
    if ref in recording.made:
        return _Result((MADE, recording.made[ref]))
    if ref in given.names:
        return _Result(given.names[ref])
    return _Result(None, None, "it returns a tensor that is neither an argument nor its own")


def _holders(operand: Operand) -> int:
    return getrefcount(operand._handle)


class _Counted:
    """A handle that one operand holds, and nobody else."""


# Python's versions differ in what a look at the count adds to it.
_ALONE = _holders(Operand(_Counted()))  # type: ignore[arg-type]


class _Plan:
    """A graph that is ready for calls of one kind."""

    def __init__(
        self,
        recording: Recording,
        found: Results,
        results: Sequence[_Result],
        given: _Given,
        name: str,
        compile: str | None,
        saves: slice | None,
    ) -> None:
        self._name = name
        made = {
            one.name: leaf._handle
            for one, leaf in zip(results, found)
            if one.name is not None and one.name[0] == MADE and isinstance(leaf, DistributedTensor)
        }
        moves = Moves((given.begins, given.begins), {})
        self.layout = Layout(recording, {}, (), made, {}, given.memories, (), compile, moves, {})
        # What each call returns anew stands at its number: values, arguments, and what it saves.
        self._results = [one.plain for one in results]
        self._new = {k: one.name for k, one in enumerate(results) if one.name and one.name[0] == MADE}
        self._args = {
            k: int(one.name[1]) for k, one in enumerate(results) if one.name and one.name[0] == ARGUMENT
        }
        self._watched: Sequence[int] = ()
        self._exposed: Sequence[int] = ()
        self._saved: dict[int, Name] = {}
        if saves is not None:
            self._saved = {k: name for k, name in self._new.items() if k >= saves.start}
            self._note_exposed(saves, found, given)
        for k, slot in zip([*self._saved][1:], slots(len(self._saved))):
            self._results[k] = slot
        self._note_shared(found)
        self._passed = {*self._args.values()}
        tensors = [k for k, memory in enumerate(given.memories) if memory is not None]
        # The arguments that nobody else has held at any call so far. The backward graph is the last to need
        # what the forward graph has saved, and its worker frees each of them behind its last use.
        self._taken: Sequence[int] = [k for k in tensors if k not in self._passed]
        # So many calls may hold all of them until none is looked at any more. Then it is 0.
        self._looks = _MOST_LOOKS

    def _note_shared(self, found: Results) -> None:
        """Note which results are in another one's memory, and how they are views of it."""
        self._shared: dict[int, tuple[int, object]] = {}
        memories: dict[int, int] = {}
        # A base comes before its views.
        self._order = sorted(self._new, key=lambda k: found[k]._is_view())  # type: ignore[attr-defined]
        places = {id(found[k]): k for k in self._order if k not in self._saved}
        for k in self._order:
            leaf = found[k]
            assert isinstance(leaf, DistributedTensor)
            if k in self._saved:
                continue
            base = places.get(id(leaf._base))
            first = memories.setdefault(id(leaf._handle.storage), k)
            if base is not None:
                self._shared[k] = base, view_of(leaf)
            elif first != k:
                # Views of what is not returned would give each other gradients through it.
                siblings = leaf._is_view() and leaf._base is found[first]._base  # type: ignore[attr-defined]
                self._shared[k] = first, of_a_function(leaf._handle.spec) if siblings else None

    def _note_exposed(self, saves: slice, found: Results, given: _Given) -> None:
        """Note by which arguments and results others can write to what is saved.

        These are one for each memory. What is saved as it came is a tensor, which autograd minds itself.
        """
        checked = range(*saves.indices(len(found)))
        memories = {id(found[k]._handle.storage) for k in checked if k in self._saved}  # type: ignore[attr-defined]
        self._watched = [
            k for k, memory in enumerate(given.memories) if memory is not None and id(memory) in memories
        ]
        outer = {
            id(found[k]._handle.storage): k  # type: ignore[attr-defined]
            for k in self._new
            if k not in self._saved
        }
        self._exposed = [k for memory, k in outer.items() if memory in memories]

    def replay(self, args: list[object]) -> Results:
        """Issue it, part by part; return its results. Blocks while a window is full. Empties `args`.

        AOTAutograd counts the versions of what a graph writes to.
        """
        passed = {k: args[k] for k in self._passed}
        watched: list[torch.Tensor] = [args[k] for k in self._watched]  # type: ignore[misc]
        leaves = [*args]
        args.clear()
        made = self.layout.issue(leaves, (), self._name, self._alone(leaves))
        out = [*self._results]
        saved, bundled = self._saved, bool(self._saved) and not are_watched()
        for k in self._order:
            if k in self._shared:
                base, view = self._shared[k]
                out[k] = wrap_within(DistributedTensor, made[self._new[k]], out[base], view)
            elif not (bundled and k in saved):
                out[k] = wrap(DistributedTensor, made[self._new[k]])
        if bundled:
            # Nothing could free a graph that owns its own result. What `detach` returns shares its version.
            watched += [out[k].detach() for k in self._exposed]  # type: ignore[attr-defined]
            out[next(iter(saved))] = bundle([made[name] for name in saved.values()], watched)
        for k, number in self._args.items():
            given = passed[number]
            out[k] = wrap(DistributedTensor, given._handle) if type(given) is Operand else given
        return out

    def _alone(self, leaves: list[object]) -> Set[int]:
        """Let go of the arguments that may be taken; return those that nobody else holds.

        A graph that is kept (`retain_graph=True`) holds them all, and then nothing is taken in that call.
        """
        taken = self._taken
        for k in taken:
            if type(leaves[k]) is not Operand:
                leaves[k] = Operand(leaves[k]._handle)  # type: ignore[attr-defined]
        alone = {k for k in taken if _holders(leaves[k]) == _ALONE}  # type: ignore[arg-type]
        if alone and (self._looks or len(alone) < len(taken)):
            self.layout.take(alone)
            self._taken, self._looks = sorted(alone), 0
        elif self._looks:
            self._looks -= 1
            if not self._looks:
                self._taken = ()
        return alone


def _kind(args: Sequence[object], session: Session) -> Hashable:
    """Return what decides what a graph issues: its arguments, and the current place and streams."""
    found: list[object] = []
    memories: dict[int, int] = {}
    for k, arg in enumerate(args):
        if isinstance(arg, (DistributedTensor, Operand)):
            handle = arg._handle
            found += handle.spec, handle.place, memories.setdefault(id(handle.storage), k)
        else:
            found += type(arg), arg
    place: Residence = session.places.current()
    streams = current_streams.get()
    found += place, *((key, entered.number) for key, entered in streams.items())
    return tuple(found)
