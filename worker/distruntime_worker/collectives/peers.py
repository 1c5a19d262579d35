"""The channel from worker to worker, for what is no tensor: signals of events, word of poisoned values, and
where groups' members are.

It has the same keys as the master's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hmac import compare_digest
from itertools import count

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire.channel import Channel, ChannelClosed, PeerEvent, PeerGone
from distruntime.wire.codec import decode, encode
from distruntime.wire.deadlines import UNREACHABLE
from distruntime.wire.keys import KeyPair
from distruntime.wire.link import Link
from distruntime.wire.messages import Ack, Entry, Meet, Message, Peers, Signal, Taint, Tainted
from distruntime.wire.shield import Lock
from distruntime.wire.strangers import Tally

from .listening import LISTENING

log = logging.getLogger("distruntime.worker")

# So many seconds pass before a worker is dialled again.
_PAUSE = 0.1
# The master tells of a worker that another one hears of sooner within so many seconds.
_TOLD = 10.0

# It takes the node that a message comes from, and the message.
Handle = Callable[[int, Message], None]


class _Way:
    """The way to another worker: a link, and the connection that is to carry it, which this worker dials."""

    def __init__(self, address: str, name: bytes) -> None:
        self.address, self.name = address, name
        self.link = Link()


class PeerChannel:
    """One session's connections to other workers. A thread of its own reads; any thread sends.

    `handle` gets what arrives, with the number of the node that sent it. Each worker dials where it sends to,
    and says `Meet`; the answer is an `Ack` with what has come on earlier connections, and the rest is sent
    again: a cut network costs no signal, and none comes twice.
    """

    def __init__(self, address: str, keys: KeyPair | None, handle: Handle) -> None:
        with LISTENING:
            self._channel = Channel(listen=address, keys=keys, silence=UNREACHABLE.get())
        self._handle = handle
        # This tells the worker's messages from those of one that had its node before.
        self._origin = os.urandom(16)
        # A connection that has said `Meet` has its node and what has come here, by its name.
        self._introduced: dict[bytes, tuple[int, Link]] = {}
        # The keys are the origins.
        self._incoming: dict[bytes, Link] = {}
        self._ways: dict[int, _Way] = {}
        self._dialling = Lock()
        # These nodes are dialled once more, each at its time.
        self._again: dict[int, float] = {}
        self._numbers = count().__next__
        self._strangers = Tally(log.warning)
        self._told = threading.Condition()
        self._peers: Peers | None = None
        threading.Thread(target=self._read, name="peers", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._channel.address

    def meet(self, peers: Peers) -> None:
        """Take the addresses of the others; raise `ProtocolError` where they are none."""
        if not all(isinstance(address, str) for address in peers.addresses) or not 0 <= peers.node < len(
            peers.addresses
        ):
            raise ProtocolError(f"Peers makes no sense: node {peers.node} of {str(peers.addresses)[:80]}")
        with self._told:
            self._peers = peers
            self._told.notify_all()

    def send(self, node: int, message: Message) -> None:
        """Send to another worker, dialling it first.

        Return at once; while it cannot be reached, the message waits.
        """
        peers = self._peers
        if peers is None or not 0 <= node < len(peers.addresses):
            raise ProtocolError(f"{type(message).__name__} for node {node}, of which no Peers has told")
        if node == peers.node:
            self._handle(node, message)
            return
        try:
            with self._dialling:
                way = self._ways.get(node)
                # Another worker may have taken the place of a lost one.
                if way is None or way.address != peers.addresses[node]:
                    if way is not None:
                        self._channel.hang_up(way.name)
                    way = self._dial(node, _Way(peers.addresses[node], b""))
            self._channel.send(way.link, [encode(message)])
        except ChannelClosed:
            log.debug("the session is over: %s not sent to node %d", type(message).__name__, node)
        # The address is that node's word, passed on by the master: no other stream of this worker may suffer.
        except ConfigurationError as error:
            log.warning("node %d cannot be reached, %s not sent: %s", node, type(message).__name__, error)

    def _dial(self, node: int, way: _Way) -> _Way:
        """Dial a worker, under a new name.

        Under the old one libzmq would send what was for the broken connection.
        """
        assert self._peers is not None
        # A worker that has taken a lost one's place is not dialled anew when the lost one's time has come.
        self._again.pop(node, None)
        self._channel.hang_up(way.name)
        # What is said from now on waits until the new connection has told what came on the old one.
        way.link.peer = None
        way.name = f"node-{node}.{self._numbers()}".encode()
        self._channel.connect(way.address, way.name)
        # What the reader hears of the connection before waits for `_dialling`, which is held.
        self._ways[node] = way
        # The message waits for the connection.
        self._say(way.name, Meet(self._peers.secret, self._peers.node, self._origin))
        return way

    def close(self) -> None:
        """Close the socket; its thread ends."""
        self._channel.close()

    def _read(self) -> None:
        while True:
            try:
                arrived = self._channel.receive(_PAUSE if self._again else self._strangers.due)
                for peer, frames in arrived:
                    self._hear(peer, frames)
                for event in self._channel.events():
                    self._happened(event)
                self._dial_again()
                self._strangers.look()
            except ChannelClosed:
                self._strangers.finish()
                return

    def _hear(self, peer: bytes, frames: Sequence[object]) -> None:
        try:
            if len(frames) != 1 or not isinstance(frames[0], bytes):
                raise ProtocolError(f"a message of {len(frames)} frames")
            self._take(peer, decode(frames[0]))
        except ProtocolError as error:
            self._strangers.note(f"a worker that breaks the protocol: {error}")

    def _node_of(self, name: bytes | None) -> int | None:
        return next((node for node, way in list(self._ways.items()) if way.name == name), None)

    def _happened(self, event: PeerEvent) -> None:
        with self._dialling:
            node = self._node_of(event.peer)
            if node is not None and event.kind != "connected":
                self._ways[node].link.peer = None
                self._again[node] = time.monotonic() + _PAUSE
        if node is None and event.kind == "disconnected" and event.peer is not None:
            self._introduced.pop(event.peer, None)

    def _dial_again(self) -> None:
        for node, when in list(self._again.items()):
            if time.monotonic() >= when:
                # The address was found wrong when it was dialled first, and that was said then.
                with self._dialling, suppress(ConfigurationError):
                    # Whoever sends may have dialled meanwhile.
                    if self._again.get(node) == when:
                        self._dial(node, self._ways[node])

    def _say(self, peer: bytes, message: Message) -> None:
        # An event tells of it.
        with suppress(PeerGone):
            self._channel.send(peer, [encode(message)])

    def _count(self) -> int:
        return 0 if self._peers is None else len(self._peers.addresses)

    def _take(self, peer: bytes, message: Message) -> None:
        match message:
            case Meet(secret=secret, node=node, origin=origin):
                # The master may have told the other one first, of all workers or of one that has just come.
                with self._told:
                    self._told.wait_for(lambda: self._peers is not None, _TOLD)
                    if self._peers is None or not compare_digest(secret, self._peers.secret):
                        raise ProtocolError("Meet without the session's secret")
                    self._told.wait_for(lambda: node < self._count(), _TOLD)
                if not 0 <= node < self._count():
                    raise ProtocolError(f"Meet as node {node}, of {len(self._peers.addresses)}")
                link = self._incoming.setdefault(origin, Link())
                for other in [name for name, (_, known) in self._introduced.items() if known is link]:
                    # The other end has given it up: what still comes on it comes again on this one.
                    del self._introduced[other]
                self._introduced[peer] = node, link
                self._say(peer, Ack(link.received))
            case Ack(received=received):
                self._acknowledged(peer, received)
            case Signal() | Taint() | Tainted() | Entry():
                if peer not in self._introduced:
                    raise ProtocolError(f"{type(message).__name__} from a peer that has not said Meet")
                node, link = self._introduced[peer]
                if link.count(0, False):
                    self._say(peer, Ack(link.received))
                self._handle(node, message)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__} to another")

    def _acknowledged(self, peer: bytes, received: int) -> None:
        node = self._node_of(peer)
        if node is None:
            # This belongs to a connection that was given up.
            return
        link = self._ways[node].link
        if link.peer is None:
            self._channel.resume(link, peer, received)
        else:
            link.acknowledge(received)
