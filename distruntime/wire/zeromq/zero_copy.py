"""Frames whose memory libzmq reads where it is, or keeps once for many peers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import zmq

from ..shield import RLock, shield
from .frames import Long, Part
from .inbox import LARGE

# pyzmq makes one socket and one mutex at a process's first frame that is not copied. Two threads that come
# first at once would make two of each, and then use one socket side by side. So the first such frame is an
# empty one, under this lock. A finalizer may come in between. Pyzmq's thread starts with it: what strikes
# there could leave that forgotten, and then no frame's memory would be known to be read.
_first = RLock()
# It has an item once that frame has been made.
_begun: list[bool] = []


def _begin() -> None:
    with shield, _first:
        if not _begun:
            zmq.Frame(b"", copy=False)
            _begun.append(True)


def tracked(parts: Long | Sequence[Part]) -> tuple[Long | Sequence[Part], list[zmq.MessageTracker]]:
    """Return frames whose memory libzmq reads in place, if they are large, and a tracker for each."""
    if not _begun:
        _begin()
    if type(parts) is Long:
        return parts, parts.tracked(LARGE)
    made = [
        part if isinstance(part, zmq.Frame) else zmq.Frame(part, track=True, copy=len(part) < LARGE)
        for part in parts
    ]
    return made, [part.tracker for part in made if part.tracker is not None]


def for_many(frame: bytes) -> zmq.Frame:
    """Return a frame that is sent to many peers and is in memory once, where each send of bytes makes a copy
    of its own.
    """
    return zmq.Frame(frame, copy=True)


def _begin_anew() -> None:
    global _first
    _first = RLock()
    _begun.clear()


# Another thread may have held the lock when the process forked.
os.register_at_fork(after_in_child=_begin_anew)
