"""What one worker's ssh leads to, besides the worker: sockets here that lead there, and ports there that lead
here. They are made again on each connection.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import final

from ..errors import ConnectionFailed
from ..wire.shield import Lock
from .ssh_address import SshAddress
from .ssh_connection import Broken, SshConnection

# The agent answers a question within so many seconds, or it is not there.
_ANSWER = 10.0


@final
class SshTunnels:
    """The ways of one worker. Any thread."""

    def __init__(self, address: SshAddress) -> None:
        self._address = address
        self._lock = Lock()
        self._connection: SshConnection | None = None
        self._connected = threading.Event()
        # These are sockets here, each with where it leads to there.
        self._there: dict[Path, tuple[str, int]] = {}
        # These are sockets and endpoints here, each with the port that leads to it.
        self._back: dict[str, int] = {}
        self._answers: dict[int, SimpleQueue[Sequence[object]]] = {}
        self._asked = 0

    def carried_by(self, connection: SshConnection | None) -> None:
        """Take the connection that carries the ways from now on; None: there is none."""
        with self._lock:
            self._connection = connection
            if connection is None:
                self._connected.clear()
            else:
                self._connected.set()

    def open_on(self, connection: SshConnection) -> None:
        """Make all ways on a new connection; raise `ConnectionFailed` where one cannot be."""
        with self._lock:
            there, back = dict(self._there), dict(self._back)
        for target, port in back.items():
            connection.forward_back(port, target)
        for here, (host, at) in there.items():
            connection.forward(here, host, at)

    def reaches(self, endpoints: Sequence[tuple[str, int]]) -> list[bool]:
        """Return which of these hosts and ports take a connection from there; none where it is not known.

        Block for some seconds at most.
        """
        answer: SimpleQueue[Sequence[object]] = SimpleQueue()
        # A connection that has just broken is made again soon.
        self._connected.wait(_ANSWER)
        with self._lock:
            connection, self._asked = self._connection, self._asked + 1
            number = self._asked
            self._answers[number] = answer
        try:
            if connection is not None:
                connection.ask(do="reach", request=number, endpoints=[list(pair) for pair in endpoints])
                return [found is True for found in answer.get(timeout=_ANSWER)]
        except (Broken, Empty):
            pass
        finally:
            with self._lock:
                del self._answers[number]
        return [False] * len(endpoints)

    def answered(self, number: int, reached: Sequence[object]) -> None:
        """Take the agent's answer to a question of `reaches`."""
        with self._lock:
            answer = self._answers.get(number)
        if answer is not None:
            answer.put(reached)

    def lead_there(self, here: Path, host: str, port: int) -> None:
        """Let a socket here lead to a port that the worker's machine reaches.

        Block for a moment. Raise `ConnectionFailed` where its sshd does not allow that.
        """
        with self._lock:
            if here in self._there:
                return
            self._there[here] = host, port
            connection = self._connection
        if connection is not None:
            connection.forward(here, host, port)

    def lead_back(self, target: str) -> int:
        """Let a port of its machine's loopback lead to a socket or an endpoint here; return the port.

        Block for a moment. Raise `ConnectionFailed` where that cannot be.
        """
        self._connected.wait(_ANSWER)
        with self._lock:
            connection, port = self._connection, self._back.get(target, 0)
        if port:
            return port
        if connection is None:
            raise ConnectionFailed(f"{self._address.shown}: there is no connection now")
        port = connection.forward_back(0, target)
        with self._lock:
            self._back[target] = port
        return port
