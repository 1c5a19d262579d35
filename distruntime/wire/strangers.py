"""Accepted connections through which nothing has come yet, and of which nobody has proven a key: there are only so many.

When one comes that is too many, the oldest is hung up on; of those from the host that has the most, so that a flood from one machine leaves
the others a way in. A peer that was only slow dials again.
"""

from __future__ import annotations

import ctypes
import socket
from collections import Counter
from typing import final

_libc = ctypes.CDLL(None, use_errno=True)


def _name(of: str, fd: int) -> bytes:
    """Return a socket's address as the kernel has it, b"" where there is none. `of` is getsockname or getpeername.

    Not by a Python socket: it owns its descriptor, and closes it when Ctrl-C keeps it from being detached.
    """
    room, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if getattr(_libc, of)(fd, room, ctypes.byref(size)) != 0:
        return b""
    return room.raw[: min(size.value, 128)]


@final
class Strangers:
    """The descriptors of such connections, oldest first. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.names: dict[int, bytes] = {}  # who is at the other end of each
        self._local = b""

    def listen(self, fd: int) -> None:
        """Learn the socket that connections come to; until then there may be as many as come."""
        self._local = self._port(_name("getsockname", fd))

    def add(self, fd: int) -> None:
        """Take one that was accepted."""
        self.names.pop(fd, None)
        self.names[fd] = _name("getpeername", fd)

    def crowd_out(self) -> list[int]:
        """Hang up on those that are too many; return them."""
        found: list[int] = []
        while self._local and len(self.names) > self.most:
            hosts = Counter(map(self._host, self.names.values()))
            fullest, _ = hosts.most_common(1)[0]
            fd = next(fd for fd, name in self.names.items() if self._host(name) == fullest)
            name = self.names.pop(fd)
            found.append(fd)
            # The number may be another socket's by now: libzmq closes by itself, too.
            if name and _name("getpeername", fd) == name and self._port(_name("getsockname", fd)) == self._local:
                _libc.shutdown(fd, socket.SHUT_RDWR)
        return found

    @staticmethod
    def _host(name: bytes) -> bytes:
        return name[4:8] if len(name) == 16 else name[8:24]

    @staticmethod
    def _port(name: bytes) -> bytes:
        return name[:4] if len(name) in (16, 28) else name  # family and port of IPv4 and IPv6, or a path
