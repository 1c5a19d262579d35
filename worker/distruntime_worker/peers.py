"""The channel from worker to worker, for what is no tensor: signals of events, and word of poisoned values. Same keys as the master's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from itertools import count

from distruntime.errors import ConfigurationError, ProtocolError
from distruntime.wire.channel import Channel, ChannelClosed, PeerGone
from distruntime.wire.codec import decode, encode
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import Meet, Message, Peers, Signal, Taint, Tainted

log = logging.getLogger("distruntime.worker")

Handle = Callable[[int, Message], None]  # node that it comes from, message


class PeerChannel:
    """One session's connections to other workers. A thread of its own reads; any thread sends.

    `handle` gets what arrives, with the number of the node that sent it.
    """

    def __init__(self, address: str, keys: KeyPair | None, handle: Handle) -> None:
        self._channel = Channel(listen=address, keys=keys)
        self._handle = handle
        self._introduced: dict[bytes, int] = {}  # who has said `Meet`, by the name of the connection
        self._dialled: dict[int, tuple[str, bytes]] = {}  # where, and the connection's name
        self._dialling = threading.Lock()
        self._numbers = count().__next__
        self._known = threading.Event()
        self._peers: Peers | None = None
        threading.Thread(target=self._read, name="peers", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._channel.address

    def meet(self, peers: Peers) -> None:
        """Take the addresses of the others; raise `ProtocolError` where they are none."""
        if not all(isinstance(address, str) for address in peers.addresses) or not 0 <= peers.node < len(peers.addresses):
            raise ProtocolError(f"Peers makes no sense: node {peers.node} of {str(peers.addresses)[:80]}")
        self._peers = peers
        self._known.set()

    def send(self, node: int, message: Message) -> None:
        """Send to another worker, dialling it first. Return at once. To a worker that is gone, nothing is sent."""
        peers = self._peers
        if peers is None or not 0 <= node < len(peers.addresses):
            raise ProtocolError(f"{type(message).__name__} for node {node}, of which no Peers has told")
        if node == peers.node:
            self._handle(node, message)
            return
        try:
            with self._dialling:
                address, name = self._dialled.get(node, ("", b""))
                if address != peers.addresses[node]:  # another worker may have taken the place of a lost one
                    self._channel.hang_up(name)
                    address, name = peers.addresses[node], f"node-{node}.{self._numbers()}".encode()
                    self._channel.connect(address, name)
                    self._dialled[node] = address, name
                    self._channel.send(name, [encode(Meet(peers.secret, peers.node))])
            self._channel.send(name, [encode(message)])
        except (PeerGone, ChannelClosed):
            log.debug("node %d is gone: %s not sent", node, type(message).__name__)
        except ConfigurationError as error:  # that node's word, passed on by the master: none of this worker's other streams may suffer
            log.warning("node %d cannot be reached, %s not sent: %s", node, type(message).__name__, error)

    def close(self) -> None:
        """Close the socket; its thread ends."""
        self._channel.close()

    def _read(self) -> None:
        while True:
            try:
                arrived = self._channel.receive(None)
                self._introduce()
            except ChannelClosed:
                return
            for peer, frames in arrived:
                try:
                    if len(frames) != 1 or not isinstance(frames[0], bytes):
                        raise ProtocolError(f"a message of {len(frames)} frames")
                    self._take(peer, decode(frames[0]))
                except ProtocolError as error:
                    log.warning("a worker that breaks the protocol: %s", error)

    def _introduce(self) -> None:
        """Say who speaks on every new connection: one that was cut and came back counts as another at its other end."""
        for event in self._channel.events():
            if event.kind == "connected" and event.peer is not None and event.peer.startswith(b"node-") and self._peers is not None:
                with suppress(PeerGone):  # cut again
                    self._channel.send(event.peer, [encode(Meet(self._peers.secret, self._peers.node))])

    def _take(self, peer: bytes, message: Message) -> None:
        match message:
            case Meet(secret=secret, node=node):
                self._known.wait(10.0)  # the master may have told the other one first
                if self._peers is None or not compare_digest(secret, self._peers.secret):
                    raise ProtocolError("Meet without the session's secret")
                if not 0 <= node < len(self._peers.addresses):
                    raise ProtocolError(f"Meet as node {node}, of {len(self._peers.addresses)}")
                self._introduced[peer] = node
            case Signal() | Taint() | Tainted():
                node = self._introduced.get(peer, -1)
                if node < 0:
                    raise ProtocolError(f"{type(message).__name__} from a peer that has not said Meet")
                self._handle(node, message)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__} to another")
