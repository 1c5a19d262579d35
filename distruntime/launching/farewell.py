"""The end of workers that this process has not started: they are told when they dial.

This imports torch, as the wire's codec does. A launch needs it only at its end.
"""

from __future__ import annotations

import time
from contextlib import suppress

from ..errors import ProtocolError
from ..wire.channel import Channel, Frames, PeerGone
from ..wire.codec import decode, encode
from ..wire.keys import KeyPair
from ..wire.messages import Join, Message, Reply, StopWorker
from .job import Meeting

# Between two looks for workers lie so many seconds.
_LOOK = 0.1
_WHY = "the script of its launch has ended"


def send_home(meeting: Meeting, timeout: float) -> int:
    """End the workers that dial a script which has ended. Return how many have not been heard of.

    Block until all have answered, for `timeout` seconds at most.
    """
    keys = KeyPair.load(meeting.key) if meeting.key is not None else None
    channel, deadline = Channel(listen=meeting.listen, keys=keys), time.monotonic() + timeout
    told: dict[bytes, bytes] = {}
    ended: set[bytes] = set()
    try:
        while len(ended) < meeting.count and time.monotonic() < deadline:
            for peer, frames in channel.receive(_LOOK):
                message = _read(frames)
                if isinstance(message, Join):
                    told[peer] = message.incarnation
                    # It dials again where it has gone.
                    with suppress(PeerGone):
                        channel.send(peer, [encode(StopWorker(1, _WHY))])
                elif isinstance(message, Reply) and peer in told:
                    ended.add(told[peer])
            channel.events()
    finally:
        channel.close()
    return meeting.count - len(ended)


def _read(frames: Frames) -> Message | None:
    """Return a message; None for what is none, which whoever has the key does not send."""
    first = frames[0] if frames else b""
    try:
        return decode(first if isinstance(first, bytes) else first.buffer)
    except ProtocolError:
        return None
