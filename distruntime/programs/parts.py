"""The parts of a program: what each one's log learns of it, and how a replay issues it.

A part is one instruction of its log, with operands, numbers and results. A value that another part, or what
stands between them, reads is a result here and an operand there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ..log.current import current_streams
from ..log.handle import Handle, Residence, Row, Several, next_ref
from ..log.issue import Between, Streams, settle, stream_at, template_number
from ..log.line import Line, Replayed
from ..log.log import relieve
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..log.spec import NO_TENSOR, Spec
from ..log.storage import Storage
from ..log.uses import Memory
from ..tensors.worker_functions import read_function
from ..wire.messages import ARGUMENT, FLOAT, HELD, MADE, NUMBER
from .begins import moved
from .forms import Form, Taking
from .recording import Crossed, Instruction, Name, Part, Recording

# Where a memory is found in a replay: that of an argument, one that stays, or one of the replay's own.
Where = tuple[str, int | Storage | None]
GIVEN, OWN = "argument", "own"


@dataclass
class Made:
    """A result of a part: what it is, and its memory."""

    name: Name
    spec: Spec
    place: Residence
    memory: Where
    # It begins as far from there as this argument does from where that began.
    follows: tuple[int, int] | None = None


@dataclass
class Values:
    """What one replay has: arguments, values that it has made, and their memories."""

    # Each argument that is a tensor is its handle here. One of which `several` owns the ref is that ref.
    leaves: Sequence[Any]
    # How large its own memories are, as far as that is known.
    specs: Mapping[int, Spec]
    # Nobody else holds these arguments, so its parts may take them.
    alone: Set[int] = frozenset()
    made: dict[Name, Handle] = field(default_factory=dict)
    memories: dict[int, Storage] = field(default_factory=dict)
    several: Several | None = None
    # It owns results that are not among `made`.
    kept: Several | None = None

    def storage(self, where: Where) -> Storage:
        """Return a memory; one of the replay's own is made at its first use."""
        kind, what = where
        if isinstance(what, Storage):
            return what
        assert isinstance(what, int)
        if kind == GIVEN:
            return self.leaves[what].storage  # type: ignore[no-any-return]
        found = self.memories.get(what)
        if found is None:
            found = self.memories[what] = Storage(self.specs.get(what, NO_TENSOR))
        return found

    def handle(self, name: Name) -> Handle:
        """Return an argument, or a value that was made."""
        kind, what = name
        if kind == ARGUMENT:
            assert isinstance(what, int)
            return self.leaves[what]  # type: ignore[no-any-return]
        return self.made[name]


@dataclass
class Needs:
    """What a part has to know of the others, and of what was found."""

    held: Mapping[str, Handle]
    # These floats are numbers of the call, by their number in the recording.
    numbers: Mapping[int, int]
    floats: Sequence[float]
    # The value under each of these refs is another one behind the part.
    kept: Mapping[int, Name]
    # These values are results, as somebody else needs them.
    results: Sequence[Made]
    # The memories that it uses, each with whether it writes it; None where that is not known.
    memories: Sequence[tuple[Where | None, bool]] | None
    # The worker compiles it so.
    compile: str | None


class Piece:
    """A part that a replay issues as one instruction."""

    def __init__(self, part: Part, recording: Recording, stream: int, needs: Needs, home: Residence) -> None:
        self.log, self._stream, self._home, self._weight = part.log, stream, home, part.weight
        steps = [recording.body[k] for k in part.steps]
        self.lines = [recording.lines[k] for k in part.steps]
        body = [ins for ins in steps if isinstance(ins, Instruction)]
        own = {number for ins in body for number in ins.makes}
        used = dict.fromkeys(name for ins in body for name in ins.reads)
        used.update(dict.fromkeys(needs.kept.values()))
        used.update(dict.fromkeys(made.name for made in needs.results))
        # What it does not make itself comes as an operand.
        self.operands = [
            name for name in used if name[0] == ARGUMENT or (name[0] == MADE and name[1] not in own)
        ]
        self.operands.sort(key=lambda name: (name[0] != ARGUMENT, name[1]))
        self._numbers = sorted(
            {needs.numbers[int(k)] for kind, k in used if kind == FLOAT and k in needs.numbers}
        )
        self.made, self.memories = needs.results, needs.memories
        # These are the numbers of the memories that are a replay's own; -1 of others.
        self._own = [
            what if kind == OWN and isinstance(what, int) else -1
            for kind, what in (made.memory for made in self.made)
        ]
        # All its operands are arguments, most often: then their numbers are all that it needs.
        self._arguments = (
            None
            if any(name[0] != ARGUMENT for name in self.operands)
            else [int(name[1]) for name in self.operands]
        )
        # It may write these arguments' memory.
        self._written: Sequence[Any] = (
            self._arguments or ()
            if needs.memories is None
            else [where[1] for where, writes in needs.memories if writes and where and where[0] == GIVEN]
        )
        definition, reads = self._rendered(body, needs)
        by_ref = {handle.ref: handle for handle in needs.held.values()}
        # Nothing that it reads may be freed.
        self.held = [by_ref[ref] for ref in dict.fromkeys((*reads, *needs.kept))]
        self._kept = [by_ref[ref] for ref in needs.kept]
        self.definition = definition
        self._options: dict[str, object] = {} if needs.compile is None else {"compile": needs.compile}
        self._taking: Taking | None = None
        self._singles = [*zip(self.made, self._own)]
        self._several: Sequence[Row] = ()

    def _rendered(self, body: Sequence[Instruction], needs: Needs) -> tuple[list[object], dict[int, None]]:
        """Return the part as its worker learns it, and the refs of held values that it reads."""
        offsets = {name: 1 + n for n, name in enumerate(self.operands)}
        words = {number: 1 + len(offsets) + n for n, number in enumerate(self._numbers)}
        reads: dict[int, None] = {}

        def word(name: Name) -> list[object]:
            kind, what = name
            if name in offsets:
                return [ARGUMENT, offsets[name]]
            if kind == FLOAT:
                k = int(what)
                return [NUMBER, words[needs.numbers[k]]] if k in needs.numbers else [FLOAT, needs.floats[k]]
            if kind == HELD:
                ref = needs.held[str(what)].ref
                reads[ref] = None
                return [HELD, ref]
            return [MADE, what]

        rows: dict[int, int] = {}
        rendered = []
        for ins in body:
            row = rows.setdefault(ins.template, len(rows))
            kin = None if ins.kin is None else [word(name) for name in ins.kin]
            rendered.append([row, [word(name) for name in ins.words], list(ins.makes), kin])
        kept = [[ref, word(name)] for ref, name in needs.kept.items()]
        results = [word(made.name) for made in needs.results]
        templates = [list(self.log.templates.fields(number)) for number in rows]
        return [templates, rendered, kept, results, len(self.operands), len(self._numbers)], reads

    def learn_for(self, kinds: str) -> None:
        """Let its workers learn it. They compile code of its own for each word of `kinds`."""
        if kinds:
            self._options["kinds"] = kinds
        self._form = self._used = Form(self.log, self.definition, self._options)

    @property
    def makes(self) -> list[Name]:
        """What it makes and somebody else needs."""
        return [made.name for made in self.made]

    def take(self, arguments: Set[int]) -> None:
        """Let a replay empty the refs of these arguments, so that the worker frees each behind its last use.

        They stand under these refs until the worker has read them, and nobody may name them behind it.
        """
        own = {n: int(name[1]) for n, name in enumerate(self.operands) if name[0] == ARGUMENT}
        positions = [n for n, k in own.items() if k in arguments]
        options = {**self._options, "taken": [1 + n for n in positions]}
        form = Form(self.log, self.definition, options)
        mine = frozenset(own[n] for n in positions)
        self._taking = Taking(mine, positions, form, arguments) if positions else None

    def keep(self, names: Container[Name], specs: Mapping[int, Spec]) -> list[Name]:
        """Let one object own those of these results that share no memory with others; return which."""
        rows = [*zip(self.made, self._own)]
        others = {own for made, own in rows if made.name not in names}
        own_ones = [
            k
            for k, (made, own) in enumerate(rows)
            if made.name in names and own >= 0 and own not in others and made.follows is None
        ]
        if len(own_ones) < 2:
            return []
        single = [k for k in range(len(rows)) if k not in {*own_ones}]
        self._singles = [rows[k] for k in single]
        self._several = [
            Row(made.spec, made.place, own, specs.get(own, NO_TENSOR))
            for made, own in (rows[k] for k in own_ones)
        ]
        order = {k: n for n, k in enumerate((*single, *own_ones))}
        # It puts the refs of all into the order of the results.
        self._in_order = itemgetter(*(order[k] for k in range(len(rows))))
        return [self.made[k].name for k in own_ones]

    def issue(self, values: Values, numbers: Sequence[float], call: Line, name: str) -> None:
        """Issue it as one instruction. Block while the window is full."""
        log = self.log
        relieve(log)
        line = replayed(call, name, self.lines)
        # Another thread may begin a second stream until it is in the log.
        with log.lock:
            operands = self._operands(values)
            fresh, kept = self._make(values)
            made = [handle.ref for handle in fresh]
            words: list[object] = [0]
            words += [one if type(one) is int else one.ref for one in operands]
            words += [numbers[k] for k in self._numbers]
            words += made if kept is None else self._in_order(made + kept.refs)
            try:
                self._used = self._form_for(values, operands)
                words[0] = template_number(log, self._used.key, self._used.fields)
                log.weight += self._weight
                self._put(words, fresh, operands, values, line)
            except BaseException:
                log.in_doubt = True
                raise

    def _operands(self, values: Values) -> Sequence[Any]:
        """Return the handles of what it does not make itself; the refs of those that have no handle."""
        if self._arguments is None:
            return [values.handle(operand) for operand in self.operands]
        leaves = values.leaves
        operands = [leaves[k] for k in self._arguments]
        several = values.several
        if several is None or self.log.order is None:
            return operands
        if several.stream == self._on_stream() and not any(type(leaves[k]) is int for k in self._written):
            return operands
        handles = {handle.ref: handle for handle in several.opened()}
        values.leaves = [handles.get(one, one) if type(one) is int else one for one in leaves]
        return [values.leaves[k] for k in self._arguments]

    def _make(self, values: Values) -> tuple[list[Handle], Several | None]:
        """Make the handles of what it returns; return those, and what owns the others."""
        kept = None
        if self._several:
            stream = 0 if self.log.order is None else self._on_stream()
            kept = values.kept = Several(self._several, stream)
        fresh, handles, memories, specs = [], values.made, values.memories, values.specs
        # A graph may have hundreds of results. So what `storage` does for most of them is done here.
        for made, own in self._singles if kept is not None else zip(self.made, self._own):
            spec = made.spec if made.follows is None else moved(made.spec, made.follows, values.leaves)
            storage = memories.get(own)
            if storage is None:
                if own < 0:
                    storage = values.storage(made.memory)
                else:
                    storage = memories[own] = Storage(specs.get(own, NO_TENSOR))
            handle = handles[made.name] = Handle(next_ref(), spec, made.place, storage)
            fresh.append(handle)
        return fresh, kept

    def _form_for(self, values: Values, operands: Sequence[Any]) -> Form:
        """Return the form that a replay issues. Call under the log's lock."""
        taking, order = self._taking, self.log.order
        if taking is None or not (taking.known is values.alone or taking.arguments <= values.alone):
            return self._form
        if order is not None:
            stream = self._on_stream()
            # Another stream may still have to read it. What has no handle is this stream's.
            shared = [operands[n] for n in taking.positions if type(operands[n]) is not int]
            if not all(order.alone(one, stream) for one in shared):
                return self._form
        return taking.form

    def _on_stream(self) -> int:
        return stream_at(self._home) if self._stream < 0 else self._stream

    def _put(
        self, words: list[object], fresh: list[Handle], operands: Sequence[Any], values: Values, line: Line
    ) -> None:
        log, order = self.log, self.log.order
        if order is None:
            born = log.append(words, line)
            for handle in fresh:
                handle.born = born
            if values.kept is not None:
                values.kept.born = born
            # What it has written is read behind it, whatever that is.
            log.checked = born[0]
            return
        settle(log)
        stream = self._on_stream()
        reads: list[Handle] = [one for one in operands if type(one) is not int]
        unnamed = len(operands) - len(reads)
        reads += self.held
        written: list[Memory] = [order.generator]
        if self.memories is None:
            written += [handle.storage for handle in reads]
        else:
            written = [
                order.generator if where is None else values.storage(where)
                for where, writes in self.memories
                if writes
            ]
        written += [handle.storage for handle in self._kept]
        born = order.issue(stream, words, fresh, reads, written, line)
        order.checked[stream] = born[0]
        if values.kept is not None:
            values.kept.born = born
            order.own(values.kept.refs, stream)
        if unnamed and values.several is not None:
            values.several.read = born[0]
        for handle in self._kept:
            order.remake(handle, stream, born)

    def compiled(self) -> str:
        """Return what became of its compiling, on one of its workers. Block until that one is there."""
        log = self.log
        with log.lock:
            number = template_number(log, self._used.key, self._used.fields)
        if isinstance(log, MeshLog):
            return str(read_function(next(iter(log.ranks)), "compiled", [number, log.number]))
        assert isinstance(log, Node)
        return str(read_function(log, "compiled", [number, -1]))


class Bridge:
    """What a replay issues between parts, by the function that issues it outside programs."""

    def __init__(self, crossed: Crossed, recording: Recording, held: Mapping[str, Handle]) -> None:
        self.between: Between = crossed.between
        self._streams: Streams | None = crossed.streams
        cut = recording.body[crossed.step]
        assert not isinstance(cut, Instruction)
        self.reads = cut.reads
        self.makes: list[Name] = [(MADE, number) for number in cut.makes]
        self._held = {name: held[str(name[1])] for name in cut.reads if name[0] == HELD}
        self._line = recording.lines[crossed.step]
        # The memory of each value that it makes, if a part names that.
        self.memories: list[Where | None] = [None] * len(self.makes)

    def issue(self, values: Values, numbers: Sequence[float], call: Line, name: str) -> None:
        """Issue it. Block while a window is full."""
        reads = [self._held[one] if one in self._held else values.handle(one) for one in self.reads]
        line = replayed(call, name, [self._line])
        if self._streams is None:
            made = self.between.again(reads, line)
        else:
            token = current_streams.set(self._streams)
            try:
                made = self.between.again(reads, line)
            finally:
                current_streams.reset(token)
        for one, handle, where in zip(self.makes, made, self.memories):
            values.made[one] = handle
            if where is not None and isinstance(where[1], int):
                values.memories[where[1]] = handle.storage


def replayed(line: Line, name: str, lines: Sequence[Line | None]) -> Line:
    """Return the line of a replay of instructions that have these lines."""
    call = line[1]
    return line if call is None else (0, Replayed(call, name, lines), line[2])
