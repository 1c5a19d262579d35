"""A program as a step: one instruction of the log that does what many did while it was recorded.

It runs as straight-line code where no link concerns its parts, and else part by part, each as the template
that it would be outside a program. Where an operator fails, the rest runs part by part too. So what does not
depend on the failure is there, and nothing is paid for that before it happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from distruntime.errors import ProtocolError
from distruntime.wire.messages import ARGUMENT, FLOAT, HELD, MADE, PROGRAM, Failure, Plain, Segment

from ..log.state import State
from ..values.objects import Poisoned, memory_of
from ..values.step import Run, Slots, Step, Words, int_word, list_word
from ..values.streams import Work
from .cuda_graphs import graphs_for
from .definition import Definition, Instruction, Name, Row, definition_from
from .inductor import inductor_for
from .regions import Inputs, bases_of
from .source import NotBegun, Source, Stopped, Straight, last_uses, local

# Names of values while a program runs part by part. No word of a log is so small a number.
_temporary = itertools.count(-(1 << 60)).__next__


class Program(Step):
    """One program. Streams of a session may run it at the same time, as it keeps nothing of a run."""

    name = PROGRAM

    def __init__(
        self,
        fields: list[Plain],
        options: dict[str, Plain],
        state: State,
        compiled: Callable[[Row], Step],
        warn: Callable[[Words, int, str], None],
    ) -> None:
        definition = self._definition = definition_from(fields)
        compile = options.get("compile")
        self._state, real = state, state.devices.real
        self.parts: Sequence[Step] = [compiled(row) for row in definition.rows]
        parts = self.parts
        self._patterns = [part.pattern for part in parts if part.pattern is not None]
        # Several members of a mesh run each instruction in turns.
        self._in_turns = any(part.lanes for part in parts)
        _require_sense(definition, parts)
        self.runs: Sequence[Run] = [part.run for part in parts]
        first = 1 + definition.tensors + definition.numbers
        self.length = first + len(definition.results)
        self.reads = list(range(1, 1 + definition.tensors))
        self.writes = list(range(first, self.length))
        self.devices = list(dict.fromkeys(device for part in parts for device in part.devices))
        kept = {ref for ref, _ in definition.kept}
        self._moved = kept
        self._written = _written(definition, parts)
        self.mutates = [k for kind, k in self._written if kind == ARGUMENT and isinstance(k, int)]
        self._source: Source | None = None
        self._straight: Straight | None = None
        self._real = real
        self._graphs = graphs_for(compile, definition, parts, self._written, kept, state.one_stream, warn)
        self.holds_generators = self._graphs is not None
        # These are emptied when they are read, so that each value is freed behind its last use. A CUDA graph
        # reads its arguments more than once.
        self._emptied: set[Name] = {(HELD, ref) for ref in kept}
        if self._graphs is None:
            self._emptied.update(_taken(options, definition))
        self._behind = last_uses(definition, self._emptied)
        asked = None if self._in_turns or self._graphs is not None else compile
        self._inductor = inductor_for(asked, definition, parts, self._written, real, warn)

    @property
    def compiled(self) -> str:
        """What became of its compiling, if it is to be compiled."""
        if self._graphs is not None:
            return self._graphs.state
        return "" if self._inductor is None else self._inductor.state

    def run(self, slots: Slots, p: Words, i: int, /) -> int:
        """Run the instruction at `i`."""
        if self._in_turns or any(run is not part.run for run, part in zip(self.runs, self.parts)):
            self._run_parts(slots, p, i, 0, {})
            return i + self.length
        source, straight = self._source, self._straight
        if self._inductor is not None:
            if self._inductor.may_begin(slots, p, i):
                straight = None
            elif (ready := self._inductor.ready(slots, p, i)) is not None:
                source, straight = ready
        try:
            if straight is None:
                self._run_first(slots, p, i)
            elif self._graphs is None or not self._graphs.ran(straight, slots, p, i):
                straight(slots, p, i)
        except Stopped as stopped:
            assert isinstance(stopped.__cause__, Exception)
            self._finish(slots, p, i, stopped, stopped.__cause__)
        # An operator may raise anything, and its results are poisoned then.
        except Exception as error:
            assert source is not None
            failures = self._state.work(p).failures
            before, ended = len(failures), source.stopped_in(error)
            again = not ended.failed and not isinstance(error, NotBegun)
            self._finish(slots, p, i, ended, error)
            # It would raise at each run, and each run would be the slow one.
            if self._inductor is not None and again and len(failures) == before:
                text = str(error).strip().partition("\n")[0][:300]
                self._inductor.give_up(f"its code raises {type(error).__name__}: {text}")
        return i + self.length

    def _run_first(self, slots: Slots, p: Words, i: int) -> None:
        source = Source(self._definition, self._patterns, self._emptied, self._real)
        inductor = self._inductor
        if inductor is None or not inductor.may_begin(slots, p, i):
            self._straight, self._source = source.first_run(slots, p, i), source
            return
        inputs = Inputs()
        self._straight = source.first_run(slots, p, i, inductor.regions, inputs)
        self._source = source
        inductor.begin(source, inputs)

    # -- part by part ----------------------------------------------------------------------------------------

    def _finish(self, slots: Slots, p: Words, i: int, stopped: Stopped, error: Exception) -> None:
        """Run what is left of a program after an error in its straight-line code."""
        refs: dict[Name, int] = {}
        wanted = [(MADE, k) for instruction in self._definition.instructions for k in instruction.makes]
        for name in (*wanted, *self._emptied):
            if local(name) in stopped.values:
                refs[name] = _temporary()
                slots[refs[name]] = stopped.values[local(name)]
        at, failed = stopped.at, stopped.failed
        compiled = len(failed) > 1
        if compiled:
            lines = f"it is in one of {len(failed)} instructions from this one on, compiled by Inductor"
            error = RuntimeError(f"{error}\n  {lines}").with_traceback(error.__traceback__)
        # The locals of the code that has failed would keep what is freed on the way.
        stopped.values.clear()
        stopped.__cause__, error.__traceback__ = None, error.__traceback__
        self._run_parts(slots, p, i, at, refs, error, failed, compiled)

    def _run_parts(
        self,
        slots: Slots,
        p: Words,
        i: int,
        start: int,
        refs: dict[Name, int],
        error: BaseException | None = None,
        failed: range = range(0),
        compiled: bool = False,
    ) -> None:
        """Run the instructions from `start` on, each as a template of its own.

        Those in `failed` fail with `error`. It is one failure if they are `compiled` to one call.
        """
        cause: Failure | None = None
        definition, state, outer = self._definition, self._state, self._state.work(p)
        segment = Segment(outer.segment.seq, outer.segment.start + i, [], [], [])
        words: Words = []
        work = Work(segment, [], 0, outer.failures, outer.corrections, outer.mesh)
        state.under_way[id(words)] = work
        try:
            for at in range(max(start, 0), len(definition.instructions)):
                instruction = definition.instructions[at]
                work.part = at
                words[:] = [0, *(self._word(name, p, i, refs) for name in instruction.words)]
                for number in instruction.makes:
                    refs[MADE, number] = _temporary()
                    words.append(refs[MADE, number])
                part = self.parts[instruction.row]
                if part.kin is not None:
                    kin = instruction.kin
                    words.append(None if kin is None else [self._word(name, p, i, refs) for name in kin])
                if error is not None and at in failed:
                    if compiled:
                        cause = cause or state.failure(words, 0, error, part.name, "")
                        state.poison(part, slots, words, 0, cause)
                    else:
                        part.drop(slots, words, 0, error)
                else:
                    self.runs[instruction.row](slots, words, 0)
                for name in self._behind[at]:
                    slots.pop(self._word(name, p, i, refs), None)
        finally:
            del state.under_way[id(words)]
        kept = [(ref, slots[self._word(name, p, i, refs)]) for ref, name in definition.kept]
        made = [slots[self._word(name, p, i, refs)] for name in definition.results]
        for ref in self._moved:
            slots.pop(ref, None)
        for ref in refs.values():
            slots.pop(ref, None)
        for ref, value in kept:
            slots[ref] = value
        for k, value in zip(self.writes, made):
            slots[p[i + k]] = value

    def _word(self, name: Name, p: Words, i: int, refs: dict[Name, int]) -> Plain:
        kind, what = name
        if kind == FLOAT:
            return what
        if name in refs:
            return refs[name]
        assert isinstance(what, int)
        return what if kind == HELD else p[i + what]

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """Poison what the program would have made or written."""
        if self._in_turns:
            self._run_parts(slots, p, i, 0, {}, error, range(len(self._definition.instructions)))
            return i + self.length
        state = self._state
        cause = state.failure(p, i, error, self.name, "")
        for kind, what in self._written:
            ref = what if kind == HELD else p[i + what] if isinstance(what, int) else None
            memory = memory_of(slots.get(ref))
            if memory is not None:
                state.spread(slots, memory, cause)
            slots[ref] = Poisoned(cause)
        for ref in self._moved:
            slots[ref] = Poisoned(cause)
        for k in self.writes:
            slots[p[i + k]] = Poisoned(cause)
        return i + self.length


def _taken(options: dict[str, Plain], definition: Definition) -> set[Name]:
    """Return the arguments that nobody names behind the program, as its master says."""
    taken = [int_word(k) for k in list_word(options.get("taken", []))]
    if not all(1 <= k <= definition.tensors for k in taken):
        raise ProtocolError(f"a program takes arguments {taken!r:.40} of {definition.tensors}")
    needed = {*definition.results, *(name for _, name in definition.kept)}
    found: set[Name] = {(ARGUMENT, k) for k in taken}
    return found - needed


def _require_sense(definition: Definition, parts: Sequence[Step]) -> None:
    """Raise `ProtocolError` unless each instruction has the words of its template, and values that exist."""
    made: set[Name] = set()
    for instruction in definition.instructions:
        if not 0 <= instruction.row < len(parts):
            raise ProtocolError(f"a program names row {instruction.row} of {len(parts)}")
        part = parts[instruction.row]
        checks = part.kin is not None
        length = 1 + len(instruction.words) + len(instruction.makes) + checks
        if part.length != length:
            raise ProtocolError(f"an instruction of a program has {length} words for {part.name}")
        _require_known(instruction, made, definition)
        made.update((MADE, number) for number in instruction.makes)
    for name in (*(name for _, name in definition.kept), *definition.results):
        if name[0] == MADE and name not in made:
            raise ProtocolError(f"a program keeps the value {name[1]}, which it does not make")


def _require_known(instruction: Instruction, made: set[Name], definition: Definition) -> None:
    most = 1 + definition.tensors + definition.numbers
    for name in (*instruction.words, *(instruction.kin or ())):
        kind, what = name
        inside = kind in (FLOAT, HELD) or (kind == MADE and name in made)
        if not inside and not (kind != MADE and isinstance(what, int) and 1 <= what < most):
            raise ProtocolError(f"a program reads {kind} {what!r:.20}, which is not there")


def _written(definition: Definition, parts: Sequence[Step]) -> list[Name]:
    """Return the arguments and held values that a program writes, also through views."""
    bases = bases_of(definition, parts)
    found: dict[Name, None] = {}
    for instruction in definition.instructions:
        part = parts[instruction.row]
        for k in (*part.mutates, *part.unsaid):
            name = instruction.words[k - 1]
            found.update(dict.fromkeys(bases.get(name, {name})))
    return [name for name in found if name[0] in (ARGUMENT, HELD)]
