"""How a recording is laid out as parts: which values cross from one to another, and which part keeps what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

import msgpack

from ..errors import NotSupportedError
from ..guards.arithmetic import Number
from ..log.current import current_streams
from ..log.handle import Handle, Place, Residence, Several
from ..log.line import user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.spec import NO_TENSOR, Spec
from ..log.storage import Storage
from ..session.session import session_of_log
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ARGUMENT, HELD, MADE
from .begins import Moves
from .parts import GIVEN, OWN, Bridge, Made, Needs, Piece, Values, Where
from .recording import Crossed, Name, Part, Recording
from .run import Run

# Behind the last part.
_END = 1 << 60
Paths = Mapping[str, DistributedTensor]


class Argument(NamedTuple):
    """What is known of an argument that is a tensor."""

    memory: Storage
    spec: Spec
    place: Residence


class Layout:
    """The parts of a program, and what stands between them, in order."""

    def __init__(
        self,
        recording: Recording,
        kept: Mapping[int, Name],
        numbers: Sequence[Number],
        returned: Mapping[Name, Handle],
        paths: Paths,
        given: Sequence[Argument | None],
        before: Sequence[tuple[str, Storage]],
        compile: str | None,
        moves: Moves,
        opened: Mapping[Name, Name],
    ) -> None:
        """Lay it out.

        `given` has what each argument is that is a tensor. `opened` are names of held values that come
        as arguments instead.
        """
        if opened:
            recording = recording.renamed(opened)
            kept = {ref: opened.get(name, name) for ref, name in kept.items()}
        self._recording, self._returned = recording, returned
        self._opened, self._moves = opened, moves
        self._acts = list(recording.acts)
        self._held = {path: tensor._handle for path, tensor in paths.items()}
        # A plan that names its streams keeps them. Another one would keep a thread of the worker for nothing.
        self.current = dict(current_streams.get()) if recording.several else {}
        self._find_uses()
        keeping = self._keep(kept)
        self._note_known(before, given)
        self._next = count().__next__
        # How large a replay's own memories are, as far as that is known.
        self.specs: dict[int, Spec] = {}
        self._count_memories()
        words = {word: n for n, number in enumerate(numbers) for word in number.words}
        self.acts: list[Piece | Bridge] = []
        for at, act in enumerate(self._acts):
            if isinstance(act, Crossed):
                bridge = Bridge(act, recording, self._held)
                bridge.memories = [self._memory(name) for name in bridge.makes]
                self.acts.append(bridge)
                continue
            mine = keeping.get(at, {})
            results = self._results(at, act, mine)
            memories = self._memories_of(act, mine) if act.known else None
            needs = Needs(self._held, words, recording.floats, mine, results, memories, compile)
            stream = act.stream if recording.several else -1
            self.acts.append(Piece(act, recording, stream, needs, self._home(at, act)))
        kinds = self._kinds(given) if compile == "inductor" else ""
        for one in self.acts:
            if isinstance(one, Piece):
                one.learn_for(kinds)
        self.bridges = [act for act in self.acts if isinstance(act, Bridge)]
        logs = (
            log for act in self._acts for log in ([act.log] if isinstance(act, Part) else act.between.logs)
        )
        self.logs: list[Log] = list(dict.fromkeys(logs))
        self.over = self._ends()
        # What the recorded call has returned lives as long as its owner holds it, and not as long as a plan.
        self._returned = {}

    def usable(self) -> bool:
        """Whether its workers, its groups and its session are there."""
        for log in self.logs:
            if log.failed is not None or log.session.closed is not None:
                return False
        return all(bridge.between.broken() is None for bridge in self.bridges)

    def take(self, arguments: Iterable[int]) -> None:
        """Let the part that reads one of these arguments last take it, where nobody else holds it."""
        last: dict[int, set[int]] = {}
        for k in arguments:
            users = self._users.get((ARGUMENT, k))
            if users:
                last.setdefault(max(users), set()).add(k)
        for at, act in enumerate(self.acts):
            if isinstance(act, Piece):
                act.take(last.get(at, frozenset()))

    def issue(
        self,
        leaves: Sequence[object],
        numbers: Sequence[float],
        name: str,
        alone: Set[int] = frozenset(),
        several: Several | None = None,
    ) -> Values:
        """Issue it, part by part; return what is made for the caller. Blocks while a window is full.

        `leaves` has the handle of each argument that is a tensor, or its ref if `several` owns it, which only
        a layout of one part takes. Nobody else holds the ones in `alone`.
        """
        values, line = Values(leaves, self.specs, alone, several=several), user_line()
        for act, over in zip(self.acts, self.over):
            act.issue(values, numbers, line, name)
            for gone in over:
                values.made.pop(gone, None)
        return values

    @property
    def only(self) -> Piece | None:
        """Its one part, where it has no others."""
        act = self.acts[0] if len(self.acts) == 1 else None
        return act if isinstance(act, Piece) else None

    def compiled(self) -> str:
        """Return what became of its compiling. Block until what was issued before has run."""
        found = sorted({act.compiled() for act in self.acts if isinstance(act, Piece)})
        return "compiling" if "compiling" in found else "; ".join(found)

    def _kinds(self, given: Sequence[Argument | None]) -> str:
        """Return a word that stands for the dtypes, sizes and devices of all that its parts may meet.

        To a worker, two programs of the same instructions are one. Code that was compiled for one of them
        would be wrong for the other.
        """
        operands = [(one.spec, one.place) for one in given if one is not None]
        operands += [(handle.spec, handle.place) for handle in self._held.values()]
        said = [_said(spec, place) for spec, place in operands]
        if len(self.acts) > 1:
            # The constants of one part may size what another one gets.
            for act, recorded in zip(self.acts, self._acts):
                if isinstance(act, Piece):
                    said.append(act.definition)
                elif isinstance(recorded, Crossed):
                    said.append([recorded.between.kind, repr(recorded.between.key)])
                    said += [_said(spec, place) for spec, place in recorded.operands]
        return blake2b(msgpack.packb(said), digest_size=16).hexdigest()

    def _note_known(self, before: Sequence[tuple[str, Storage]], given: Sequence[Argument | None]) -> None:
        """Note the memories that somebody outside a replay knows."""
        self._known: dict[int, Where] = {}
        for path, storage in before:
            if path in self._held:
                name = self._opened.get((HELD, path))
                fixed = "fixed", self._held[path].storage
                self._known[id(storage)] = fixed if name is None else (GIVEN, int(name[1]))
        # What was found at one path and left at another is what a replay finds at the first one.
        for handle in self._held.values():
            self._known.setdefault(id(handle.storage), ("fixed", handle.storage))
        for k, argument in reversed([*enumerate(given)]):
            if argument is not None:
                self._known[id(argument.memory)] = GIVEN, k

    def _find_uses(self) -> None:
        """Note which act makes each value, and which ones use it."""
        self._makers: dict[Name, int] = {}
        self._users: dict[Name, set[int]] = {}
        for at, act in enumerate(self._acts):
            steps = act.steps if isinstance(act, Part) else [act.step]
            for step in steps:
                found = self._recording.body[step]
                for name in found.reads:
                    self._users.setdefault(name, set()).add(at)
                for number in found.makes:
                    self._makers[MADE, number] = at

    def _keep(self, kept: Mapping[int, Name]) -> dict[int, dict[int, Name]]:
        """Return which act puts which values under names that stay.

        It is the last part of their log, unless something behind it still needs what was there, or makes
        what will be. Then another part follows.
        """
        logs: dict[Log, dict[int, Name]] = {}
        paths: dict[int, list[str]] = {}
        for path, handle in self._held.items():
            paths.setdefault(handle.ref, []).append(path)
            if handle.ref in kept:
                logs.setdefault(handle.place.node, {})[handle.ref] = kept[handle.ref]
        found: dict[int, dict[int, Name]] = {}
        for log, mine in logs.items():
            needs = [self._makers.get(name, -1) for name in mine.values()]
            for ref in mine:
                for path in paths[ref]:
                    needs += self._users.get((HELD, path), ())
            # What comes as an argument may be what is under any name that stays.
            for name in self._opened.values():
                needs += self._users.get(name, ())
            last = max(
                (k for k, act in enumerate(self._acts) if isinstance(act, Part) and act.log is log),
                default=-1,
            )
            # Two values may change places where nothing else is issued.
            if last < 0 or last < max(needs):
                stream = 0
                if last >= 0:
                    before = self._acts[last]
                    assert isinstance(before, Part)
                    stream = before.stream
                last = len(self._acts)
                self._acts.append(Part(log, stream))
            found[last] = mine
            for name in mine.values():
                self._users.setdefault(name, set()).add(last)
        # What was under a name before it is renewed may be returned.
        for name in self._returned:
            if name[0] == HELD:
                ref = self._held[str(name[1])].ref
                self._makers[name] = next(at for at, mine in found.items() if ref in mine)
        return found

    def _ends(self) -> list[list[Name]]:
        """Return what nobody needs any more behind each act."""
        found: list[list[Name]] = [[] for _ in self._acts]
        # What a part makes and nobody else needs has no handle.
        made = {name for act in self.acts for name in act.makes}
        for name, maker in self._makers.items():
            if name in made and name not in self._returned:
                found[max(self._users.get(name) or {maker})].append(name)
        return found

    def _results(self, at: int, part: Part, kept: Mapping[int, Name]) -> list[Made]:
        """Return what a part makes and somebody else needs."""
        found = []
        for name, maker in self._makers.items():
            if maker != at or not (name in self._returned or self._users.get(name, set()) - {at}):
                continue
            spec, place = self._described(name) or (NO_TENSOR, self._home(at, part))
            found.append(Made(name, spec, place, self._memory(name), self._moves.of(name)))
        return found

    def _described(self, name: Name) -> tuple[Spec, Residence] | None:
        """Return what is known of a value that crosses."""
        handle = self._returned.get(name)
        if handle is not None:
            return handle.spec, handle.place
        for act in self._acts:
            if isinstance(act, Crossed):
                for one, operand in zip(self._recording.cut(act).reads, act.operands):
                    if one == name:
                        return operand
        return None

    def _home(self, at: int, part: Part) -> Residence:
        """Return a place of a part's log: one that it uses, if that is known."""
        for name in (name for name, uses in self._users.items() if at in uses):
            if name[0] == HELD and str(name[1]) in self._held:
                return self._held[str(name[1])].place
        for name, maker in self._makers.items():
            if maker == at and name in self._returned:
                return self._returned[name].place
        for handle in (*self._held.values(), *self._returned.values()):
            if handle.place.node is part.log:
                return handle.place
        if isinstance(part.log, MeshLog):
            return part.log.residence()
        place = Place(part.log.index, "cpu")
        return session_of_log(part.log).places.residence(place, numbered=False)

    # -- memories --------------------------------------------------------------------------------------------

    def _count_memories(self) -> None:
        """Note the memories that more than one part uses, or that are known by a value that crosses."""
        times: dict[int, int] = {}
        for part in self._acts:
            if isinstance(part, Part):
                for key in part.memories:
                    times[key] = times.get(key, 0) + 1
        self._several = {key for key, n in times.items() if n > 1}
        self._own: dict[int, Where] = {}
        self._of_names: dict[Name, Where] = {}
        for name in self._makers:
            if name in self._returned or len(self._users.get(name, ())) > 0:
                memory = self._object(name)
                if memory is not None:
                    self._several.add(id(memory))

    def _object(self, name: Name) -> object | None:
        handle = self._returned.get(name)
        if handle is not None:
            return handle.storage
        return self._recording.memories.get(int(name[1])) if name[0] == MADE else None

    def _memories_of(self, act: Part, mine: Mapping[int, Name]) -> list[tuple[Where | None, bool]]:
        """Return where a part's memories are that others use too, and whether it writes them."""
        memories = [
            (self._where(memory, act.log), written)
            for memory, written in act.memories.values()
            if self._shared(memory, act.log)
        ]
        return memories + [(where, True) for name in mine.values() if (where := self._memory_of(name))]

    def _shared(self, memory: object, log: Log) -> bool:
        generator = log.order is not None and memory is log.order.generator
        return generator or id(memory) in self._known or id(memory) in self._several

    def _where(self, memory: object, log: Log) -> Where | None:
        """Return where a replay finds a memory; None for the generators."""
        if log.order is not None and memory is log.order.generator:
            return None
        return self._found(memory)

    def _found(self, memory: object) -> Where:
        return self._known.get(id(memory)) or self._own.setdefault(id(memory), (OWN, self._next()))

    def _memory(self, name: Name) -> Where:
        """Return where a replay finds the memory of a value that crosses."""
        memory = self._object(name)
        if memory is None:
            return self._of_names.setdefault(name, (OWN, self._next()))
        kind, number = found = self._found(memory)
        if kind == OWN and isinstance(memory, Storage) and isinstance(number, int):
            self.specs[number] = memory.spec
        return found

    def _memory_of(self, name: Name) -> Where | None:
        if name[0] == ARGUMENT:
            return GIVEN, int(name[1])
        if name[0] == HELD:
            return "fixed", self._held[str(name[1])].storage
        return self._memory(name)


def arguments_of(leaves: Sequence[object]) -> list[Argument | None]:
    """Return what each argument is that is a tensor."""
    handles = [leaf._handle if isinstance(leaf, DistributedTensor) else None for leaf in leaves]
    return [None if one is None else Argument(one.storage, one.spec, one.place) for one in handles]


def _said(spec: Spec, place: Residence) -> list[object]:
    """Return what compiled code takes for granted of a value; it may begin anywhere in its memory."""
    members = place.node.members or (place.place,)
    return [*spec.at(0).wire(), [one.local_device for one in members]]


def is_new(name: Name, kept: Mapping[int, Name], paths: Paths) -> bool:
    """Whether a replay gives a value that is returned a ref of its own."""
    kind, what = name
    if kind == MADE:
        return True
    return kind == HELD and str(what) in paths and paths[str(what)]._handle.ref in kept


def kept_behind(run: Run, paths: Paths) -> dict[int, Name]:
    """Return which value stands under each ref behind a replay, where that changes."""
    kept: dict[int, Name] = {}
    for path, name in run.state.items():
        ref = paths[path]._handle.ref
        if name[0] == HELD and paths.get(str(name[1])) is None:
            raise NotSupportedError(
                f"what was at {name[1]} is at {path} now: a program cannot follow that yet"
            )
        if name[0] == HELD and paths[str(name[1])]._handle.ref == ref:
            continue
        if kept.setdefault(ref, name) != name:
            raise NotSupportedError(f"what stays at {path} is shared in a way that no program can follow yet")
    return kept
