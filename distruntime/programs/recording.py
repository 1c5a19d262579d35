"""One run of a function as the words that its logs got, with values named by where they come from.

It is cut into parts: consecutive instructions of one stream of one log. Between parts stands what names
something outside: a copy, a collective, an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..log.handle import Residence
from ..log.issue import Between, Streams
from ..log.line import Line, line_text
from ..log.log import Log
from ..log.spec import Spec
from ..wire.messages import FLOAT

# A value made here, the k-th argument, what was found at a path, or the k-th float of the recording.
Name = tuple[str, int | str]
# A memory that a part reads or writes: this object, and whether it is written.
Memories = dict[int, tuple[object, bool]]


@dataclass(frozen=True)
class Instruction:
    """One instruction: its log and template, its operand words, what it makes, and its operands' kin if it
    checks.
    """

    log: int
    template: int
    words: tuple[Name, ...]
    makes: tuple[int, ...]
    kin: tuple[Name, ...] | None

    @property
    def reads(self) -> tuple[Name, ...]:
        """Its operands, and their kin."""
        return *self.words, *(self.kin or ())


@dataclass(frozen=True)
class Cut:
    """What stands between two parts, as far as two recordings must agree in it."""

    kind: str
    key: tuple[object, ...]
    reads: tuple[Name, ...]
    makes: tuple[int, ...]


@dataclass
class Part:
    """Consecutive instructions of one stream of a log, by their numbers."""

    log: Log
    stream: int
    steps: list[int] = field(default_factory=list)
    weight: int = 0
    # The key is the object's id. They are not known where the log has one stream.
    memories: Memories = field(default_factory=dict)
    known: bool = True

    def touch(self, memory: object, written: bool) -> None:
        """Note a memory that it uses."""
        before = self.memories.get(id(memory), (memory, False))[1]
        self.memories[id(memory)] = memory, before or written


@dataclass
class Crossed:
    """How to issue what stands between two parts: its number, and the streams that were current then."""

    step: int
    between: Between
    streams: Streams | None
    operands: Sequence[tuple[Spec, Residence]]


@dataclass
class Recording:
    """The instructions of one run."""

    body: list[Instruction | Cut] = field(default_factory=list)
    lines: list[Line | None] = field(default_factory=list)
    acts: list[Part | Crossed] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    # By these, torch has decided something: each has the name of its operator.
    deciding: dict[int, str] = field(default_factory=dict)
    # The number of each value that was made, by its ref, and the instruction that made it.
    made: dict[int, int] = field(default_factory=dict)
    makers: list[int] = field(default_factory=list)
    # The memory of a value that was made, where its log has several streams or it crosses.
    memories: dict[int, object] = field(default_factory=dict)
    # Where a template says where in a memory something begins, this is the name of its operator.
    placed: dict[int, str] = field(default_factory=dict)
    # These refs were let go of meanwhile.
    freed: set[int] = field(default_factory=set)
    # This is why the run is compared with no other: a call may do what is done once.
    unfit: str = ""
    # It is True if it names its streams: the current one is not all that it uses.
    several: bool = False
    # This is each part's log and stream. A stream that is the current one in each call is -1.
    streams: list[tuple[int, int]] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """The parts, in order."""
        return [act for act in self.acts if isinstance(act, Part)]

    def read(self) -> list[Name]:
        """Return the names of all that its instructions read."""
        return [name for one in self.body for name in one.reads]

    def cut(self, crossed: Crossed) -> Cut:
        """Return what stands between two parts."""
        found = self.body[crossed.step]
        assert isinstance(found, Cut)
        return found

    def crossed(self) -> dict[Name, Spec]:
        """Return what it has handed to what stands between its parts."""
        return {
            name: spec
            for act in self.acts
            if isinstance(act, Crossed)
            for name, (spec, _) in zip(self.cut(act).reads, act.operands)
        }

    def renamed(self, names: Mapping[Name, Name]) -> Recording:
        """Return this recording with other names for some of its values."""

        def all_of(old: Sequence[Name]) -> tuple[Name, ...]:
            return tuple(names.get(name, name) for name in old)

        body: list[Instruction | Cut] = []
        for one in self.body:
            if isinstance(one, Cut):
                body.append(replace(one, reads=all_of(one.reads)))
            else:
                kin = None if one.kin is None else all_of(one.kin)
                body.append(replace(one, words=all_of(one.words), kin=kin))
        return replace(self, body=body)

    def settle(self) -> None:
        """Let go of all that only a plan needs."""
        self.acts = []
        self.memories = {}

    def where(self, ref: int) -> str:
        """Return the line that made a value here."""
        return line_text(self.lines[self.makers[self.made[ref]]])

    def line_of(self, step: int) -> str:
        """Return the line of an instruction, by its number."""
        return line_text(self.lines[step])

    def line_of_float(self, number: int) -> str:
        """Return the line of the instruction that has a float, by the float's number."""
        for instruction, line in zip(self.body, self.lines):
            if isinstance(instruction, Instruction) and (FLOAT, number) in instruction.words:
                return line_text(line)
        return line_text(None)


def difference(one: Recording, other: Recording) -> str:
    """Say where two recordings differ in their instructions, or return nothing. Floats are not compared."""
    for k, (a, b) in enumerate(zip(one.body, other.body)):
        if a != b:
            return (
                f"instruction {k} is another one\n  in one recording   {line_text(one.lines[k])}\n"
                f"  in the next one    {line_text(other.lines[k])}"
            )
    if one.streams != other.streams:
        return "its parts are on other streams"
    if len(one.body) != len(other.body):
        return f"one recording has {len(one.body)} instructions, and the next one has {len(other.body)}"
    return ""
