"""One end of a session's command channel: each message arrives once and in order, whatever connections carry
them.

ZeroMQ keeps the order and loses nothing within one connection, so messages carry no numbers: both ends count.
What was sent is kept until the other end has said how many messages it has counted (`Ack`, or the greeting on
a new connection); what it has not is sent again on the next connection. Knows no socket: `Channel.send` and
`Channel.resume` do the sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, final

from ..errors import ProtocolError
from .zeromq.frames import Part as Part

Buffer = bytes | bytearray | memoryview

# At most so many messages come unacknowledged. An acknowledgement for each would cost a lone read a tenth.
EVERY = 32
# At most so many bytes of payload come unacknowledged.
MUCH = 4 << 20
# The sender of a payload of so many bytes waits to use the memory again, and so is told at once.
LARGE = 1 << 20


class Tracker(Protocol):
    """Tells whether ZeroMQ still reads memory that it was given: a `zmq.MessageTracker`."""

    @property
    def done(self) -> bool:
        """Whether it has done with it."""


@final
class Delivery:
    """A message on its way. Its frames are the sender's memory until `done`."""

    __slots__ = ("frames", "link", "number", "trackers")

    def __init__(self, link: Link, frames: Sequence[Part]) -> None:
        self.link, self.frames = link, frames
        # They tell whether ZeroMQ reads the frames' memory still, where it reads it in place.
        self.trackers: Sequence[Tracker] = ()
        # It counts the link's messages from 1. It is 0 until the message is in order.
        self.number = 0

    @property
    def done(self) -> bool:
        """Whether the frames' memory may be written again.

        The message has arrived, or is copied since nobody knows when it will.
        """
        link = self.link
        if 0 < self.number <= link.acknowledged or link.over:
            return True
        if link.peer is None and self.number and all(tracker.done for tracker in self.trackers):
            self.copy_frames()
            # Otherwise it is being sent again, perhaps with the frames as they were.
            return link.peer is None
        return False

    def copy_frames(self) -> None:
        """Copy what is still to arrive, so that the frames' memory may be written again."""
        self.frames = [
            bytes(frame) if isinstance(frame, (bytearray, memoryview)) else frame for frame in self.frames
        ]


@final
class Link:
    """The counts and the kept messages of one end. `peer` is the connection that carries them now; None:
    there is none.

    Invariant, under the channel's lock and until it is `over`: `kept` are the messages numbered
    `acknowledged` + 1 to `sent`.
    """

    __slots__ = ("_bytes", "_pending", "_since", "acknowledged", "kept", "over", "peer", "received", "sent")

    def __init__(self, peer: bytes | None = None) -> None:
        self.peer = peer
        self.kept: deque[Delivery] = deque()
        self.sent = self.acknowledged = self.received = 0
        self._since = self._bytes = 0
        # It is True if a part has come since the last acknowledgement: its sender waits to use the memory
        # again.
        self._pending = False
        # It is True once nothing will arrive any more.
        self.over = False

    def end(self) -> None:
        """Let go of everything: the other end is no more."""
        self.over, self.peer = True, None
        self.kept.clear()

    def keep(self, delivery: Delivery) -> None:
        """Give a message its number (the channel's lock is held)."""
        if not self.over:
            self.kept.append(delivery)
        self.sent = delivery.number = self.sent + 1

    def count(self, nbytes: int, more: bool) -> bool:
        """Count a message that has come, with so many bytes of payload; return whether the other end must
        hear of it now.

        `more` says that the message after it belongs to the same value. The sender waits for all of them:
        after the last it hears of it, however little has come since an acknowledgement in their midst.
        """
        self.received += 1
        self._since += 1
        self._bytes += nbytes
        if self._since < EVERY and self._bytes < (MUCH if more else LARGE) and (more or not self._pending):
            self._pending = more
            return False
        self._since = self._bytes = 0
        self._pending = False
        return True

    def acknowledge(self, received: int) -> None:
        """Let go of the messages that the other end has counted.

        Raise `ProtocolError` for a number that cannot be.
        """
        if not self.acknowledged <= received <= self.sent:
            raise ProtocolError(
                f"{received} messages acknowledged, of {self.sent} that were sent and {self.acknowledged} "
                "acknowledged before"
            )
        for _ in range(received - self.acknowledged):
            self.kept.popleft()
        self.acknowledged = received
