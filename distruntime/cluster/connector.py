"""Makes the connections to a session's workers, the first ones and those after cuts and losses.

"The process died" and "the network is silent" are different. A death that this machine can see, or a machine
that answers that nobody listens there any more, is a loss at once; silence is one only after the grace time.
Until then everything that is sent waits, in order, and arrives once.
"""

from __future__ import annotations

import logging
import platform
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from ..errors import ConfigurationError, ConnectionFailed
from ..log.node import Node
from ..log.replies import devices_from
from ..session.session import Session
from ..wire.address import Lookups
from ..wire.channel import PeerEvent
from ..wire.identity import has_died, process
from ..wire.messages import PROTOCOL, Bury, Hello, Join, Refused, Welcome
from ..wire.units import span
from .absences import ended_early, look_for, refuses
from .connection import Connection
from .joins import Joins

log = logging.getLogger("distruntime")

# Once all workers have come, so many seconds lie between two polls that do something.
_LOOK = 0.1


class Connector:
    """The connections of one session, one for each node.

    The thread that reads the socket calls `happened`, `greeted` and `poll`; nothing else changes a
    `Connection`.

    Args:
        addresses: where each node's worker is, as the user says it; "" where it dials this process.
        endpoints: where it is dialled, by node, for those that a tunnel leads to.
        modes: the modes of the first greetings: see `Hello`.
        keep: seconds that a worker keeps the session while it has no master.
        grace: seconds that a worker that cannot be reached is waited for.
        restart_workers: start a lost worker again, where this process had started it.
        most: so many nodes the session may have: workers that dial become new nodes up to that number.
    """

    def __init__(
        self,
        session: Session,
        addresses: Sequence[str],
        modes: Sequence[str],
        *,
        keep: float,
        grace: float,
        restart_workers: bool,
        endpoints: Mapping[int, str] = MappingProxyType({}),
        most: int = 0,
    ) -> None:
        self.session, self.keep, self.grace, self.restart_workers = session, keep, grace, restart_workers
        # This master proves itself with it on later connections.
        self.token = secrets.token_bytes(16)
        self.connections = [
            Connection(k, address, endpoints.get(k, "")) for k, address in enumerate(addresses)
        ]
        self.nodes: dict[int, Node] = {}
        self._modes, self._most = [*modes], most
        self._joins = Joins(session, self.connections, self.nodes, self._wanted, self._one_more)
        self._met = False
        self._by_attempt: dict[bytes, Connection] = {}
        self._lookups = Lookups()
        # These connections have been given up.
        self._retired: deque[bytes] = deque(maxlen=4096)
        # These nodes are lost, and another worker is looked for in the place of each.
        self._awaited: set[int] = set()
        self._polled_at = 0.0
        # These are the last connections that were refused.
        self.refused: deque[str] = deque(maxlen=20)
        session.connector = self

    # -- the first meeting ---------------------------------------------------------------------------------

    def late(self) -> list[Connection]:
        """Return the nodes without a worker so far; raise `ConnectionFailed` where none can come any more."""
        late = [connection for connection in self.connections if connection.first]
        for connection in late:
            if connection.failure is not None:
                raise ConnectionFailed(connection.failure)
        return late

    def all_met(self) -> None:
        """Note that a worker has come for each node."""
        self._met = True

    # -- one node more -------------------------------------------------------------------------------------

    def add(self, address: str) -> Connection:
        """Seek the worker of one node more, at an address or, for "", among those that dial.

        Return at once. Any thread may call, while no other node is to come.
        """
        connection = Connection(len(self.connections), address)
        self._modes.append("new")
        self.connections.append(connection)
        self._polled_at = 0.0
        return connection

    def _one_more(self) -> Connection | None:
        return self.add("") if len(self.connections) < self._most else None

    def withdraw(self, connection: Connection) -> None:
        """Seek a node's first worker no longer. Return at once. The next `poll` drops the connection."""
        connection.withdrawn = True
        self._polled_at = 0.0

    def _drop_withdrawn(self) -> None:
        last = self.connections[-1]
        if last.withdrawn and last.number not in self.nodes and not last.attempts:
            self._modes.pop()
            self.connections.pop()

    # -- what happens, as the session tells it -------------------------------------------------------------

    def knows(self, peer: bytes) -> bool:
        """Whether this is the name of a connection on which a worker is greeted, or that was given up."""
        return peer in self._by_attempt or peer in self._retired

    def retire(self, peer: bytes) -> None:
        """Ignore what comes on a connection from now on, and hang up if this process has dialled it."""
        self._retired.append(peer)
        # libzmq would go on by itself, with messages that have no place any more.
        self.session.channel.hang_up(peer)

    def happened(self, event: PeerEvent) -> None:
        """Act on what a connection reports that is no worker's now."""
        connection = self._by_attempt.get(event.peer) if event.peer is not None else None
        if event.peer is None or connection is None or event.peer not in connection.attempts:
            if event.kind == "disconnected":
                self._joins.disconnected(event.peer or b"")
            if event.kind in ("auth_failed", "handshake_failed") and event.peer not in self._retired:
                self._refuse(
                    f"rejected a connection to {event.address}: "
                    + (event.detail or event.kind.replace("_", " "))
                )
        else:
            mode = connection.attempts[event.peer].mode
            if connection.happened(event, time.monotonic()):
                self._greet(connection, event.peer, mode)
            self._hang_up(connection)

    def _refuse(self, text: str) -> None:
        """Warn of a refused connection, and note it for who waits for workers in vain."""
        self.refused.append(text)
        self.session.strangers.note(text)

    def greeted(self, peer: bytes, message: Join | Welcome | Refused) -> None:
        """Act on what a worker says before it is one of the session's, or is again."""
        if isinstance(message, Join):
            self._joined(peer, message)
            return
        connection = self._by_attempt.get(peer)
        if connection is None:
            # The connection has been given up.
            node = self.session.receiver.by_peer.get(peer)
            if node is not None and isinstance(message, Refused):
                self.session.cut(node, f"the worker has left the connection: {message.reason}")
            return
        if connection.mode == self._wanted(connection):
            self._answered(connection, peer, message)
        else:
            connection.seek(self._wanted(connection), time.monotonic())
        self._hang_up(connection)

    def parted(self) -> None:
        """Seek a worker whose connection is no more: dial it, or wait for it where it dials this process."""
        self._polled_at = 0.0

    def lost(self, node: Node) -> None:
        """Report a loss, and seek who may come in its place."""
        log.warning("%s %s", node, node.failed)
        if node.presence.taken:
            return
        if not self.session.workers.can_start(node.index):
            self.revive(node)
        elif self.restart_workers:
            self._start_again(node)

    def revive(self, node: Node) -> None:
        """Seek another worker for a lost node, and start it if this process starts workers.

        Any thread may call.
        """
        if self.session.workers.can_start(node.index):
            self.session.workers.start(node.index)
            node.presence.connecting = True
        self._awaited.add(node.index)
        self._polled_at = 0.0

    def _start_again(self, node: Node) -> None:
        if self.session.workers.may_restart(node):
            try:
                self.revive(node)
            except Exception:
                # The error is a launcher's, and the launcher may be a user's. The reader must go on.
                log.exception("%s could not be started again", node)

    def poll(self) -> None:
        """Dial who is due, and give up who has been away for too long, or has died."""
        now = time.monotonic()
        if self._met and now < self._polled_at + _LOOK:
            return
        self._polled_at = now
        self.session.strangers.look()
        for peer, join in self._joins.surplus().items():
            self._joined(peer, join)
        for connection in self.connections:
            connection.seek(self._wanted(connection), now)
            connection.expire(now)
            self._hang_up(connection)
            if connection.is_due(now):
                self._dial(connection, now)
        self._drop_withdrawn()
        for node in self.session.nodes:
            if node.presence.connecting and ended_early(self.session, node) and self.restart_workers:
                self._start_again(node)
            if node.presence.absence is not None and node.failed is None:
                look_for(self.session, self.connections[node.index], node, self.grace, now)

    # -- a connection's way --------------------------------------------------------------------------------

    def _wanted(self, connection: Connection) -> str | None:
        """Return the mode of the greeting with which a worker is sought now; None: it is not sought."""
        node = self.nodes.get(connection.number)
        if self.session.closed is not None:
            return None
        if node is None:
            failed = connection.withdrawn or (self._met and connection.failure is not None)
            return None if failed else self._modes[connection.number]
        if node.failed is None:
            return "again" if node.presence.absence is not None else None
        awaited = node.index in self._awaited or not connection.address
        return "new" if self._met and awaited else None

    def _dial(self, connection: Connection, now: float) -> None:
        address = connection.endpoint
        if connection.first:
            # A worker of this machine was there, and is no more.
            if connection.has_ended and connection.is_local and refuses(address):
                connection.fail()
                return
        elif (found := self._lookups.endpoint(address)) is None:
            return
        else:
            address = found
        peer = connection.dial(now)
        self._by_attempt[peer] = connection
        try:
            self.session.channel.connect(address, peer)
        except ConfigurationError as error:
            if connection.first:
                raise
            # The address cannot be used any more. The grace time ends this.
            if connection.refused(peer, str(error), now):
                log.warning("looking for node %d: %s", connection.number, error)
            self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        while connection.abandoned:
            peer = connection.abandoned.pop()
            self._by_attempt.pop(peer, None)
            self.retire(peer)

    def hello(self, mode: str, received: int = 0) -> Hello:
        """Return the greeting of this session."""
        session = self.session
        versions = torch.__version__, platform.python_version(), socket.gethostname()
        return Hello(
            PROTOCOL,
            session.name,
            mode,
            self.token,
            self.keep,
            session.lasting,
            received,
            *versions,
            process(),
            session.challenge.name,
        )

    def _greet(self, connection: Connection, peer: bytes, mode: str) -> None:
        node = self.nodes.get(connection.number)
        received = node.link.received if node is not None and mode == "again" else 0
        self.session.greet(peer, self.hello(mode, received))

    def _answered(self, connection: Connection, peer: bytes, message: Welcome | Refused) -> None:
        now = time.monotonic()
        mode, round_trip = connection.answered(peer, now)
        node = self.nodes.get(connection.number)
        if isinstance(message, Welcome):
            if mode == "again":
                assert node is not None
                self._again(connection, node, peer, message)
            else:
                self._anew(connection, peer, message, round_trip)
        elif node is None:
            who = f"the worker at {connection.address}" if connection.address else "a worker"
            connection.refused(peer, f"{who} refused: {message.reason}", now)
        elif mode == "again":
            # Where another master has it now, nobody is to take it back.
            node.presence.taken = message.taken
            connection.refused(peer, message.reason, now)
            self.session.lose(node, f"does not have this session any more: {message.reason}")
        elif connection.refused(peer, message.reason, now):
            log.warning("%s refuses the session: %s", node, message.reason)

    def _again(self, connection: Connection, node: Node, peer: bytes, welcome: Welcome) -> None:
        absence = node.presence.absence
        self._reached(connection, peer)
        self.session.reached(node, peer, welcome.received)
        if absence is not None and absence.told:
            log.warning("%s is reachable again after %s", node, span(time.monotonic() - absence.since))
        node.flush()

    def _anew(self, connection: Connection, peer: bytes, welcome: Welcome, round_trip: float) -> None:
        """Let a worker be a node that had none, or that has lost its own."""
        session, number, first = self.session, connection.number, connection.first
        try:
            node = self._node(connection, peer, welcome, round_trip)
        except ConnectionFailed as error:
            if connection.refused(peer, str(error), time.monotonic()) and not first:
                log.warning("%s", error)
            return
        self._reached(connection, peer)
        self.nodes[number] = node
        self._awaited.discard(number)
        session.receiver.by_peer[peer] = node
        if first and self._met:
            session.join(node)
        elif not first:
            session.replace(node)
            log.warning(
                "%s is there again (pid %d). The tensors of the worker before it stay lost", node, welcome.pid
            )
        self._bury(node, welcome)

    def _reached(self, connection: Connection, peer: bytes) -> None:
        del self._by_attempt[peer]
        connection.welcomed(peer)

    def _node(self, connection: Connection, peer: bytes, welcome: Welcome, round_trip: float) -> Node:
        session, index = self.session, connection.number
        if welcome.protocol != PROTOCOL:
            raise ConnectionFailed(
                f"node {index} ({welcome.host}) speaks protocol {welcome.protocol}, this process {PROTOCOL}: "
                "install the same distruntime on both. There, `distruntime-worker --version` shows its "
                "version"
            )
        devices = devices_from(welcome.devices)
        if devices is None:
            raise ConnectionFailed(
                f"node {index} ({welcome.host}) says that its devices are {welcome.devices!r:.80}: "
                "is it a distruntime-worker?"
            )
        address = connection.address or session.channel.address
        shared = session.challenge.answered(welcome.shared, welcome.nonce)
        return Node(session, index, peer, address, replace(welcome, devices=devices), round_trip, shared)

    def _bury(self, node: Node, welcome: Welcome) -> None:
        """Tell a worker which of its absent masters were processes of this machine and have died."""
        for entry in welcome.left:
            match entry:
                case [str(name), list(master)] if has_died(master):
                    self.session.post(node, Bury(name))

    # -- workers that dial this process --------------------------------------------------------------------

    def _joined(self, peer: bytes, join: Join) -> None:
        now = time.monotonic()
        connection = self._joins.place(peer, join, met=self._met)
        mode = self._wanted(connection) if connection is not None else None
        if connection is None or mode is None:
            # There is no place, or the node was lost while its connection was closed.
            return
        connection.seek(mode, now)
        self._hang_up(connection)
        connection.join(peer, mode, join.incarnation, now)
        self._by_attempt[peer] = connection
        self._greet(connection, peer, mode)
