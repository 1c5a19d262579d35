"""The data channel for where nothing else works.

Tensors from worker to worker over plain sockets, authenticated and not encrypted.
"""

from __future__ import annotations

import socket
from typing import final

from distruntime.wire.data_channel import Capabilities, Membership

from .sockets import SocketChannel


@final
class TCP(SocketChannel):
    """Send and receive, side by side in any number of threads."""

    capabilities = Capabilities(frozenset({"send"}))

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership, "tcp", _Nothing())


@final
class _Nothing:
    """No cover: bytes as they are."""

    def about(self) -> str:
        return ""

    def learn(self, about: list[str]) -> None:
        """There is nothing to know."""

    def around(self, sock: socket.socket, dialled: bool) -> socket.socket:
        return sock

    def greet(self, sock: socket.socket, timeout: float) -> None:
        """There is nothing to say."""

    def check(self, sock: socket.socket, rank: int) -> None:
        """The proof of the secret says all."""
