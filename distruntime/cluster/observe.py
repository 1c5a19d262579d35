"""Asking workers without a session: a process that holds the key may ask what they do and where they are.

It holds nothing on a worker but a connection, and it disturbs no session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, final

from ..errors import ConfigurationError, ProtocolError
from ..log.replies import require
from ..wire.channel import Channel, Frames, PeerGone
from ..wire.codec import decode, encode
from ..wire.deadlines import UNREACHABLE
from ..wire.keys import KeyPair, choose, is_local
from ..wire.messages import PROTOCOL, Question, Reply
from .absences import refuses
from .connection import Connection

T = TypeVar("T")

# A connection has no mode of a greeting here.
_MODE = "look"
# So many seconds lie between two looks at the connections.
_LOOK = 0.05
# A connection usually takes fewer seconds.
_SOON = 0.3


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What the worker at an address has answered; without a `value`, `why` says why there is none."""

    address: str
    value: T | None
    why: str = ""


@final
class _Asked:
    """A worker that is asked: its connection, and the number of the question that is open."""

    def __init__(self, number: int, address: str) -> None:
        self.connection = Connection(number, address)
        self.connection.seek(_MODE, 0.0)
        self.peer: bytes | None = None
        self.request = 0
        self.value: object = None
        self.why = ""
        self.done = True


@final
class Observer:
    """Connections to workers, to ask them again and again. A context manager: its end closes them.

    Args:
        addresses: where the workers listen.
        key: the key file; None: the usual one.
        insecure: use no key.

    Raises:
        ConfigurationError: an address that cannot be, or that needs a key where there is none.
    """

    def __init__(self, addresses: Sequence[str], *, key: Path | None = None, insecure: bool = False) -> None:
        self._workers = [_Asked(number, address) for number, address in enumerate(addresses)]
        keys = [choose(address, path=key, insecure=insecure) for address in addresses]
        # A channel has one key, and workers of this machine need none.
        self._channels: dict[KeyPair | None, Channel] = {}
        for pair in keys:
            if pair not in self._channels:
                self._channels[pair] = Channel(keys=pair, silence=UNREACHABLE.get())
        self._of = [self._channels[pair] for pair in keys]
        self._numbers = 0

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def ask(self, question: Callable[[int], Question[T]], timeout: float) -> list[Answer[T]]:
        """Ask all workers. Block until each has answered or cannot, for `timeout` seconds at most."""
        self._numbers += 1
        form = type(question(0)).__name__
        for worker in self._workers:
            worker.request, worker.value, worker.why, worker.done = self._numbers, None, "", False
            self._say(worker, question)
        started = time.monotonic()
        deadline, probe_at = started + timeout, started + _SOON
        while not all(worker.done for worker in self._workers) and time.monotonic() < deadline:
            for channel in self._channels.values():
                self._turn(channel, question, form)
            if time.monotonic() > probe_at:
                probe_at = deadline
                self._probe()
        return [self._answer(worker, timeout) for worker in self._workers]

    def _probe(self) -> None:
        """Find out at which addresses of this machine nobody listens: others may take seconds to say so."""
        for worker in self._workers:
            address = worker.connection.address
            if not worker.done and worker.peer is None and is_local(address) and refuses(address):
                worker.done, worker.why = True, f"nobody listens at {address}: no worker runs there"

    def _answer(self, worker: _Asked, timeout: float) -> Answer[T]:
        connection = worker.connection
        if worker.done and not worker.why:
            return Answer(connection.address, worker.value)  # type: ignore[arg-type]
        why = worker.why or connection.failure or connection.unanswered(timeout)
        # Only what listens there may speak another protocol.
        told = f". This side speaks protocol {PROTOCOL}" if worker.peer is not None else ""
        return Answer(connection.address, None, why + told)

    def _say(self, worker: _Asked, question: Callable[[int], Question[T]]) -> None:
        """Ask a worker that is connected."""
        if worker.peer is not None:
            with suppress(PeerGone):
                self._of[worker.connection.number].send(worker.peer, [encode(question(worker.request))])

    def _turn(self, channel: Channel, question: Callable[[int], Question[T]], form: str) -> None:
        workers = [worker for worker in self._workers if self._of[worker.connection.number] is channel]
        for worker in workers:
            self._dial(channel, worker)
        for peer, frames in channel.receive(_LOOK):
            self._take((worker for worker in workers if worker.peer == peer), frames, form)
        for event in channel.events():
            for worker in workers:
                if event.peer is not None and event.peer in worker.connection.attempts:
                    if worker.connection.happened(event, time.monotonic()):
                        worker.peer = event.peer
                        self._say(worker, question)
                    if worker.connection.failure is not None:
                        worker.done, worker.why = True, worker.connection.failure
                if event.peer is not None and event.peer == worker.peer and event.kind == "disconnected":
                    worker.peer = None

    def _dial(self, channel: Channel, worker: _Asked) -> None:
        """Dial a worker that is due, and hang up on attempts that have ended."""
        connection, now = worker.connection, time.monotonic()
        if worker.peer is None:
            connection.expire(now)
        while connection.abandoned:
            channel.hang_up(connection.abandoned.pop())
        if worker.done or not connection.is_due(now):
            return
        try:
            channel.connect(connection.address, connection.dial(now))
        except ConfigurationError as error:
            worker.done, worker.why = True, str(error)

    def _take(self, workers: Iterable[_Asked], frames: Frames, form: str) -> None:
        for worker in workers:
            buffers = [frame if isinstance(frame, bytes) else frame.buffer for frame in frames]
            try:
                message = decode(buffers[0]) if buffers else None
                if isinstance(message, Reply) and message.request == worker.request:
                    worker.value, worker.done = require(form, message.value, None, None), True
            except ProtocolError as error:
                worker.done, worker.why = True, f"{worker.connection.address}: {error}"
