"""One connection between two members: what is around it, and how bytes are read from it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

# A member listens at a path, or at a host and port.
Address = str | tuple[str, int]


def address_of(said: object) -> Address:
    match said:
        case str():
            return said
        case [str(host), int(port)]:
            return host, port
    raise ConnectionError(f"a member says that it listens at {said!r:.80}")


class Cover(Protocol):
    """What is around a connection: nothing, or encryption."""

    def about(self) -> str:
        """Return what the other members must know of this one."""

    def learn(self, about: list[str]) -> None:
        """Take what all members have said, by rank."""

    def around(self, sock: socket.socket, dialled: bool) -> socket.socket:
        """Return what to use in the socket's place. Never blocks."""

    def greet(self, sock: socket.socket, timeout: float) -> None:
        """Do what comes before the first byte.

        Block for `timeout` seconds at most; raise `OSError`, `Unproven` if that is no member.
        """

    def check(self, sock: socket.socket, rank: int) -> None:
        """Raise `Unproven` unless that member is at the other end, as far as this can tell."""


def left_until(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def hang_up(sock: socket.socket) -> None:
    """End a connection; the thread that uses it wakes, and closes it."""
    # It is not connected any more.
    with suppress(OSError):
        # The method of ssl would take the encryption away from under that thread.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def read(sock: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray(size)
    fill(sock, memoryview(found), deadline)
    return bytes(found)


def fill(sock: socket.socket, memory: memoryview, deadline: float) -> None:
    """Receive as many bytes as `memory` has room for."""
    while memory:
        sock.settimeout(left_until(deadline))
        size = sock.recv_into(memory)
        if not size:
            raise ConnectionError("the other side has closed the connection")
        memory = memory[size:]


class Message(NamedTuple):
    """A message whose header is here, and whose bytes are in its socket."""

    sock: socket.socket
    size: int
    taken: threading.Event
