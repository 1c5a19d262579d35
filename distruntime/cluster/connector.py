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
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from types import MappingProxyType

import torch

from ..errors import ConfigurationError, ConnectionFailed
from ..log.node import Node
from ..log.replies import devices_from
from ..session.launched import last_words
from ..session.session import Session
from ..wire.address import host_of, resolve
from ..wire.channel import PeerEvent
from ..wire.identity import has_died, process
from ..wire.messages import PROTOCOL, Bury, Goodbye, Hello, Join, Refused, Welcome
from ..wire.units import span
from .absences import look_for, refuses
from .connection import Connection

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
        self._met = False
        self._by_attempt: dict[bytes, Connection] = {}
        # These are what the name in a node's address stands for, and the nodes whose name a thread looks up.
        self._endpoints: dict[int, str] = {}
        self._lookups: set[int] = set()
        # These connections have been given up.
        self._retired: deque[bytes] = deque(maxlen=4096)
        # These workers have dialled this process while all places seemed to be taken.
        self._surplus: dict[bytes, Join] = {}
        # These of them have been told that the session has all its workers.
        self._spare: set[bytes] = set()
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
                self._surplus.pop(event.peer or b"", None)
                self._spare.discard(event.peer or b"")
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

    def parted(self, node: Node) -> None:
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

    def poll(self) -> None:
        """Dial who is due, and give up who has been away for too long, or has died."""
        now = time.monotonic()
        if self._met and now < self._polled_at + _LOOK:
            return
        self._polled_at = now
        self.session.strangers.look()
        surplus, self._surplus = self._surplus, {}
        for peer, join in surplus.items():
            self._joined(peer, join)
        for connection in self.connections:
            connection.seek(self._wanted(connection), now)
            connection.expire(now)
            self._hang_up(connection)
            if connection.is_due(now):
                self._dial(connection, now)
        self._drop_withdrawn()
        for node in self.session.nodes:
            if node.presence.connecting:
                self._look_after(node)
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
        elif _has_name(address):
            # libzmq would look a name up in the thread that all connections share.
            found = self._endpoints.pop(connection.number, None)
            if found is None:
                self._look_up(connection)
                return
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

    def _look_up(self, connection: Connection) -> None:
        number = connection.number
        if number in self._lookups:
            return
        self._lookups.add(number)

        def look_up() -> None:
            try:
                self._endpoints[number] = next(iter(resolve(connection.address)), connection.address)
            finally:
                self._lookups.discard(number)

        threading.Thread(target=look_up, name=f"distruntime-resolves-{number}", daemon=True).start()

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
        for node in self.nodes.values():
            if node.failed is None and node.welcome.incarnation == join.incarnation:
                if node.link.peer is not None:
                    # This connection may be the older one, delayed. Then the worker hears of it on the other,
                    # and joins again.
                    self.session.greet(node.link.peer, Refused("the worker has connected anew", False))
                    self.session.cut(node, "the worker has connected anew")
                break
        else:
            self._displace(peer, join)
            found = self._vacant(join)
            if found is None and self._met and len(self.connections) < self._most:
                found = self.add("")
            if found is None:
                if self._met and peer not in self._spare:
                    self._spare.add(peer)
                    self.session.greet(peer, Goodbye("the session has all its workers"))
                    self.session.strangers.note(
                        f"a worker on {join.host} (pid {join.pid}) has dialled, and the session has all its "
                        "workers. It gets no place until one of them is lost"
                    )
                # A place may become free again. The worker may even have been started in the place of one
                # that is not known to be lost so far.
                self._surplus[peer] = join
                return
            self._spare.discard(peer)
            self._welcome_in(found, peer, join, now)
            return
        self._welcome_in(self.connections[node.index], peer, join, now)

    def _displace(self, peer: bytes, join: Join) -> None:
        """Give up an absent node whose number another worker asks for, unless that one has waited for it.

        A launcher elsewhere has seen the first one end, and has started another with its number. From here it
        is only silent, and would be waited for as long as a network may be cut.
        """
        node = self.nodes.get(join.node) if join.node is not None and self._met else None
        if node is None or node.failed is not None or node.presence.absence is None or peer in self._spare:
            return
        self.session.lose(
            node,
            f"(pid {node.welcome.pid}) was unreachable ({node.presence.absence.why}), and another worker was "
            f"started with its number: {join.host}, pid {join.pid}",
        )

    def _welcome_in(self, connection: Connection, peer: bytes, join: Join, now: float) -> None:
        mode = self._wanted(connection)
        if mode is None:
            # It was lost while its connection was closed.
            return
        connection.seek(mode, now)
        self._hang_up(connection)
        connection.join(peer, mode, join.incarnation, now)
        self._by_attempt[peer] = connection
        self._greet(connection, peer, mode)

    def _vacant(self, join: Join) -> Connection | None:
        """Return the connection for a worker that has dialled: the one it asks for, or the first free one."""
        wish = join.node
        if self._met:
            free = [
                c
                for c in self.connections
                if (self.nodes[c.number].failed is not None if c.number in self.nodes else not c.address)
            ]
            wanted = [c for c in free if (wish is None or c.number == wish) and self._wanted(c) is not None]
            return min(wanted, key=lambda connection: len(connection.attempts), default=None)
        if wish is not None and not 0 <= wish < len(self.connections):
            count = len(self.connections)
            raise ConnectionFailed(
                f"a worker on {join.host} asks to be node {wish}; this session has nodes 0 to {count - 1}"
            )
        there = None if wish is None else self.nodes.get(wish)
        if there is not None and there.failed is not None:
            # The worker comes in a lost worker's place, which is free once all have met. Another place is
            # another's.
            return None
        late = [connection for connection in self.connections if connection.first]
        same = [connection for connection in late if connection.has_joined(join.incarnation)]
        free = [connection for connection in late if not connection.attempts]
        return next(iter([*same, *(c for c in free if c.number == wish), *free]), None)

    # -- workers that are away, and lost ones --------------------------------------------------------------

    def _look_after(self, node: Node) -> None:
        """Take note if the worker that was started in a lost one's place has ended, too."""
        workers = self.session.workers
        worker = workers.of(node)
        ended = worker.poll() if worker is not None else None
        if worker is None or ended is None:
            return
        node.presence.connecting = False
        log.warning(
            "%s: the worker that started in its place ended before it was ready: %s; its last lines:\n  %s",
            node,
            ended,
            "\n  ".join(last_words(worker)),
        )
        if self.restart_workers:
            self._start_again(node)

    def _start_again(self, node: Node) -> None:
        if self.session.workers.may_restart(node):
            try:
                self.revive(node)
            except Exception:
                # The error is a launcher's, and the launcher may be a user's. The reader must go on.
                log.exception("%s could not be started again", node)


def _has_name(address: str) -> bool:
    """Whether an address names a host, where it could give the number."""
    host = host_of(address)
    try:
        ip_address(host)
    except ValueError:
        return bool(host)
    return False
