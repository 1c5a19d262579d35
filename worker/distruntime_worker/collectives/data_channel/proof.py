"""Who is at the other end of a connection: both ends prove that they hold the group's secret, which is not
sent. Knows no socket.

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
import struct
from typing import final

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
