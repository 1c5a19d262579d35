"""How large frames travel: in pieces, because the largest frame that is sent is what a stranger can make
libzmq hold.

libzmq has one limit for everybody who reaches a socket, long before a key is proven. So a message with a
frame of more than FRAME bytes travels as several of libzmq's messages, one right behind the other. Each
begins with an empty frame, which no message of ours does. All but the last bring a piece: where it belongs,
and its bytes. The last brings the frames that are not large. Knows no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import zmq

# A frame has at most so many bytes. Half of it would take less memory for each stranger, and more time: the
# frames of 64 MiB are 128 calls of libzmq.
FRAME = (1 << 19) + (1 << 12)
# libzmq itself puts at most so many bytes around a frame: with CURVE a command's name, a nonce, flags and a
# box, 33 in all.
ROOM = 1 << 10

Buffer: TypeAlias = bytes | bytearray | memoryview
# This is a frame as it is sent.
Part: TypeAlias = Buffer | zmq.Frame
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# A place says which of the message's frames the piece belongs to, where the piece begins in it, and how many
# bytes that frame has.
_PLACE = struct.Struct(">IQQ")


def is_large(frame: Part) -> bool:
    """Return whether a frame travels in pieces."""
    return (frame.nbytes if isinstance(frame, memoryview) else len(frame)) > FRAME


@final
class Long:
    """A message with large frames, as it is sent: several messages, without a copy of what they bring."""

    def __init__(self, frames: Sequence[Part]) -> None:
        self._messages: list[list[Part]] = []
        rest: list[Part] = [b"", b""]
        for index, frame in enumerate(frames):
            if not is_large(frame):
                rest.append(frame)
                continue
            view = memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame).cast("B")
            for start in range(0, len(view), FRAME):
                self._messages.append(
                    [b"", _PLACE.pack(index, start, len(view)), view[start : start + FRAME]]
                )
        self._messages.append(rest)

    def tracked(self, least: int) -> list[zmq.MessageTracker]:
        """Have libzmq read frames from `least` bytes on where they are.

        Return what tells for each frame when it has.
        """
        trackers = []
        for message in self._messages:
            for k, part in enumerate(message):
                if len(part) >= least:
                    message[k] = frame = (
                        part if isinstance(part, zmq.Frame) else zmq.Frame(part, track=True, copy=False)
                    )
                    trackers.append(frame.tracker)
        return [tracker for tracker in trackers if tracker is not None]

    def to(self, peer: bytes) -> tuple[Sequence[Part], Sequence[int]]:
        """Return what to hand to libzmq for a peer, one by one, and with which flags."""
        parts = [part for message in self._messages for part in (peer, *message)]
        return parts, [flag for message in self._messages for flag in (*[_MORE] * len(message), _LAST)]


@final
class Joined:
    """A large frame whose pieces have come; it is used as a zmq.Frame is."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def bytes(self) -> bytes:
        """A copy of its bytes."""
        return bytes(self.buffer)


# This is a frame as it arrives: a large one as libzmq holds it, or as its pieces have been joined.
Arrived: TypeAlias = bytes | zmq.Frame | Joined


class Nonsense(Exception):
    """Pieces that do not fit together."""


@final
class Coming:
    """A message with large frames of which pieces have come.

    It is not changed: `with_piece` returns another one, over the same memory.
    """

    def __init__(self, large: tuple[tuple[int, memoryview], ...] = (), got: int = 0) -> None:
        # These large frames have begun. Each entry has the frame's number in the message, and its memory.
        self._large = large
        # So many bytes of the last of them have come.
        self._got = got

    def with_piece(self, place: bytes, piece: Buffer) -> Coming:
        """Put a piece where it belongs.

        Memory is asked for as a frame's first piece says, and used as pieces come.
        """
        if len(place) != _PLACE.size:
            raise Nonsense
        index, start, size = _PLACE.unpack(place)
        large, got = self._large, self._got
        if not large or index != large[-1][0]:
            if large and (got != len(large[-1][1]) or index < large[-1][0]):
                raise Nonsense
            try:
                # A bytearray would be zeroed first: with 1.6 GB nothing else would run for a second.
                large, got = (*large, (index, memoryview(np.empty(size, np.uint8)))), 0  # type: ignore[arg-type]
            except (MemoryError, ValueError, OverflowError):
                raise Nonsense from None
        view = large[-1][1]
        if not len(piece) or start != got or size != len(view) or got + len(piece) > size:
            raise Nonsense
        view[start : start + len(piece)] = piece
        return Coming(large, got + len(piece))

    def frames(self, rest: Sequence[Arrived]) -> list[Arrived]:
        """Return all frames, with those that were not large, which have come last."""
        if not self._large or self._got != len(self._large[-1][1]):
            raise Nonsense
        found: list[Arrived] = list(rest)
        for index, view in self._large:
            if index > len(found):
                raise Nonsense
            found.insert(index, Joined(view))
        return found
