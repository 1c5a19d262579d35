"""What a log gets while a program is recorded, and the log of a node that has streams.

A tape changes nothing of what is sent. It notes each instruction by itself, in the thread that issues it. So
it knows whose the words are, and other threads may issue meanwhile. The words of a node with streams are
divided into stretches, each the consecutive words of one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, Protocol

from ..errors import NotSupportedError
from .line import Line, line_text, user_line

# It has a stream and the index of its first word.
Stretch = list[int]


class StretchedLog(list[object]):
    """Takes the place of a node's plain log as soon as the node has a second stream.

    Who still holds the plain log's ways (`log += words`, `log.append(-ref)`: a thread that was on the hot
    path in that moment) writes to stream 0, where everything was until then, and `stray` is called: nobody
    has noted what it reads.
    """

    def __init__(
        self,
        free: Callable[[int], None],
        stray: Callable[[], None],
        words: Iterable[object] = (),
        stretches: Iterable[Stretch] = (),
    ) -> None:
        super().__init__(words)
        self.stretches = list(stretches)
        self.size = len(self)
        self._free, self._stray = free, stray

    def __iadd__(self, words: Sequence[object]) -> StretchedLog:  # type: ignore[misc, override]
        fresh, count = ([0, 0],), len(words)
        if not self.stretches or self.stretches[-1][0] != 0:
            fresh[0][1] = self.size
            self.stretches += fresh
        self.size += count
        self.extend(words)
        self._stray()
        return self

    def append(self, word: object) -> None:
        """Take the word of a free."""
        assert isinstance(word, int)
        self._free(-word)

    def clear(self) -> None:
        """Drop everything."""
        self.stretches.clear()
        self.size = 0
        super().clear()

    def stretched(self, taken: int) -> list[Stretch]:
        """Return the stretches of the first `taken` words as [stream, number of words]."""
        return [
            [stream, min(end, taken) - first]
            for stream, first, end in self.bounds()
            if first < min(end, taken)
        ]

    def rest(self, taken: int) -> StretchedLog:
        """Return a log of what follows the first `taken` words.

        If a finalizer puts words here meanwhile, it lacks them: whoever calls this counts, and calls again.
        """
        # They come before their stretches. Otherwise it could have words that are in no stretch.
        words = self[taken:]
        left = [[stream, max(first - taken, 0)] for stream, first, end in self.bounds() if end > taken]
        return StretchedLog(self._free, self._stray, words, left)

    def bounds(self) -> list[tuple[int, int, int]]:
        """Return (stream, index of its first word, index behind its last) of each stretch."""
        ends = [first for _, first in self.stretches[1:]] + [len(self)]
        return [(stream, first, end) for (stream, first), end in zip(self.stretches, ends)]


class Stretchable(Protocol):
    """A log as it is seen from here: `base` is the position of its first word."""

    words: list[object]
    base: int
    latest: Sequence[object]


def put(node: Stretchable, stream: int, words: Sequence[object], *, instruction: bool = False) -> int:
    """Append words to a stream of a node's log; return the position after them.

    Frees and waits are no instruction, and so never the node's `latest`.
    """
    # A finalizer that runs in here may issue something, and have the log sent. One can run at an allocation
    # or a call. So allocations and calls stand before the log is looked up, or after all is done, and no
    # `isinstance` stands between.
    fresh, count = ([stream, 0],), len(words)
    log: StretchedLog = node.words  # type: ignore[assignment]
    end: int = node.base + log.size + count
    stretches = log.stretches
    if not stretches or stretches[-1][0] != stream:
        fresh[0][1] = log.size
        log.stretches += fresh
    log.size += count
    if instruction:
        node.latest = words
    log.extend(words)
    return end


# A log with a tape looks at what has gathered when it has more words than this: see `Log.flush`.
NOTED = -1
# It orders what different logs get.
tick = count().__next__


class Taped(Protocol):
    """A log as it is seen from here."""

    words: list[object]
    line_table: list[Line]
    base: int


class Named(Protocol):
    """What has a number by which the worker knows it."""

    @property
    def ref(self) -> int:
        """The number."""


class Value(Named, Protocol):
    """A handle as it is seen from here."""

    @property
    def storage(self) -> object:
        """The memory that it shares with its views."""


class Piece(NamedTuple):
    """Words that one thread has issued, and the position of the first.

    `bounds` has (stream, index of its first word, index behind its last) of each stretch. A `covered` piece
    is issued again by what stands between a program's parts.
    """

    tick: int
    own: bool
    covered: bool
    start: int
    words: Sequence[object]
    bounds: Sequence[tuple[int, int, int]]


class Touched(NamedTuple):
    """The memory that one instruction reads, and what it writes or makes, on a log with several streams."""

    reads: Sequence[object]
    writes: Sequence[object]
    made: Sequence[tuple[int, object]]


class Tape:
    """The words of one log, from now on. Call all of it under the log's lock."""

    def __init__(self, log: Taped) -> None:
        self._thread = threading.get_ident()
        # The key is the position after an instruction.
        self.touched: dict[int, Touched] = {}
        # The first word that it may note has this position.
        self.begin = self._seen = log.base + len(log.words)
        self.pieces: list[Piece] = []
        # These are the lines of the words, by the position after each instruction.
        self.lines: list[Line] = []

    def take(self, log: Taped) -> None:
        """Note what the log has got since the last call. The thread that issued it calls this."""
        words, start = log.words, self._seen
        end = log.base + len(words)
        if end == start:
            return
        first = start - log.base
        bounds = [(0, 0, end - start)]
        if isinstance(words, StretchedLog):
            bounds = [
                (stream, max(at - first, 0), behind - first)
                for stream, at, behind in words.bounds()
                if behind > first
            ]
        own = threading.get_ident() == self._thread
        if own and recorded.aside:
            # It may have come in the midst of an instruction, which is in these words too.
            own, recorded.mixed = False, True
        covered = own and recorded.covered
        self.pieces.append(Piece(tick(), own, covered, start, words[first:], bounds))
        lines = log.line_table
        k = len(lines)
        while k and lines[k - 1][0] > start:
            k -= 1
        self.lines += lines[k:]
        self._seen = end

    def touch(
        self, end: int, fresh: Sequence[Value], operands: Iterable[Value], written: Sequence[object]
    ) -> None:
        """Note which memory the instruction before position `end` uses."""
        if threading.get_ident() == self._thread:
            made = [(handle.ref, handle.storage) for handle in fresh]
            self.touched[end] = Touched([handle.storage for handle in operands], written, made)


class _Recorded(threading.local):
    """The program that this thread records; an empty name where it records none."""

    name = ""
    # It is True while a graph of torch.compile is recorded.
    traced = False
    # It is True if that graph has waited for a value, which may decide what it does next.
    waited = False
    # It is True while something is issued that is noted as a whole.
    covered = False
    # It is True in a program's first call, which may make what is made once.
    first = False
    # It is True if the recording before has sent no data. What is made once may be sent then.
    lenient = False
    # It is True while a signal's handler runs in the midst of a recording: that is no part of it.
    aside = False
    # The last handler that has run in a recording, and whether one has issued something.
    struck = ""
    mixed = False
    # The id of the last exception that a handler has raised.
    thrown = 0

    def __init__(self) -> None:
        # The user's Python has asked where tensors begin in these memories.
        self.asked: list[object] = []


recorded = _Recorded()


def cuts() -> bool:
    """Whether what is issued now is to be noted as a whole: this thread records, and nobody notes it yet."""
    return bool(recorded.name or recorded.traced) and not recorded.covered


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let this thread do what is done once, and is no part of the program that it records."""
    name, recorded.name = recorded.name, ""
    try:
        yield
    finally:
        recorded.name = name


def note_begin_asked(value: Value) -> None:
    """Note that this thread's program has asked where a value begins in its memory."""
    if recorded.name:
        recorded.asked.append(value.storage)


def note_value_read() -> None:
    """Note that what this thread records of torch.compile waits for a value. No replay would wait."""
    if recorded.traced:
        recorded.waited = True


def not_in_a_program(what: str, remedy: str, line: Line | None = None) -> NotSupportedError:
    """Return the error for what this thread's program does and no replay could do."""
    return refused(what, f"issued at {line_text(line or user_line())}", remedy)


def refused(what: str, where: str, remedy: str) -> NotSupportedError:
    """Return that error with the place that is to blame, if there is one."""
    place = f"\n  {where}" if where else ""
    return NotSupportedError(
        f"a program cannot {what}{place}\n  in the program {recorded.name!r}\n  {remedy}"
    )
