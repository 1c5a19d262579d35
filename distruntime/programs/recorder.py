"""How the words that logs got while a function ran become a recording, and which words none can hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..log.issue import Noted, Streams
from ..log.line import Line
from ..log.log import Log
from ..log.tape import NOTED, Piece, Tape, not_in_a_program
from ..wire.codec import KIN, OPERAND
from ..wire.messages import (
    ADOPT,
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
from .recording import Crossed, Cut, Instruction, Name, Part, Recording

# So many words stand before an instruction, or between two.
_SKIPPED = {CHECK: 3, WATCH: 1, FORGET: 2}
_REFUSED = {
    AWAIT: "wait for another node here",
    STAMP: "record an event here",
    MARK: "record an event here",
    HOST: "read a value",
    TAKE: "use a mesh's member here",
    GIVE: "put a mesh's tensor together here",
    PUBLISH: "publish",
    ADOPT: "look up what is published",
}
# These functions of the worker may stand in a program.
_FUNCTIONS = (
    *("distruntime::record", "distruntime::record_autocast", "distruntime::record_attention"),
    *("distruntime::replay_backward", "distruntime::resize_storage"),
    # A generator draws by these. A recurrent layer with dropout keeps the state that it draws from.
    *("distruntime::get_rng_state", "distruntime::draw_from", "distruntime::exchange_rng_state"),
)
# These operators have an offset among their constants, which counts from the begin of a memory.
_PLACED = ("aten::as_strided", "aten::set_")
# By a float of these, torch has decided something here: how large a result is, or by which operators it
# comes about. Nobody knows what operators of other packages decide. The list comes from a look through all
# operators of torch 2.13 that take a float and are made of others, or whose gradient is.
_DECIDES = re.compile(
    r"aten::(arange|range|_?upsample|native_dropout|bernoulli|rrelu|_?cdist|_pdist|norm\.|linalg_vector_norm|"
    r"dist(\.|$)|pow\.Tensor_Scalar|pow_\.Scalar|renorm|_foreach_norm|_foreach_pow|"
    r"\w*attention)|(?!aten::|distruntime::)"
).match


def of_autocast() -> str:
    """Say what to do where a tensor that cannot be found may be a cast that `torch.autocast` keeps."""
    if not (torch.is_autocast_enabled("remote") and torch.is_autocast_cache_enabled()):
        return ""
    return (
        ".\n  torch.autocast around the call keeps casts of parameters until it ends: enter it inside the "
        "function, or with cache_enabled=False"
    )


class _Recorder:
    """Puts what the tapes and notes hold into one order."""

    def __init__(self, names: dict[int, Name], first: bool, current: Streams) -> None:
        self.found, self._names, self._first, self._current = Recording(), names, first, current
        # The open part of each log. Another instruction of its stream belongs to it.
        self._open: dict[Log, Part] = {}
        self._events: dict[int, int] = {}

    def add_piece(self, log: Log, tape: Tape, piece: Piece, lines: Iterator[Line]) -> None:
        """Take words that a log has got."""
        for at, words, line in _instructions(piece, lines, self.found.freed):
            if not piece.own or piece.covered:
                continue
            stream = next((stream for stream, first, end in piece.bounds if first <= at < end), 0)
            part = self._part(log, stream)
            before = len(self.found.body)
            self._add(log, words, line)
            part.steps += range(before, len(self.found.body))
            part.weight += len(words)
            touched = tape.touched.get(piece.start + at + len(words))
            if touched is None:
                part.known = False
            else:
                for memory in touched.reads:
                    part.touch(memory, False)
                for memory in touched.writes:
                    part.touch(memory, True)
                for ref, memory in touched.made:
                    part.touch(memory, True)
                    if ref in self.found.made:
                        self.found.memories[self.found.made[ref]] = memory

    def _part(self, log: Log, stream: int) -> Part:
        """Return the part that an instruction belongs to."""
        for other in log.siblings():
            self._open.pop(other, None)
        part = self._open.get(log)
        if part is None or part.stream != stream:
            part = self._open[log] = Part(log, stream)
            self.found.acts.append(part)
        return part

    def add_note(self, noted: Noted) -> None:
        """Take what stands between parts."""
        found, between = self.found, noted.between
        for log in between.logs:
            for one in (log, *log.siblings()):
                self._open.pop(one, None)
        reads = tuple(self._name(ref, True, noted.line) for ref in between.reads)
        makes = []
        for ref, memory in zip(between.makes, between.storages):
            number = found.made.setdefault(ref, len(found.makers))
            makes.append(number)
            found.makers.append(len(found.body))
            found.memories[number] = memory
        key = between.key
        if between.sets is not None:
            key = (*key, self._events.setdefault(id(between.sets), len(self._events)))
        if between.uses is not None:
            # An event that was recorded outside is the same object at each call.
            outside = ("outside", id(between.uses))
            key = (*key, self._events.get(id(between.uses), outside))
        same = dict(noted.streams) == dict(self._current)
        found.several = found.several or not same or between.kind in ("record", "wait")
        found.acts.append(Crossed(len(found.body), between, None if same else noted.streams, noted.operands))
        found.body.append(Cut(between.kind, key, reads, tuple(makes)))
        found.lines.append(noted.line)

    def _add(self, log: Log, words: Sequence[object], line: Line | None) -> None:
        found = self.found
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
                found.body.append(Instruction(log.index, UPLOAD, (), (found.made[words[at + 1]],), None))  # type: ignore[index]
                found.lines.append(line)
                return
            at += 2
            word = words[at]
        assert isinstance(word, int)
        if word < FIRST_TEMPLATE:
            raise not_in_a_program(
                _REFUSED.get(word, f"hold the instruction {word}"), "do that outside", line
            )
        name, args, kwargs, results, *_ = log.templates.fields(word)
        _require_fit(str(name), line)
        if str(name).startswith(_PLACED):
            found.placed[word] = str(name)
        kinds = [*_operands(args), *(kind for value in kwargs.values() for kind in _operands(value))]  # type: ignore[attr-defined]
        count, floats = len(kinds), len(found.floats)
        operands = [
            self._name(value, kind, line) for kind, value in zip(kinds, words[at + 1 : at + 1 + count])
        ]
        if _DECIDES(str(name)):
            found.deciding.update(dict.fromkeys(range(floats, len(found.floats)), str(name)))
        rest, kin = words[at + 1 + count :], None
        makes: list[int] = []
        if results == KIN:
            refs = rest[0]
            if isinstance(refs, list):
                kin = tuple(self._name(ref, True, line) for ref in refs)
        else:
            for ref in rest:
                assert isinstance(ref, int)
                makes.append(found.made.setdefault(ref, len(found.makers)))
                found.makers.append(len(found.body))
        found.body.append(Instruction(log.index, word, tuple(operands), tuple(makes), kin))
        found.lines.append(line)

    def _name(self, value: object, is_ref: bool, line: Line | None) -> Name:
        found = self.found
        if not is_ref:
            assert isinstance(value, (int, float))
            found.floats.append(value)
            return FLOAT, len(found.floats) - 1
        assert isinstance(value, int)
        if value in found.made:
            return MADE, found.made[value]
        name = self._names.get(value)
        if name is None:
            if not self._first:
                raise not_in_a_program(
                    "use a tensor that cannot be found from its function: nobody would notice if another "
                    "took its place",
                    "pass it as an argument, or keep it in an object, a list or a dictionary that the "
                    f"function names{of_autocast()}",
                    line,
                )
            found.unfit = "it did what is done once"
            return HELD, f"ref {value}"
        return name


@contextmanager
def taping(logs: Iterable[Log]) -> Iterator[list[tuple[Log, Tape]]]:
    """Let each of these logs note what it gets, until the block ends."""
    tapes: list[tuple[Log, Tape]] = []
    try:
        for log in logs:
            with log.lock:
                log.flush()
                tape = Tape(log)
                log.tapes.append(tape)
                if log.active:
                    log.enough = NOTED
            tapes.append((log, tape))
        yield tapes
    finally:
        for log, tape in tapes:
            # What was let go of until now is on it.
            with log.lock:
                log.flush()
                log.tapes.remove(tape)
                log.look_at_window()


def record(
    tapes: Sequence[tuple[Log, Tape]],
    notes: Sequence[Noted],
    names: dict[int, Name],
    first: bool,
    current: Streams,
) -> Recording:
    """Return what the tapes and the notes hold. `names` has the refs of arguments, and of what was found
    before the run; `current` are the streams that were current then.

    Raise `NotSupportedError` for what no program can hold.
    """
    recorder = _Recorder(names, first, current)
    lines = {log: iter(tape.lines) for log, tape in tapes}
    events: list[tuple[int, Log, Tape, Piece] | tuple[int, Noted]] = [(noted.tick, noted) for noted in notes]
    events += [(piece.tick, log, tape, piece) for log, tape in tapes for piece in tape.pieces]
    for event in sorted(events, key=lambda one: one[0]):
        if len(event) == 2:
            recorder.add_note(event[1])
        else:
            _, log, tape, piece = event
            recorder.add_piece(log, tape, piece, lines[log])
    found = recorder.found
    streams: dict[Log, set[int]] = {}
    for part in found.parts:
        streams.setdefault(part.log, set()).add(part.stream)
    own = {(entered.residence.node, entered.number) for entered in current.values()}
    for log, used in streams.items():
        mine = {number for node, number in own if node is log} or {0}
        found.several = found.several or len(used) > 1 or not used <= mine
    found.streams = [(part.log.index, part.stream if found.several else -1) for part in found.parts]
    return found


def _instructions(
    piece: Piece, lines: Iterator[Line], freed: set[int]
) -> Iterator[tuple[int, Sequence[object], Line | None]]:
    """Yield each instruction of a piece with its index and its line. What was freed goes to `freed`.

    The line table says where each instruction ends.
    """
    words, start = piece.words, piece.start
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
        elif word == WAIT:
            # The rules of the order put it there. They hold for a replay too.
            at += 5
        elif word == MARK:
            at += 1
        else:
            line = next(lines, None)
            while line is not None and line[0] <= start + at:
                line = next(lines, None)
            end = count if line is None else min(line[0] - start, count)
            yield at, words[at:end], line
            at = end


def _require_fit(name: str, line: Line | None) -> None:
    if name.startswith("group::"):
        raise not_in_a_program("close a group, or use one that nobody has noted", "do that outside", line)
    if name.startswith("python::"):
        raise not_in_a_program("call a function of yours on a worker yet", "call it outside", line)
    if name.startswith("distruntime::") and name not in _FUNCTIONS:
        raise not_in_a_program(f"hold {name}", "call it outside: seeds and settings belong there", line)


def _operands(pattern: object) -> Iterator[bool]:
    """Yield for each operand word of a pattern whether it is a ref."""
    if pattern == OPERAND:
        yield True
    elif pattern == ["number"]:
        yield False
    elif isinstance(pattern, list):
        for item in pattern:
            yield from _operands(item)
