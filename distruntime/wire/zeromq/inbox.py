"""Messages read off a ROUTER socket frame by frame.

Each is whole, or not there, although Ctrl-C may come in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, final

import zmq
import zmq.backend

from .connections import Connections, Peer
from .frames import Arrived, Coming, Nonsense

Frames = list[Arrived]


class _Receive(Protocol):
    def __call__(self, flags: int, copy: bool = True, /) -> bytes | zmq.Frame: ...


# Payload frames this large stay where libzmq received them, and smaller ones become bytes: a copy is cheaper
# than keeping a message alive (pyzmq's COPY_THRESHOLD draws the same line for sending).
LARGE = 65536

# These are plain integers: `&` of two of pyzmq's enumerations costs 4 us, a tenth of a round trip.
_EVENTS, _POLLIN, _SRCFD, _RCVMORE, _NOBLOCK = (
    int(zmq.EVENTS),
    int(zmq.POLLIN),
    int(zmq.SRCFD),
    int(zmq.RCVMORE),
    int(zmq.NOBLOCK),
)
# A frame is received as bytes, or as zmq.Frame, which costs 2 us more and knows the connection that it came
# through.
_BYTES, _FRAME = ((_NOBLOCK,), (True,)), ((_NOBLOCK,), (False,))


@final
class Inbox:
    """What has been read from one socket and not taken yet. Not thread-safe: the channel's lock guards it."""

    def __init__(self, router: zmq.Socket[bytes], connections: Connections) -> None:
        self.messages: list[tuple[Peer, Frames]] = []
        self.received_bytes = 0
        # This has what was read of the next message so far. It is empty except within read(), or after an
        # interrupt there.
        self._partial: list[bytes | zmq.Frame] = []
        # Invariant: _partial holds fewer frames <=> an interrupt came while a frame was received, and cost
        # it.
        self._expected = 0
        # Each sender of a large message has the pieces here that have come. An entry is replaced, never
        # changed in place.
        self._coming: dict[Peer, Coming] = {}
        self._connections = connections
        # These are the C methods, past pyzmq's Python layer. They cost half as much, and they run no bytecode
        # on which Ctrl-C could cut a message in two.
        self._receive: _Receive = zmq.backend.Socket.recv.__get__(router)
        self._option: Callable[[int], int] = zmq.backend.Socket.get.__get__(router)

    def drain(self) -> None:
        """Read all messages that are there."""
        # An interrupt can leave half a message behind whose rest is not here yet.
        with suppress(zmq.Again):
            read = 0
            while self._partial or self._option(_EVENTS) & _POLLIN:
                self.read()
                read += 1
                # The look takes 2.2 us, and an empty read 4.7 us. So after two messages, reads alone find out
                # where the end is.
                while read > 1:
                    self.read()
        self._connections.close_ended()
        # What came through connections that have ended is read: nothing more comes of their messages.
        if self._coming:
            self._coming = {
                peer: coming for peer, coming in self._coming.items() if self._connections.open(peer)
            }

    def read(self) -> None:
        """Read one message, or raise `zmq.Again`.

        The pieces of a large message that have come until then are kept.
        """
        while not self._read():
            pass

    def _read(self) -> bool:
        """Read one of libzmq's messages, or raise `zmq.Again`; return whether it was a whole one of ours."""
        if len(self._partial) < self._expected:
            self._skip_torn()
        partial, connections = self._partial, self._connections
        if not partial:
            self._expected = 1
            try:
                # This frame is the sender's name.
                partial.extend(map(self._receive, *_BYTES))
            except zmq.Again:
                self._expected = 0
                raise
        # It was received as bytes, above.
        peer: bytes = partial[0]  # type: ignore[assignment]
        if len(partial) < 2:
            known = peer in connections.placed or peer in connections.dialled
            self._expected = 2
            partial.extend(
                map(
                    self._receive,
                    *(_FRAME if not known or connections.unplaced or connections.doubted else _BYTES),
                )
            )
        while self._option(_RCVMORE):
            self._expected += 1
            partial.extend(map(self._receive, *_FRAME))
        head = partial[1]
        if isinstance(head, zmq.Frame):
            if peer not in connections.dialled:
                connections.place(peer, _connection(head))
            head = head.bytes
        frames: Frames | None = [head]
        coming = self._coming
        if len(partial) > 2:
            rest = [
                frame.bytes if isinstance(frame, zmq.Frame) and len(frame) < LARGE else frame
                for frame in partial[2:]
            ]
            if head:
                frames = [head, *rest]
            else:
                frames, coming = self._long(peer, rest)
        elif coming and peer in coming:
            coming = self._without(peer)
        if frames is not None:
            self.received_bytes += sum(map(len, frames))
        entries = ((peer, frames),) if frames is not None else ()
        # These statements hold no call and no jump, so no interrupt falls in between.
        self.messages += entries
        self._coming = coming
        self._partial = []
        self._expected = 0
        return frames is not None

    def _long(self, peer: Peer, parts: list[bytes | zmq.Frame]) -> tuple[Frames | None, dict[Peer, Coming]]:
        """Return the large message that these parts end, if they do, and what of such messages has come then.

        What makes no sense becomes a message that makes none: who takes the messages knows what to do with
        such a peer.
        """
        coming = self._coming.get(peer) or Coming()
        try:
            if parts[0]:
                (place, piece) = parts
                if isinstance(place, zmq.Frame):
                    raise Nonsense
                coming = coming.with_piece(place, piece.buffer if isinstance(piece, zmq.Frame) else piece)
                return None, {**self._coming, peer: coming}
            frames = coming.frames(parts[1:])
            head = frames[0]
            if not isinstance(head, bytes):
                frames[0] = head.bytes
            return frames, self._without(peer)
        except (Nonsense, ValueError):
            return [b""], self._without(peer)

    def _without(self, peer: Peer) -> dict[Peer, Coming]:
        return {other: coming for other, coming in self._coming.items() if other != peer}

    def _skip_torn(self) -> None:
        """Drop the rest of a message of which an interrupt cost a frame."""
        while self._option(_RCVMORE):
            self._receive(_NOBLOCK)
        self._partial = []
        self._expected = 0


def _connection(frame: zmq.Frame) -> int | None:
    try:
        return int(frame.get(_SRCFD))
    except zmq.ZMQError:
        # This is noise that passed for ZMTP 1, which carries no properties.
        return None
