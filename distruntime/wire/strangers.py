"""What strangers can use up, and how little of it they get: connections, and lines in the log.

There are only so many accepted connections through which nothing has come yet, and of which nobody has proven
a key. When one comes that is too many, a quarter of them is hung up on: of those from the host that has the
most, so that a flood from one machine leaves the others a way in; there, of those that look least like a
handshake, and of equals the oldest. A peer that was only slow dials again.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import time
from collections.abc import Callable
from typing import final

# A peer that has sent no more bytes than this has sent a greeting at most.
_GREETING = 64
# No handshake and first message has more bytes than this.
_HANDSHAKE = 4096
# So many log lines are written as they come.
_FIRST = 10
# So many seconds lie between sums.
_EVERY = 60.0

_libc = ctypes.CDLL(None)


def _name(of: str, fd: int) -> bytes:
    """Return a socket's address as the kernel has it, b"" where there is none. `of` is getsockname or
    getpeername.

    Not by a Python socket: it owns its descriptor, and closes it when Ctrl-C keeps it from being detached.
    """
    room, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if getattr(_libc, of)(fd, room, ctypes.byref(size)) != 0:
        return b""
    return room.raw[: min(size.value, 128)]


def _likely(fd: int) -> int:
    """Return how far somebody has got who holds the key and is on the way: 0 to 3.

    libzmq sends its greeting with the connection. What follows cannot be made up: libzmq hangs up on what is
    not encrypted for its key, so who has sent more of it and is still there is on the way, or sends a frame
    that never ends.
    """
    room, size = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    if (
        sys.platform != "linux"
        or _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, room, ctypes.byref(size)) != 0
    ):
        return 0
    # The kernel calls this field tcpi_bytes_received.
    received = int.from_bytes(room.raw[128:136], sys.byteorder) if size.value >= 136 else 0
    return 0 if not received else 1 if received > _HANDSHAKE else 2 if received <= _GREETING else 3


@final
class Strangers:
    """The descriptors of such connections, oldest first. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        # Each descriptor has the name of its other end here.
        self.names: dict[int, bytes] = {}
        self._local = b""

    def listen(self, fd: int) -> None:
        """Learn the socket that connections come to; until then there may be as many as come."""
        self._local = self._port(_name("getsockname", fd))

    def add(self, fd: int) -> None:
        """Take one that was accepted."""
        self.names.pop(fd, None)
        self.names[fd] = _name("getpeername", fd)

    def crowd_out(self) -> list[int]:
        """Once there are too many, hang up on a quarter of them; return those."""
        if not self._local or len(self.names) <= self.most:
            return []
        by_host: dict[bytes, list[int]] = {}
        for fd, name in self.names.items():
            by_host.setdefault(self._host(name), []).append(fd)
        for fds in by_host.values():
            # The sort is stable: among equals the oldest stays first.
            fds.sort(key=_likely)
        found: list[int] = []
        while len(self.names) > self.most * 3 // 4:
            fd = max(by_host.values(), key=len).pop(0)
            name = self.names.pop(fd)
            found.append(fd)
            # The number may be another socket's by now: libzmq closes by itself, too.
            if (
                name
                and _name("getpeername", fd) == name
                and self._port(_name("getsockname", fd)) == self._local
            ):
                _libc.shutdown(fd, socket.SHUT_RDWR)
        return found

    @staticmethod
    def _host(name: bytes) -> bytes:
        return name[4:8] if len(name) == 16 else name[8:24]

    @staticmethod
    def _port(name: bytes) -> bytes:
        # The name of an IPv4 or IPv6 socket begins with its family and port. Any other name is a path.
        return name[:4] if len(name) in (16, 28) else name


@final
class Tally:
    """Passes lines on to a log: so many, then one a minute that says how many more there were. After a minute
    without any, it begins anew.

    A flood would fill the disk. Nothing is lost: each line is written or counted, and `finish` writes the
    last sum. One thread at a time.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._left = _FIRST
        self._counted = 0
        # This is the last line that was counted.
        self._last = ""
        # The minute began at this time, if there is one.
        self._began: float | None = None

    def note(self, line: str) -> None:
        """Write a line, or count it."""
        self.look()
        if self._began is None:
            self._began = self._clock()
        if self._left:
            self._left -= 1
            self._write(line)
        else:
            self._counted, self._last = self._counted + 1, line

    @property
    def due(self) -> float | None:
        """Seconds until `look` has something to write; None: it has nothing."""
        return (
            None
            if self._began is None or not self._counted
            else max(0.0, self._began + _EVERY - self._clock())
        )

    def look(self) -> None:
        """Write the sum, if its time has come."""
        if self._began is None or (now := self._clock()) < self._began + _EVERY:
            return
        if self._counted:
            self.finish()
            self._began = now
        else:
            self._left, self._began = _FIRST, None

    def finish(self) -> None:
        """Write the sum of what has been counted, if there is any."""
        if self._counted and self._began is not None:
            seconds = self._clock() - self._began
            self._write(
                f"{self._counted} more lines of this kind in {seconds:.0f} s, the last of them: {self._last}"
            )
            self._counted = 0
