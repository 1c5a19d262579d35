"""One run of a function as the words that its log got, with values named by where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import NotSupportedError
from ..log.line import Line, line_text
from ..log.log import Log
from ..log.node import Node
from ..log.tape import Tape, recorded
from ..wire.codec import KIN, OPERAND
from ..wire.messages import (
    ADOPT,
    ARGUMENT,
    AWAIT,
    CHECK,
    DROP,
    FIRST_TEMPLATE,
    FLOAT,
    FORGET,
    GIVE,
    HELD,
    HOST,
    LEARN,
    MADE,
    MARK,
    PUBLISH,
    RELEASE,
    STAMP,
    TAKE,
    UPLOAD,
    WAIT,
    WATCH,
)

# A value made here, the k-th argument, what was found at a path, or the k-th float of the recording.
Name = tuple[str, int | str]
# So many words stand before an instruction, or between two.
_SKIPPED = {CHECK: 3, WATCH: 1, FORGET: 2}
_REFUSED = {
    WAIT: "wait for another stream",
    AWAIT: "wait for another node",
    STAMP: "record an event",
    MARK: "record an event",
    HOST: "read a value",
    TAKE: "use a mesh's member",
    GIVE: "put a mesh's tensor together",
    PUBLISH: "publish",
    ADOPT: "look up what is published",
}
# These functions of the worker may stand in a program.
_FUNCTIONS = (
    *("distruntime::record", "distruntime::record_autocast", "distruntime::record_attention"),
    *("distruntime::replay_backward", "distruntime::resize_storage", "distruntime::exchange_rng_state"),
)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its template, its operand words, what it makes, and its operands' kin if it checks."""

    template: int
    words: tuple[Name, ...]
    makes: tuple[int, ...]
    kin: tuple[Name, ...] | None


@dataclass
class Recording:
    """The instructions of one run."""

    # It is None where the run issued nothing.
    log: Node | None = None
    body: list[Instruction] = field(default_factory=list)
    lines: list[Line | None] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    # The number of each value that was made, by its ref, and the instruction that made it.
    made: dict[int, int] = field(default_factory=dict)
    makers: list[int] = field(default_factory=list)
    # These refs were let go of meanwhile.
    freed: set[int] = field(default_factory=set)
    # So many words were issued.
    weight: int = 0
    # This is why the run is compared with no other: a call may do what is done once.
    unfit: str = ""

    def where(self, ref: int) -> str:
        """Return the line that made a value here."""
        return line_text(self.lines[self.makers[self.made[ref]]])

    def line_of_float(self, number: int) -> str:
        """Return the line of the instruction that has a float, by the float's number."""
        for instruction, line in zip(self.body, self.lines):
            if (FLOAT, number) in instruction.words:
                return line_text(line)
        return line_text(None)


def record(tapes: Sequence[tuple[Log, Tape]], names: dict[int, Name], first: bool) -> Recording:
    """Return what the tapes hold. `names` has the refs of arguments, and of what was found before the run.

    Raise `NotSupportedError` for what no program can hold.
    """
    found = Recording()
    for log, tape in tapes:
        lines = iter(tape.lines)
        for piece in tape.pieces:
            for words, line in _instructions(piece.words, piece.start, lines, found.freed, tape.begin):
                if not piece.own:
                    continue
                if not isinstance(log, Node):
                    raise _refused("run on a mesh yet", line, "call it for a member's tensor, x.member(k)")
                if found.log not in (None, log):
                    raise _refused(
                        f"hold instructions of several nodes yet: {found.log} and {log}",
                        line,
                        "make a program for each node, and copy between them",
                    )
                if len(piece.streams) > 1:
                    raise _refused("use several streams yet", line, "use one stream in it")
                found.log = log
                _add(found, log, words, line, names, first)
    return found


def _refused(what: str, line: Line | None, remedy: str) -> NotSupportedError:
    return NotSupportedError(
        f"a program cannot {what}\n  issued at {line_text(line)}\n"
        f"  in the program {recorded.name!r}\n  {remedy}"
    )


def _instructions(
    words: Sequence[object], start: int, lines: Iterator[Line], freed: set[int], begin: int
) -> Iterator[tuple[Sequence[object], Line | None]]:
    """Yield each instruction of a piece with its line. What was freed goes to `freed`.

    The line table says where each instruction ends.
    """
    at, count = 0, len(words)
    while at < count:
        word = words[at]
        assert isinstance(word, int)
        if word < 0:
            freed.add(-word)
            at += 1
        elif word == RELEASE:
            freed.add(words[at + 1])  # type: ignore[arg-type]
            at += 3
        elif word in (FORGET, DROP):
            at += 2
        elif word == WAIT and words[at + 2] <= begin:  # type: ignore[operator]
            # It is for what was issued before. A replay waits by the same rules.
            at += 5
        else:
            line = next(lines, None)
            while line is not None and line[0] <= start + at:
                line = next(lines, None)
            end = count if line is None else min(line[0] - start, count)
            yield words[at:end], line
            at = end


def _add(
    found: Recording,
    log: Node,
    words: Sequence[object],
    line: Line | None,
    names: dict[int, Name],
    first: bool,
) -> None:
    at, word = 0, words[0]
    while word in _SKIPPED:
        at += _SKIPPED[word]
        word = words[at]
    if word in (LEARN, UPLOAD):
        # The call itself is refused where it does so each time.
        found.unfit = "it did what is done once"
        if word == UPLOAD:
            found.made[words[at + 1]] = len(found.makers)  # type: ignore[index]
            found.makers.append(len(found.body))
            found.body.append(Instruction(UPLOAD, (), (found.made[words[at + 1]],), None))  # type: ignore[index]
            found.lines.append(line)
            return
        at += 2
        word = words[at]
    assert isinstance(word, int)
    if word < FIRST_TEMPLATE:
        raise _refused(_REFUSED.get(word, f"hold the instruction {word}"), line, "do that outside")
    name, args, kwargs, results, *_ = log.templates.fields(word)
    _require_fit(str(name), line)
    kinds = [*_operands(args), *(kind for value in kwargs.values() for kind in _operands(value))]  # type: ignore[attr-defined]
    count = len(kinds)
    operands = [
        _name(found, value, kind, line, names, first)
        for kind, value in zip(kinds, words[at + 1 : at + 1 + count])
    ]
    rest, kin = words[at + 1 + count :], None
    makes: list[int] = []
    if results == KIN:
        refs = rest[0]
        if isinstance(refs, list):
            kin = tuple(_name(found, ref, True, line, names, first) for ref in refs)
    else:
        for ref in rest:
            assert isinstance(ref, int)
            makes.append(found.made.setdefault(ref, len(found.makers)))
            found.makers.append(len(found.body))
    found.body.append(Instruction(word, tuple(operands), tuple(makes), kin))
    found.lines.append(line)
    found.weight += len(words) - at


def _require_fit(name: str, line: Line | None) -> None:
    if name.startswith("group::"):
        raise _refused("hold a collective or a copy between nodes yet", line, "do that outside")
    if name.startswith("python::"):
        raise _refused("call a function of yours on a worker yet", line, "call it outside")
    if name.startswith("distruntime::") and name not in _FUNCTIONS:
        raise _refused(f"hold {name}", line, "call it outside: seeds and settings belong there")


def _operands(pattern: object) -> Iterator[bool]:
    """Yield for each operand word of a pattern whether it is a ref."""
    if pattern == OPERAND:
        yield True
    elif pattern == ["number"]:
        yield False
    elif isinstance(pattern, list):
        for item in pattern:
            yield from _operands(item)


def _name(
    found: Recording, value: object, is_ref: bool, line: Line | None, names: dict[int, Name], first: bool
) -> Name:
    if not is_ref:
        assert isinstance(value, (int, float))
        found.floats.append(float(value))
        return FLOAT, len(found.floats) - 1
    assert isinstance(value, int)
    if value in found.made:
        return MADE, found.made[value]
    name = names.get(value)
    if name is None:
        if not first:
            raise _refused(
                "use a tensor that cannot be found from its function: nobody would notice if another "
                "took its place",
                line,
                "pass it as an argument, or keep it in an object, a list or a dictionary that the function "
                "names",
            )
        found.unfit = "it did what is done once"
        return HELD, f"ref {value}"
    return name


def is_state(name: Name) -> bool:
    """Whether a name is that of an argument or of what was found before."""
    return name[0] in (ARGUMENT, HELD)


def difference(one: Recording, other: Recording) -> str:
    """Say where two recordings differ in their instructions, or return nothing. Floats are not compared."""
    for k, (a, b) in enumerate(zip(one.body, other.body)):
        if a != b:
            return (
                f"instruction {k} is another one\n  in one recording   {line_text(one.lines[k])}\n"
                f"  in the next one    {line_text(other.lines[k])}"
            )
    if len(one.body) != len(other.body):
        return f"one recording has {len(one.body)} instructions, and the next one has {len(other.body)}"
    return ""
