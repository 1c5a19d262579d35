"""A master's connection to its workers: nodes, requests, and the one socket they share."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar

from ..errors import DistruntimeError, ProtocolError, SessionClosed
from ..log.failure_log import WorkerWarnings
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Absence, Node
from ..log.tape import not_in_a_program, note_value_read, recorded
from ..wire.channel import Channel, PeerGone
from ..wire.codec import encode
from ..wire.deadlines import ASK, CONNECT
from ..wire.link import Delivery
from ..wire.messages import AskMaster, AskMemory, AskStatus, Message, Question, Status
from ..wire.shared import Challenge, Loan, SharedPool
from ..wire.shield import RLock, shield
from ..wire.strangers import Tally
from .ending import Ending, closed_in_a_child
from .failures import remote_error
from .holders import lost_lines
from .launched import LaunchedWorkers
from .launcher import Routes
from .places import Places
from .receiver import Connector, Pump, Receiver
from .requests import Request, Requests
from .stalls import note_wait
from .timeouts import deadline_in

log = logging.getLogger("distruntime")
P = ParamSpec("P")
R = TypeVar("R")

# A finalizer inside a log's own code waits at most so many seconds for a value.
_INSIDE = 5.0


class Session:
    """One master's session; users hold the `Session` of `cluster/user_session.py`, which shows less.

    A context manager: leaving it shuts the session down.
    """

    def __init__(self, channel: Channel, nodes: list[Node], name: str) -> None:
        self.channel, self.nodes, self.name = channel, nodes, name
        # A user has given it a name, so it may outlive this process.
        self.lasting = False
        # A worker that is to come is waited for so many seconds, as the user has said.
        self.patience = CONNECT.seconds
        # All logs have this lock: meshes and workers are issued to, and sent to, one at a time.
        self.lock = RLock()
        # log/total_order.py says what a moment is.
        self.in_moment = False
        # These are the logs of meshes.
        self.meshes: list[MeshLog] = []
        self.places = Places(nodes, self.require_open)
        # It tells what of the user's lived on a worker that is lost.
        self.losses: Callable[[Node], str] = lost_lines
        self.requests = Requests()
        self.requests.announcer.ask = self.ask_status
        self.requests.output.post = self.post
        self.warnings = WorkerWarnings()
        # It gives numbers to what streams wait for across nodes.
        self.signals = count(1).__next__
        self.shared = SharedPool()
        self.challenge = Challenge(self.shared)
        self.closed: str | None = None
        self.workers = LaunchedWorkers()
        self.connector: Connector
        # The session calls these when a worker is declared dead.
        self.on_loss: list[Callable[[Node], None]] = []
        # The session calls these when a worker has come in the place of one that was lost.
        self.on_return: list[Callable[[Node], None]] = []
        # It calls these where the user waits for all that a worker has.
        self.on_synchronize: list[Callable[[], None]] = []
        # The logs of new meshes call these.
        self.on_mesh: list[Callable[[MeshLog], None]] = []
        # The session calls this when a worker says that a group has broken.
        self.on_broken: Callable[[Node, int, str], None] = _unknown
        # The session calls this when somebody looks at a worker, which then asks where the program is.
        self.on_asked: Callable[[Node, AskMaster], None] = _silent
        # These are the Groups of its workers, a layer up.
        self.groups: object = None
        # This is the Meeting, which says how the workers have come to know each other.
        self.meeting: object = None
        # It says where workers dial each other, if not all of them reach each other directly.
        self.routes: Routes | None = None
        # It is True if workers wait for each other. Then what has gathered for one may be what another waits
        # for.
        self.joined = False
        # It says what strangers do, and not too often.
        self.strangers = Tally(log.warning)
        self._pid = os.getpid()
        self.receiver = Receiver(self)
        self.pump = Pump(self)
        self.ending = Ending(self)
        # Logs wake the pump by these, on the hot path.
        self.stir, self.parked = self.pump.stir, self.pump.parked

    def __repr__(self) -> str:
        return f"<session {self.name!r} of {len(self.nodes)}, {self.closed or 'open'}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ending.shut_down(raise_unread=kind is None)

    # -- the start -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Number the places known at start, in the order of the nodes, and begin to pump."""
        for node in self.nodes:
            self.places.enter(node)
        self.pump.start()

    @property
    def logs(self) -> Sequence[Log]:
        """What has a command log: the workers, and the meshes of several."""
        return [*self.nodes, *self.meshes] if self.meshes else self.nodes

    def replace(self, node: Node) -> None:
        """Let a worker that has joined have the number of one that is lost: what lived there stays lost."""
        self.places.forget(self.nodes[node.index])
        self.places.leave(self.nodes[node.index])
        self.nodes[node.index] = node
        self.places.enter(node)
        for callback in self.on_return:
            callback(node)

    def join(self, node: Node) -> None:
        """Let a worker be one node more."""
        self.nodes.append(node)
        self.places.enter(node)
        for callback in self.on_return:
            callback(node)

    # -- requests ------------------------------------------------------------------------------------------

    def ask(
        self,
        node: Node,
        question: Callable[Concatenate[int, P], Question[R]],
        *fields: P.args,
        **named: P.kwargs,
    ) -> Request[R]:
        """Ask a worker something outside the log, by the class of a question and its fields.

        Return at once.
        """
        self.require_open()
        node.require_alive()
        request: Request[R] = self.requests.new(node)
        try:
            message = question(request.number, *fields, **named)
            request.form = type(message).__name__
            self.post(node, message)
        except BaseException:
            self.requests.discard(request)
            raise
        return request

    def ask_status(self, node: Node, then: Callable[[Status], None] | None = None) -> Request[Status]:
        """Ask a worker where it is and what it runs; `then` hears of it, unless there is no answer.

        Return at once. The node's counts of what is queued know of the answer.
        """
        asked = self.ask(node, AskStatus)

        def hear(answered: Request[Status]) -> None:
            if answered.value is not None:
                node.told = max(node.told, answered.value.position)
                if then is not None:
                    then(answered.value)

        asked.when_done(hear)
        return asked

    def result(
        self, request: Request[object], timeout: float | None = None, *, quietly: bool = False
    ) -> bool:
        """Block until the reply is here, and read the socket; return False past the timeout (seconds).

        Show what workers have warned of until then, which raises if the user's filters say so. A caller that
        must go on waits `quietly`. Ctrl-C leaves everything usable.
        """
        # What one call makes once may ask for its metadata.
        if request.form != "specs":
            if recorded.name:
                raise not_in_a_program("wait for a worker", "wait before or after it")
            note_value_read()
        deadline = deadline_in(timeout)
        if self.joined:
            for node in self.logs:
                if node.words:
                    node.flush()
        inside = self.inside()
        # Another thread may be the reader, and need the lock to go on.
        if inside:
            deadline = min(deadline or math.inf, time.monotonic() + _INSIDE)
        try:
            done = self.requests.wait(
                lambda: request.done, self.receiver.read, deadline, request.node, prompts=not inside
            )
            if inside and timeout is None and not done:
                raise DistruntimeError(
                    "a finalizer or a signal handler that runs inside the log's own code waits no longer "
                    f"than {_INSIDE:.0f} s for a value: let it note what it wants, and read later"
                )
            if not inside:
                self.requests.output.show(patient=True)
            if not quietly:
                self.show_warnings()
            return done
        except KeyboardInterrupt:
            # A future may be asked again, and shared memory is the worker's to write until it has answered.
            if request.then is None and not isinstance(request.buffer, Loan):
                self.requests.discard(request)
            raise

    def show_warnings(self) -> None:
        """Show what workers have warned of; raise it if the user's filters say so."""
        if not self.inside():
            self.warnings.show()

    def inside(self) -> bool:
        """Whether this is a finalizer inside a log's own code: nothing else waits with the lock."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def value(self, request: Request[R], *, quietly: bool = False) -> R:
        """Block for the reply and return its value, as `result` does; raise the failure that it brings."""
        if not request.done:
            self.result(request, quietly=quietly)
        self.raise_for(request)
        return request.value

    def raise_for(self, request: Request[object]) -> None:
        """Raise what an answered request failed with, if it failed."""
        if request.cause is not None:
            raise remote_error(request.node, request.cause, lambda: self.poisoned(request.node))
        if request.lost is not None:
            if self.closed:
                raise SessionClosed(f"the session was shut down while a value was on its way ({self.closed})")
            raise request.node.lost_error()

    def throttle(self, node: Log, why: str = "a full window") -> None:
        """Block while the window of `node` is full; first send what has gathered for the other nodes.

        `why` is how `dr.profiler.stalls` names the wait.
        """
        # A few words more than the window are better than a thread that waits with the lock.
        if self.inside():
            return
        for other in self.logs:
            other.flush()
        started = time.perf_counter()
        try:
            self.requests.wait(
                lambda: not node.busy or node.failed is not None,
                self.receiver.read,
                None,
                node,
                room=True,
                prompts=True,
            )
        finally:
            note_wait(why, started)

    def poisoned(self, node: Node) -> frozenset[tuple[int, ...]]:
        """Return what is poisoned on a worker: (node, ref), or (node, ref, k) for a mesh's k-th member there.

        Block for one round trip, at most 1 s; nothing is known of a lost worker.
        """
        if self.closed is not None or node.failed is not None:
            return frozenset()
        asked = self.ask(node, AskMemory)
        if not self.result(asked, ASK.get()):
            self.requests.discard(asked)
        held = asked.value
        refs = held.poisoned if held is not None else []
        return frozenset((node.index, *(ref if isinstance(ref, tuple) else [ref])) for ref in refs)

    def post(self, node: Node, message: Message | Question[object]) -> Delivery:
        """Send one message without payload to a worker; while it cannot be reached, the message waits."""
        return self.channel.send(node.link, [encode(message)])

    def greet(self, peer: bytes, message: Message) -> None:
        """Send one message to whoever is at the other end of a connection, who may be gone."""
        with suppress(PeerGone):
            self.channel.send(peer, [encode(message)])

    def cut(self, node: Node, why: str) -> None:
        """Note that a worker's connection is no more.

        The worker is lost if it is known to be dead. Otherwise messages to it wait for another connection.
        """
        self._hang_up(node)
        if node.failed is not None or self.closed is not None:
            return
        epitaph = self.workers.epitaph(node)
        if epitaph is not None:
            self.lose(node, epitaph)
        else:
            node.presence.absence = Absence(why)
            self.connector.parted()

    def _hang_up(self, node: Node) -> None:
        peer, node.link.peer = node.link.peer, None
        if peer is not None:
            self.receiver.by_peer.pop(peer, None)
            self.connector.retire(peer)

    def reached(self, node: Node, peer: bytes, received: int) -> None:
        """Go on with a worker on another connection, which has counted so many messages."""
        self.receiver.by_peer[peer] = node
        self.channel.resume(node.link, peer, received)
        node.presence.absence = None

    def lose(self, node: Node, why: str, quietly: bool = False) -> None:
        """Declare a worker dead: its proxies raise `NodeFailed` from now on, everything else goes on."""
        with shield:
            if self.closed is None and node.failed is None:
                self._hang_up(node)
                node.link.end()
                node.fail(why)
                self.requests.lose(node, why)
                for callback in self.on_loss:
                    callback(node)
                if not quietly and not self.ending.told:
                    self.connector.lost(node)

    # -- the end -------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise `SessionClosed` if the session has ended, or if this is a forked child of its process."""
        # A forked child has called `abandon`.
        if self.closed is None:
            return
        if self.foreign:
            raise closed_in_a_child()
        another = bool(active) and active[0] is not self
        then = (
            "Make them again in the session that is open"
            if another
            else "Call init_master_worker for a new one"
        )
        raise SessionClosed(f"this session has ended ({self.closed}); its tensors are gone. {then}")

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that owns the session."""
        return os.getpid() != self._pid

    def abandon(self) -> None:
        """In a forked child: forget the session without touching what it shares with the parent."""
        self.closed = "it belongs to the parent process"
        self.places.forget()


def _silent(node: Node, message: AskMaster) -> None:
    """A session that says nothing of its program has this."""


def _unknown(node: Node, group: int, reason: str) -> None:
    raise ProtocolError(f"a worker names the group {group}, and there are none")


# This has the one session of this process, if there is any.
active: list[Session] = []


def session_of_log(log: Log) -> Session:
    """Return the session of a worker's or a mesh's log."""
    session = log.session
    assert isinstance(session, Session)
    return session


def active_session() -> Session:
    """Return the session; raise `SessionClosed` if there is none."""
    if not active:
        raise SessionClosed("there is no session: call distruntime.init_master_worker() first")
    active[0].require_open()
    return active[0]
