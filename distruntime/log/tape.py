"""What a log gets while a program is recorded, and which thread records one.

A tape changes nothing of what is sent. While a log has one, each instruction is sent by itself, by the thread
that issues it. So the tape knows whose the words are, and other threads may issue meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..errors import NotSupportedError
from .line import Line, line_text, user_line
from .stretches import StretchedLog

# A log with a tape is sent when it has more words than this.
NOTED = -1


class Taped(Protocol):
    """A log as it is seen from here."""

    words: list[object]
    line_table: list[Line]
    base: int


class Piece(NamedTuple):
    """Words that one thread has issued: the position of the first, and the streams that they are on."""

    own: bool
    start: int
    words: Sequence[object]
    streams: set[int]


class Tape:
    """The words of one log, from now on. Call all of it under the log's lock."""

    def __init__(self, log: Taped) -> None:
        self._thread = threading.get_ident()
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
        streams = {0}
        if isinstance(words, StretchedLog):
            first = start - log.base
            streams = {stream for stream, _, behind in words.bounds() if behind > first}
        own = threading.get_ident() == self._thread
        self.pieces.append(Piece(own, start, words[start - log.base :], streams))
        lines = log.line_table
        k = len(lines)
        while k and lines[k - 1][0] > start:
            k -= 1
        self.lines += lines[k:]
        self._seen = end


class _Recorded(threading.local):
    """The program that this thread records; an empty name where it records none."""

    name = ""
    # It is True in a program's first call, which may make what is made once.
    first = False
    # It is True if the recording before has sent no data. What is made once may be sent then.
    lenient = False


recorded = _Recorded()


def not_in_a_program(what: str, remedy: str, line: Line | None = None) -> NotSupportedError:
    """Return the error for what this thread's program does and no replay could do."""
    where = line_text(line or user_line())
    return NotSupportedError(
        f"a program cannot {what}\n  issued at {where}\n  in the program {recorded.name!r}\n  {remedy}"
    )
