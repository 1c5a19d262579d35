"""One connection between two members: its socket's folder, the proof of both ends, how bytes are read.

Both ends prove that they hold the group's secret, which is not sent:

    dialler    "dr-data6", its rank (4 bytes), the rank that it wants (4), 32 random bytes
    listener   32 random bytes, its proof
    dialler    its proof
    listener   one byte: the proof holds

A proof is an HMAC-SHA256 of all that was said so far, under the secret, with a word before it that tells the
two ends apart. The random bytes of both are in it: what was recorded proves nothing again, to no member and
in no group.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, final

from distruntime.errors import ConfigurationError
from distruntime.wire.scratch import scratch_folder
from distruntime.wire.shield import Lock

_made: list[Path] = []
_making = Lock()


def private_folder() -> Path:
    """Return the folder (mode 0700), made at the first call. It is removed when the process ends.

    Raise `ConfigurationError` where there can be none.
    """
    with _making:
        if not _made:
            try:
                _made.append(scratch_folder("data", sockets=True))
            except OSError as error:
                raise ConfigurationError(
                    f"no folder for sockets can be made: {error}. Expected one for temporary files that "
                    "this user may write to: set TMPDIR"
                ) from error
        return _made[0]


# A group's secret has so many bytes.
SECRET = 32
ACCEPTED = b"\x06"
_MAGIC = b"dr-data6"
_HELLO = struct.Struct("!8sII32s")
_RANDOM = 32
_PROOF = 32
HELLO_SIZE, ANSWER_SIZE, PROOF_SIZE = _HELLO.size, _RANDOM + _PROOF, _PROOF


class Unproven(ConnectionError):
    """The other end does not hold the group's secret, or does not speak this protocol."""


def _proof(secret: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, who + said, "sha256")


@final
class Dialler:
    """The end that has dialled.

    Rank `rank`, which wants rank `to`. Send `hello`, then what `prove` returns for the answer.
    """

    def __init__(self, secret: bytes, rank: int, to: int) -> None:
        self._secret, self._to = secret, to
        self.hello = _HELLO.pack(_MAGIC, rank, to, os.urandom(_RANDOM))

    def prove(self, answer: bytes) -> bytes:
        """Return the proof; raise `Unproven` unless the answer proves that rank `to` gave it."""
        said = self.hello + answer[:_RANDOM]
        if not hmac.compare_digest(answer[_RANDOM:], _proof(self._secret, b"listener", said)):
            raise Unproven(
                f"whoever answers in the place of rank {self._to} does not hold the group's secret"
            )
        return _proof(self._secret, b"dialler", said)


@final
class Listener:
    """The end that was dialled.

    Rank `rank` of `size`. Once `check` has returned, the other end is rank `source`.
    """

    def __init__(self, secret: bytes, rank: int, size: int) -> None:
        self._secret, self._rank, self._size = secret, rank, size
        self._said = b""
        self.source = -1

    def answer(self, hello: bytes) -> bytes:
        """Return the answer to a hello; raise `Unproven` for what is none, or is meant for another member."""
        magic, source, rank, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or rank != self._rank or source >= self._size:
            raise Unproven("it does not speak this protocol, or not to this member")
        self.source = source
        self._said = hello + os.urandom(_RANDOM)
        return self._said[_HELLO.size :] + _proof(self._secret, b"listener", self._said)

    def check(self, proof: bytes) -> None:
        """Raise `Unproven` unless this proves that the other end holds the secret."""
        if not self._said or not hmac.compare_digest(proof, _proof(self._secret, b"dialler", self._said)):
            raise Unproven("it does not hold the group's secret")


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


def prove(sock: socket.socket, secret: bytes, rank: int, to: int, deadline: float) -> None:
    """Prove to rank `to` that this is rank `rank`; raise `Unproven` unless it proves itself, too."""
    dialler = Dialler(secret, rank, to)
    sock.settimeout(left_until(deadline))
    sock.sendall(dialler.hello)
    sock.sendall(dialler.prove(read(sock, ANSWER_SIZE, deadline)))
    if read(sock, len(ACCEPTED), deadline) != ACCEPTED:
        raise Unproven("it does not speak this protocol")


def proven(sock: socket.socket, secret: bytes, rank: int, size: int, deadline: float) -> int:
    """Return the rank at the other end, once it has proven it to rank `rank` of `size`."""
    listener = Listener(secret, rank, size)
    sock.sendall(listener.answer(read(sock, HELLO_SIZE, deadline)))
    listener.check(read(sock, PROOF_SIZE, deadline))
    return listener.source


class Message(NamedTuple):
    """A message whose header is here, and whose bytes are in its socket."""

    sock: socket.socket
    size: int
    taken: threading.Event
