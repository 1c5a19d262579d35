"""Reading a session's socket: messages go to whom they concern, reports of connections to the connector.

A quiet thread of a session reads while nobody waits, and sends what has gathered: the pump.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, final

from ..errors import ProtocolError
from ..log.failure_log import WorkerWarnings
from ..log.log import Log
from ..log.node import Node
from ..wire import messages
from ..wire.channel import Channel, ChannelClosed, Frames, PeerEvent
from ..wire.codec import Buffer, decode
from ..wire.shield import shield
from ..wire.strangers import Tally
from .launched import LaunchedWorkers
from .requests import Requests

# A waiting thread looks so many seconds for its reply before it sleeps.
_SPIN = 0.0002
# After so many seconds even a busy socket does not keep from looking for dead workers.
_LOOK = 0.1


class Connector(Protocol):
    """What makes the connections of a session's workers and keeps them.

    The thread that reads the socket calls it.
    """

    def knows(self, peer: bytes) -> bool:
        """Whether this is the name of a connection on which a worker is greeted, or that was given up."""

    def retire(self, peer: bytes) -> None:
        """Let nothing count any more that comes on a connection."""

    def greeted(self, peer: bytes, message: messages.Join | messages.Welcome | messages.Refused) -> None:
        """Act on what a worker says before it is one of the session's, or is again."""

    def happened(self, event: PeerEvent) -> None:
        """Act on what a connection reports that is no worker's now."""

    def parted(self) -> None:
        """Seek a worker whose connection is no more."""

    def lost(self, node: Node) -> None:
        """Report a loss, and seek who may come in its place."""

    def revive(self, node: Node) -> None:
        """Seek another worker for a lost node, and start it if this process starts workers.

        Any thread may call.
        """

    def poll(self) -> None:
        """Do what is due."""


class Owner(Protocol):
    """What the receiver needs of its session."""

    channel: Channel
    connector: Connector
    nodes: list[Node]
    on_broken: Callable[[Node, int, str], None]
    on_asked: Callable[[Node, messages.AskMaster], None]
    requests: Requests
    warnings: WorkerWarnings
    strangers: Tally
    workers: LaunchedWorkers

    def greet(self, peer: bytes, message: messages.Message) -> None:
        """Send one message to whoever is at the other end of a connection."""

    def cut(self, node: Node, why: str) -> None:
        """Note that a worker's connection is no more."""

    def lose(self, node: Node, why: str) -> None:
        """Declare a worker dead."""


@final
class Receiver:
    """Reads one session's socket. `by_peer` has the workers by the connections that reach them now."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        self.by_peer: dict[bytes, Node] = {}
        self._arrived: deque[tuple[bytes, Frames]] = deque()
        self._looked = 0.0

    def read(self, timeout: float) -> None:
        """Read the socket, and act on what is there: the one thread calls it that `Requests` lets read."""
        if not self._arrived:
            self._session.channel.receive(timeout, _SPIN if timeout else 0.0, self._arrived)
        now = time.monotonic()
        if not self._arrived or now > self._looked + _LOOK:
            self._looked = now
            # A loss that Ctrl-C cuts short would leave requests behind that nobody answers.
            with shield:
                self._look()
        self._take_in()

    def _take_in(self) -> None:
        with shield:
            # Messages are taken one at a time: a reader within this one finds the rest here.
            while self._arrived:
                try:
                    peer, frames = self._arrived.popleft()
                except IndexError:
                    # A reader within this one has taken it: a signal's handler, between these two lines.
                    break
                self.take(peer, frames)

    def take(self, peer: bytes, frames: Frames) -> None:
        """Act on one message. A worker that breaks the protocol is dropped; a stranger is not listened to."""
        buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
        try:
            if not buffers:
                raise ProtocolError("a message without frames")
            # Invariant: a message is counted exactly if it was taken.
            self._deliver(peer, decode(buffers[0]), buffers[1:])
        except (ProtocolError, RecursionError) as error:
            # RecursionError comes where a worker nests what it says thousands deep.
            node = self.by_peer.get(peer)
            if node is not None:
                self._session.lose(node, f"was dropped, because it broke the protocol: {error}")
            else:
                self._session.strangers.note(f"ignored a peer that is no worker: {error}")

    def _deliver(self, peer: bytes, message: messages.Message, payloads: Sequence[Buffer]) -> None:
        node = self.by_peer.get(peer)
        if isinstance(message, (messages.Join, messages.Welcome, messages.Refused)):
            self._session.connector.greeted(peer, message)
            return
        if node is None:
            if self._session.connector.knows(peer):
                # It was sent before its connection was given up, and comes again on the next one.
                return
            raise ProtocolError(f"{type(message).__name__} from a peer that is no worker of this session")
        link = node.link
        if isinstance(message, messages.Ack):
            link.acknowledge(message.received)
            return
        if link.count(sum(map(len, payloads)) if payloads else 0, type(message) is messages.Part):
            self._session.greet(peer, messages.Ack(link.received))
        match message:
            case messages.Done():
                node.done(message)
            case messages.Warned(kind=kind, text=text):
                self._session.warnings.note(kind, text, node.line_of(message.seq, message.position))
            case messages.Printed():
                line = node.line_of(message.seq, message.position)
                self._session.requests.output.note(node, message, line)
            case messages.Part():
                self._session.requests.part(node, message.request, message.offset, payloads)
            case messages.Reply():
                self._session.requests.reply(node, message.request, message.value, payloads)
            case messages.Failed():
                self._session.requests.fail(node, message.request, message.failure)
            case messages.AskMaster():
                self._session.on_asked(node, message)
            case messages.BreakGroup():
                self._session.on_broken(node, message.group, message.reason)
            case messages.Goodbye():
                node.presence.has_left = True
                self._session.lose(node, f"left: {message.reason}")
            case messages.Detach():
                node.presence.has_left = node.presence.taken = True
                self._session.lose(node, f"left: {message.reason}")
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _why(self, detail: str) -> str:
        """Return why a connection may have ended: libzmq closes one that is silent, and does not say so."""
        silence = self._session.channel.silence
        why = "the connection was closed" + (f", or brought nothing for {silence:g} s" if silence else "")
        return why + (f" ({detail})" if detail else "")

    def _look(self) -> None:
        events = self._session.channel.events()
        # What came through a connection is there before the report of its end: a worker that has left is not
        # one that died.
        if events:
            self._session.channel.receive(0, into=self._arrived)
            self._take_in()
        for event in events:
            node = self.by_peer.get(event.peer) if event.peer is not None else None
            if event.kind == "disconnected" and node is not None:
                self._session.cut(node, self._why(event.detail))
            else:
                self._session.connector.happened(event)
        for node in self._session.nodes[: len(self._session.workers)]:
            if node.failed is None and (epitaph := self._session.workers.epitaph(node, wait=0)) is not None:
                self._session.lose(node, epitaph)
        for node in self._session.nodes:
            # Somebody may have asked it who had just seen it alive.
            if node.failed is not None:
                self._session.requests.lose(node, node.failed)
        self._session.connector.poll()


log = logging.getLogger("distruntime")

# The pump looks at intervals of so many seconds: while something is in flight, while another thread reads the
# socket and must not be disturbed, and while nothing is in flight.
_TICK, _WAITED, _IDLE = 0.001, 0.005, 0.2
# It rests so many times as long as its last look took of a core, 5 ms at most. A look at the logs of 1,024
# workers takes a millisecond, so a look each millisecond took half of a core.
_REST = 4


class Pumped(Protocol):
    """What the pump needs of its session."""

    receiver: Receiver
    requests: Requests

    @property
    def logs(self) -> Sequence[Log]:
        """What has a command log."""


@final
class Pump:
    """The thread of one session. `stir` wakes it, and `parked[0]` says whether it sleeps."""

    def __init__(self, session: Pumped) -> None:
        self._session = session
        # An Event would not do: its lock is taken in Python code, where Ctrl-C can come before the code that
        # gives it back, and then nobody gets it.
        self._stirred: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stir, self.parked = partial(self._stirred.put, None), [False]
        self._over = False
        self.thread = threading.Thread(target=self._run, name="distruntime-pump", daemon=True)

    def start(self) -> None:
        """Begin to pump."""
        self.thread.start()

    def stop(self, timeout: float) -> None:
        """Block until the thread has ended, for `timeout` seconds at most. Return at once in that thread."""
        self._over = True
        self.stir()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(timeout)

    def _run(self) -> None:
        took = 0.0
        while not self._over:
            if self._active():
                rest = min(max(_TICK, _REST * took), _WAITED)
                time.sleep(_WAITED if self._session.requests.attended else rest)
            else:
                self.parked[0] = True
                # Something may have been sent before the mark stood.
                if not self._active():
                    with suppress(queue.Empty):
                        self._stirred.get(timeout=_IDLE)
                self.parked[0] = False
                while not self._stirred.empty():
                    self._stirred.get_nowait()
            began = time.thread_time()
            try:
                self._session.requests.glance(self._session.receiver.read)
                for node in self._session.logs:
                    waits = node.words or node.freed or node.outlet.unsent
                    if waits and not node.busy and not node.gathering():
                        node.flush()
                self._session.requests.announcer.show()
                if self._session.requests.output:
                    self._session.requests.output.tell()
                    self._session.requests.output.show()
            except ChannelClosed:
                return
            except Exception:
                # Without the pump nobody would take acknowledgements while no thread waits.
                log.exception("the pump met an error; it goes on")
            took = time.thread_time() - began

    def _active(self) -> bool:
        return len(self._session.requests) > 0 or any(
            node.flights or node.words for node in self._session.logs
        )
