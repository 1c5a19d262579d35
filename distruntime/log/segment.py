"""A segment of a log: what goes with it, where it goes, and what is known of it until it has run."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..wire.codec import Buffer
from ..wire.link import Delivery, Part
from ..wire.messages import MeshBody, Plain, Segment
from .line import Line

# The log that a segment is of, as log.py has it.
L = TypeVar("L")


class Send(Protocol):
    """Puts the frames of a segment on their way, without waiting."""

    def __call__(self, frames: Sequence[Part], *, copy: bool) -> Delivery | None:
        """Return what tells when the frames' memory may be written again, if it is not copied."""


# It makes the message of a segment from its number, the position of its first word, new templates, words and
# stretches.
Compose = Callable[[int, int, list[Plain], list[Plain], list[list[int]]], Segment | MeshBody]


@dataclass(slots=True)
class Flight(Generic[L]):
    """A segment that is sent and not acknowledged."""

    seq: int
    # The words are of this log. A worker's part of a mesh's segment has no words itself, and has the mesh's
    # line table.
    log: L
    line_table: list[Line]
    words: int
    # This is the position after its last word.
    end: int
    nbytes: int
    # The last prediction that it may hold has this number.
    checks: int
    # They are called when it has run.
    releases: list[Callable[[], None]]
    # So many workers have not run it.
    waiting: int = 1
    # The programs in it stand for so many words.
    weight: int = 0

    def line_at(self, position: int) -> Line | None:
        """Return the line that issued the instruction at a position, if the instruction is in here."""
        return line_at(self.line_table, position)


@dataclass(slots=True)
class Attached:
    """What goes with the next segment: payload frames, and what is called when it has run."""

    frames: list[Buffer] = field(default_factory=list)
    nbytes: int = 0
    releases: list[Callable[[], None]] = field(default_factory=list)

    def add(self, payload: Buffer) -> int:
        """Return the number of a payload frame. Call under the log's lock, and flush before it is let go."""
        self.frames.append(payload)
        self.nbytes += len(payload)
        return len(self.frames) - 1


class Outlet:
    """Where the segments of a log go, and the last of them."""

    __slots__ = ("compose", "last", "send", "seq", "unsent")

    def __init__(self, compose: Compose, send: Send) -> None:
        self.compose, self.send = compose, send
        # This is the number of the last segment.
        self.seq = 0
        self.last: Delivery | None = None
        # Only this segment may have left the words but not the process: Ctrl-C can strike between the two.
        self.unsent: list[Buffer] | None = None

    def resend(self) -> None:
        """Send the segment that Ctrl-C kept from going, or from being known to have gone.

        A worker drops one that comes twice.
        """
        assert self.unsent is not None
        self.last = self.send(self.unsent, copy=len(self.unsent) == 1)
        self.unsent = None


def line_at(table: Sequence[Line], position: int) -> Line | None:
    """Return the entry of the instruction at a position, or None if the table ends before it."""
    k = bisect.bisect_right([line[0] for line in table], position)
    return table[k] if k < len(table) else None
