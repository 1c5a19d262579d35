"""A master's connection to its workers: nodes, requests, and the one socket they share."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Protocol

from ..errors import DistruntimeError, ProtocolError, SessionClosed, UsageError, WaitTimeout
from ..log.handle import Place
from ..log.ledger import Cause
from ..log.line import user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..log.presence import Absence
from ..log.replies import asked
from ..wire.channel import Channel, ChannelClosed, PeerEvent, PeerGone
from ..wire.codec import Buffer, decode, encode
from ..wire.deadlines import ASK, CONNECT, DETACH, SHUTDOWN
from ..wire.link import Delivery
from ..wire.messages import (
    Ack,
    Ask,
    BreakGroup,
    Detach,
    Done,
    Failed,
    Fetch,
    Goodbye,
    Join,
    Message,
    Part,
    Refused,
    Reply,
    Welcome,
)
from ..wire.shared import Challenge, Loan, SharedPool
from ..wire.shield import shield
from ..wire.tally import Tally
from .failures import out_of_memory, remote_error
from .holders import lost_lines
from .launched import LaunchedWorkers
from .places import Places
from .requests import Request, Requests
from .stalls import note_wait
from .timeouts import checked

log = logging.getLogger("distruntime")

# Seconds between looks of the pump: while something is in flight, while another thread reads the socket,
# which it must not disturb, and while nothing is in flight.
_TICK, _WAITED, _IDLE = 0.001, 0.005, 0.2
# A waiting thread looks so many seconds for its reply before it sleeps.
_SPIN = 0.0002
# After so many seconds even a busy socket does not keep from looking for dead workers.
_LOOK = 0.1
# A finalizer inside a log's own code waits at most so many seconds for a value.
_INSIDE = 5.0
# The end of a session waits so many seconds for workers to hear of it.
_LAST_WORD = 1.0
# It waits so many seconds for its own thread to end, and as many for all its workers before they are killed.
_LAST_STEPS = 2.0


class Connector(Protocol):
    """What makes the connections of a session's workers and keeps them.

    The thread that reads the socket calls it.
    """

    def knows(self, peer: bytes) -> bool:
        """Whether this is the name of a connection on which a worker is greeted, or that was given up."""

    def retire(self, peer: bytes) -> None:
        """Let nothing count any more that comes on a connection."""

    def greeted(self, peer: bytes, message: Join | Welcome | Refused) -> None:
        """Act on what a worker says before it is one of the session's, or is again."""

    def happened(self, event: PeerEvent) -> None:
        """Act on what a connection reports that is no worker's now."""

    def parted(self, node: Node) -> None:
        """Seek a worker whose connection is no more."""

    def lost(self, node: Node) -> None:
        """Report a loss, and seek who may come in its place."""

    def revive(self, node: Node) -> None:
        """Seek another worker for a lost node, and start it if this process starts workers.

        Any thread may call.
        """

    def poll(self) -> None:
        """Do what is due."""


class Session:
    """What `init_master_worker` returns. A context manager: leaving it shuts the session down."""

    def __init__(self, channel: Channel, nodes: list[Node], name: str) -> None:
        self.channel, self.nodes, self.name = channel, nodes, name
        # A user has given it a name, so it may outlive this process.
        self.lasting = False
        # A worker that is to come is waited for so many seconds, as the user has said.
        self.patience = CONNECT.seconds
        # All logs have this lock: meshes and workers are issued to, and sent to, one at a time.
        self.lock = threading.RLock()
        # log/moment.py says what a moment is.
        self.in_moment = False
        # These are the logs of meshes.
        self.meshes: list[MeshLog] = []
        self.places = Places(nodes, self.require_open)
        # Tells what of the user's lived on a worker that is lost.
        self.losses = lost_lines
        self.requests = Requests()
        # Gives numbers to what streams wait for across nodes.
        self.signals = count(1).__next__
        self.shared = SharedPool()
        self.challenge = Challenge(self.shared)
        self.closed: str | None = None
        self.workers = LaunchedWorkers()
        self.connector: Connector
        # Called when the session is to end, while its workers still answer. Each is told until when
        # (monotonic) those are waited for that cannot be reached; None: for as long as it takes.
        self.before_end: list[Callable[[float | None], None]] = []
        self.on_close: list[Callable[[], None]] = []
        # Called when the session is over, and not only left by this process.
        self.on_end: list[Callable[[], None]] = []
        # Called when a worker is declared dead.
        self.on_loss: list[Callable[[Node], None]] = []
        # Called when a worker has come in the place of one that was lost.
        self.on_return: list[Callable[[Node], None]] = []
        # Called when a worker says that a group has broken.
        self.on_broken: Callable[[Node, int, str], None] = _unknown
        # These are the Groups of its workers, a layer up.
        self.groups: Any = None
        # This is the Meeting, which says how the workers have come to know each other.
        self.meeting: Any = None
        # Whether workers wait for each other. Then what has gathered for one may be what another waits for.
        self.joined = False
        self._looked = 0.0
        self._arrived: deque[tuple[bytes, Sequence[Any]]] = deque()
        self._by_peer: dict[bytes, Node] = {
            node.link.peer: node for node in nodes if node.link.peer is not None
        }
        # Says what strangers do, and not too often.
        self.strangers = Tally(log.warning)
        self._pid = os.getpid()
        self._stop = False
        # No Event: its lock is taken in Python code, where Ctrl-C can come before the code that gives it
        # back, and then nobody gets it.
        self._stirred: queue.SimpleQueue[None] = queue.SimpleQueue()
        # These wake the pump, and say whether it sleeps.
        self.stir, self.parked = partial(self._stirred.put, None), [False]
        self._pump = threading.Thread(target=self._pump_loop, name="distruntime-pump", daemon=True)

    def __repr__(self) -> str:
        count = len(self.nodes)
        return f"<distruntime session, {count} node{'s' if count != 1 else ''}, {self.closed or 'open'}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(raise_unread=kind is None)

    # -- the start -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Number the places known at start, in the order of the nodes, and begin to pump."""
        for node in self.nodes:
            self._begin(node)
        self._pump.start()

    def _begin(self, node: Node) -> None:
        for name, *_ in node.welcome.devices:
            self.places.pin(Place(node.index, name))

    @property
    def logs(self) -> Sequence[Log]:
        """What has a command log: the workers, and the meshes of several."""
        return [*self.nodes, *self.meshes] if self.meshes else self.nodes

    def join(self, node: Node) -> None:
        """Listen to a worker that has welcomed the session."""
        assert node.link.peer is not None
        self._by_peer[node.link.peer] = node

    def by_peer(self, peer: bytes) -> Node | None:
        """Return whom a connection reaches now."""
        return self._by_peer.get(peer)

    def replace(self, node: Node) -> None:
        """Let a worker that has joined have the number of one that is lost: what lived there stays lost."""
        self.places.forget(self.nodes[node.index])
        self.places.leave(self.nodes[node.index])
        self.nodes[node.index] = node
        self._begin(node)
        for callback in self.on_return:
            callback(node)

    # -- requests ------------------------------------------------------------------------------------------

    def fetch(
        self, node: Node, ref: int, after: list[int], form: str, options: dict[str, Any], buffer: Any = None
    ) -> Request:
        """Ask for a value. Return at once.

        Everything up to the positions in `after`, [stream, position, ...], is on its way then.

        `buffer` is where the parts of a large reply are put together.
        """
        self.require_open()
        node.require_alive()
        request = self.requests.new(node, form)
        request.buffer = buffer
        with node.lock:
            last = max(after[1::2])
            if last > node.base:
                node.flush(last)
                if last > node.base and any(log.flushing for log in self.logs):
                    self.requests.forget(request)
                    raise DistruntimeError(
                        "a finalizer or a signal handler that runs inside the log's own sending cannot wait "
                        "for what is still to be "
                        "sent: let it note what it wants, and read later"
                    )
            self.post(node, Fetch(request.number, ref, after, form, options))
        return request

    def ask(self, node: Node, what: str, detail: Sequence[Any] = ()) -> Request:
        """Ask a worker about itself. Return at once."""
        self.require_open()
        node.require_alive()
        request = self.requests.new(node, asked(what, detail))
        self.post(node, Ask(request.number, what, list(detail)))
        return request

    def result(self, request: Request, timeout: float | None = None) -> bool:
        """Block until the reply is here, and read the socket; return False past the timeout (seconds).

        Ctrl-C leaves everything usable.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.joined:
            for node in self.logs:
                if node.words:
                    node.flush()
        inside = self._inside()
        # Another thread may be the reader, and need the lock to go on.
        if inside:
            deadline = min(deadline or math.inf, time.monotonic() + _INSIDE)
        try:
            done = self.requests.wait(lambda: request.done, self.read, deadline, request.node)
            if inside and timeout is None and not done:
                raise DistruntimeError(
                    "a finalizer or a signal handler that runs inside the log's own code waits no longer "
                    f"than {_INSIDE:.0f} s for a "
                    "value: let it note what it wants, and read later"
                )
            return done
        except KeyboardInterrupt:
            # A future may be asked again, and shared memory is the worker's to write until it has answered.
            if request.then is None and not isinstance(request.buffer, Loan):
                self.requests.forget(request)
            raise

    def _inside(self) -> bool:
        """Whether this is a finalizer inside a log's own code: nothing else waits with the lock."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def results(self, requests: Sequence[Request], timeout: float) -> None:
        """Block until all replies are here, or one that says why not, or the timeout (seconds) is past."""

        def enough() -> bool:
            return all(r.done for r in requests) or any(r.done and (r.cause or r.lost) for r in requests)

        self.requests.wait(enough, self.read, time.monotonic() + timeout, requests[0].node)

    def value(self, request: Request) -> Any:
        """Block for the reply and return its value; raise the failure that it brings."""
        if not request.done:
            self.result(request)
        self.raise_for(request)
        return request.value

    def raise_for(self, request: Request) -> None:
        """Raise what an answered request failed with, if it failed."""
        if request.cause is not None:
            raise remote_error(request.node, request.cause, self._poisoned_if(request.cause, request.node))
        if request.lost is not None:
            if self.closed:
                raise SessionClosed(f"the session was shut down while a value was on its way ({self.closed})")
            raise request.node.lost_error()

    def throttle(self, node: Log) -> None:
        """Block while the window of `node` is full; first send what has gathered for the other nodes."""
        # A few words more than the window are better than a thread that waits with the lock.
        if self._inside():
            return
        for other in self.logs:
            other.flush()
        started = time.perf_counter()
        try:
            self.requests.wait(lambda: not node.busy or node.failed is not None, self.read, None, node)
        finally:
            note_wait("a full window", started)

    def synchronize(self, node: Node, timeout: float | None = None) -> bool:
        """Block until a worker has run everything issued so far; raise its first unread failure.

        Return False past the timeout (seconds).
        """
        timeout = checked(timeout)
        node.require_alive()
        with node.lock:
            node.follow_meshes(user_line())
            node.flush()
            target = node.base
        request = self.requests.new(node, "done")
        self.post(node, Fetch(request.number, 0, [0, target], "done", {}))
        if not self.result(request, timeout):
            self.requests.forget(request)
            return False
        self.raise_for(request)
        self.raise_unread(node)
        return True

    def raise_unread(self, node: Node) -> None:
        """Raise the first failure on `node` that nobody has read.

        Later ones depend on it, or come next time.
        """
        if node.ledger.unread:
            key = next(iter(node.ledger.unread))
            more = len(node.ledger.unread) - 1
            cause = node.ledger.unread[key]
            node.ledger.unread.clear()
            if more:
                log.warning(
                    "%s: %s%d more failed operation%s",
                    node,
                    "at least " if more >= 999 else "",
                    more,
                    "s" if more > 1 else "",
                )
            raise remote_error(node, cause, self._poisoned_if(cause, node))

    def poisoned(self, node: Node) -> frozenset[tuple[int, ...]]:
        """Return what is poisoned on a worker: (node, ref), or (node, ref, k) for a mesh's k-th member there.

        Block for one round trip, at most 1 s; nothing is known of a lost worker.
        """
        if self.closed is not None or node.failed is not None:
            return frozenset()
        asked = self.ask(node, "memory")
        if not self.result(asked, ASK.get()):
            self.requests.forget(asked)
        refs: list[Any] = asked.value[2] if asked.value is not None else []
        return frozenset((node.index, *(ref if isinstance(ref, list) else [ref])) for ref in refs)

    def _poisoned_if(self, cause: Cause, node: Node) -> frozenset[tuple[int, ...]]:
        # Who holds memory is told from what this process believes to be there, and after a failure much of
        # that is not.
        return self.poisoned(node) if out_of_memory(cause.failure) else frozenset()

    def post(self, node: Node, message: Message) -> Delivery:
        """Send one message without payload to a worker; while it cannot be reached, the message waits."""
        sent = self.channel.send(node.link, [encode(message)])
        assert isinstance(sent, Delivery)
        return sent

    def greet(self, peer: bytes, message: Message) -> None:
        """Send one message to whoever is at the other end of a connection, who may be gone."""
        with suppress(PeerGone):
            self.channel.send(peer, [encode(message)])

    def settle(self, node: Node, sent: Delivery) -> None:
        """Block until the memory of a message may be written again.

        The message has arrived then, or has been copied because of Ctrl-C or a cut.
        """
        # Another thread may be the reader, and need the lock to go on.
        if self._inside():
            sent.settle()
            return
        try:
            self.requests.wait(lambda: sent.done or node.failed is not None, self.read, None, node)
        except BaseException:
            sent.settle()
            raise

    # -- reading (one thread at a time, see Requests) ------------------------------------------------------

    def read(self, timeout: float) -> None:
        """Read the socket, and act on what is there: the one thread calls it that `Requests` lets read."""
        if not self._arrived:
            self.channel.receive(timeout, _SPIN if timeout else 0.0, self._arrived)
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
                    # Such a reader has taken it: a signal's handler, between these two lines.
                    break
                self.take(peer, frames)

    def take(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Act on one message. A worker that breaks the protocol is dropped; a stranger is not listened to."""
        buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
        try:
            if not buffers:
                raise ProtocolError("a message without frames")
            # Invariant: a message is counted exactly if it was taken.
            self._take(peer, decode(buffers[0]), buffers[1:])
        except (ProtocolError, RecursionError) as error:
            # RecursionError comes where a worker nests what it says thousands deep.
            node = self._by_peer.get(peer)
            if node is not None:
                self.lose(node, f"was dropped, because it broke the protocol: {error}")
            else:
                self.strangers.note(f"ignored a peer that is no worker: {error}")

    def _take(self, peer: bytes, message: Message, payloads: Sequence[Buffer]) -> None:
        node = self._by_peer.get(peer)
        if isinstance(message, (Join, Welcome, Refused)):
            self.connector.greeted(peer, message)
            return
        if node is None:
            if self.connector.knows(peer):
                # It was sent before its connection was given up, and comes again on the next one.
                return
            raise ProtocolError(f"{type(message).__name__} from a peer that is no worker of this session")
        link = node.link
        if isinstance(message, Ack):
            link.acknowledge(message.received)
            return
        if link.count(sum(map(len, payloads)) if payloads else 0, type(message) is Part):
            self.greet(peer, Ack(link.received))
        match message:
            case Done():
                node.done(message)
            case Part():
                self.requests.part(node, message.request, message.offset, payloads)
            case Reply():
                self.requests.reply(node, message.request, message.value, payloads)
            case Failed():
                self.requests.fail(node, message.request, message.failure)
            case BreakGroup():
                self.on_broken(node, message.group, message.reason)
            case Goodbye():
                node.presence.has_left = True
                self.lose(node, f"left: {message.reason}")
            case Detach():
                node.presence.has_left = node.presence.taken = True
                self.lose(node, f"left: {message.reason}")
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _look(self) -> None:
        events = self.channel.events()
        # What came through a connection is there before the report of its end: a worker that has left is not
        # one that died.
        if events:
            self.channel.receive(0, into=self._arrived)
            self._take_in()
        for event in events:
            node = self._by_peer.get(event.peer) if event.peer is not None else None
            if event.kind == "disconnected" and node is not None:
                self.cut(node, "the connection was closed" + (f" ({event.detail})" if event.detail else ""))
            else:
                self.connector.happened(event)
        for node in self.nodes[: len(self.workers)]:
            if node.failed is None and (epitaph := self.workers.epitaph(node, wait=0)) is not None:
                self.lose(node, epitaph)
        for node in self.nodes:
            # Somebody may have asked it who had just seen it alive.
            if node.failed is not None:
                self.requests.lose(node, node.failed)
        self.connector.poll()

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
            self.connector.parted(node)

    def _hang_up(self, node: Node) -> None:
        peer, node.link.peer = node.link.peer, None
        if peer is not None:
            self._by_peer.pop(peer, None)
            self.connector.retire(peer)

    def reached(self, node: Node, peer: bytes, received: int) -> None:
        """Go on with a worker on another connection, which has counted so many messages."""
        self._by_peer[peer] = node
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
                if not quietly:
                    self.connector.lost(node)

    def _pump_loop(self) -> None:
        while not self._stop:
            if self._active():
                time.sleep(_WAITED if self.requests.attended else _TICK)
            else:
                self.parked[0] = True
                # Something may have been sent before the mark stood.
                if not self._active():
                    with suppress(queue.Empty):
                        self._stirred.get(timeout=_IDLE)
                self.parked[0] = False
                while not self._stirred.empty():
                    self._stirred.get_nowait()
            try:
                self.requests.glance(self.read)
                for node in self.logs:
                    if (node.words or node.freed) and not node.busy and not node.gathering():
                        node.flush()
                self.requests.announcer.look()
            except ChannelClosed:
                return
            except Exception:
                log.exception("the pump met an error; it goes on")

    def _active(self) -> bool:
        return len(self.requests) > 0 or any(node.flights or node.words for node in self.logs)

    # -- the end -------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise `SessionClosed` if the session has ended, or if this is a forked child of its process."""
        # A forked child has called `abandon`.
        if self.closed is None:
            return
        if self.foreign:
            raise SessionClosed(
                "remote tensors belong to the process that made them; this is a forked child of it. "
                "Fetch before you fork (dr.fetch), or call init_master_worker in the child"
            )
        if self.closed is not None:
            another = bool(active) and active[0] is not self
            then = (
                "Make them again in the session that is open"
                if another
                else "Call init_master_worker for a new one"
            )
            raise SessionClosed(f"this session has ended ({self.closed}); tensors of it are gone. {then}")

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that owns the session."""
        return os.getpid() != self._pid

    def abandon(self) -> None:
        """In a forked child: forget the session without touching what it shares with the parent."""
        self.closed = "it belongs to the parent process"
        self.places.forget()

    def shutdown(self, *, raise_unread: bool = True, timeout: float | None = None) -> None:
        """End the session: what is in flight may take `timeout` seconds (10), then workers drop their values.

        Raise the first failure that nobody has read, after everything is closed. Block for `timeout` and 5 s
        at most, and beyond that for a checkpoint whose workers can be reached. Ctrl-C ends that, too.
        """
        limit = SHUTDOWN.get() if timeout is None else checked(timeout)
        if self.closed is not None or self.foreign:
            return
        unread: list[tuple[Node, Any]] = []
        try:
            deadline = self._prepare_end(limit)
            if raise_unread:
                for node in self.logs:
                    node.flush()
                there = [node for node in self.nodes if node.failed is None and node.presence.absence is None]
                busy = next((n for n in there if n.flights), None)

                def idle() -> bool:
                    here = [n for n in there if n.failed is None and n.presence.absence is None]
                    return not any(n.flights for n in here)

                self.requests.wait(idle, self.read, deadline, busy, "Ctrl-C ends the session now")
                unread = [
                    (n, n.ledger.unread[next(iter(n.ledger.unread))]) for n in self.nodes if n.ledger.unread
                ]
        finally:
            try:
                late = self._part(Goodbye("the master shut the session down"), time.monotonic() + _LAST_WORD)
                if late and self.lasting:
                    log.warning(
                        "%s has not heard that the session %r is over, and may keep it until its time is "
                        "over",
                        late[0],
                        self.name,
                    )
            finally:
                # Ctrl-C may have come again. This takes no more than 2 s for the pump, and as many for all
                # workers together.
                with shield:
                    self._leave("it was shut down")
                    self.workers.stop(time.monotonic() + _LAST_STEPS)
                    for callback in (
                        *self.on_close,
                        *([] if any(node.presence.taken for node in self.nodes) else self.on_end),
                    ):
                        callback()
        if unread:
            raise remote_error(*unread[0])

    def detach(self, timeout: float | None = None) -> None:
        """Leave the session to its workers: see `dr.detach`. Block as `shutdown` does."""
        limit = DETACH.get() if timeout is None else checked(timeout)
        self.require_open()
        if not self.lasting:
            raise UsageError(
                "this session has no name, so nobody could come back to it: name it, "
                "init_master_worker(session=...), "
                "or end it with shutdown()"
            )
        late: list[Node] = []
        try:
            deadline = self._prepare_end(limit)
            for node in self.logs:
                node.flush()
            late = self._part(Detach("the master leaves"), deadline)
        finally:
            with shield:
                self._leave("it was detached; resume=True attaches to it again")
                self.workers.leave()
                for callback in self.on_close:
                    callback()
        if late:
            raise WaitTimeout(
                f"not all that was issued to {late[0]} has arrived there within {limit:g} s; the rest is lost"
            )

    def _prepare_end(self, limit: float | None) -> float | None:
        """Wait for what must be over before the end; return until when (monotonic) the rest is waited for.

        Workers that cannot be reached are waited for once, not once for each thing that is waited for.
        """
        deadline = None if limit is None else time.monotonic() + limit
        for callback in self.before_end:
            callback(deadline)
        if limit is None or any(
            node.failed is None and node.presence.absence is not None for node in self.nodes
        ):
            return deadline
        return time.monotonic() + limit

    def _part(self, word: Message, deadline: float | None) -> list[Node]:
        """Say the last word to each worker, and wait until it has arrived there.

        Return the workers where it has not.
        """
        said = {node: self.post(node, word) for node in self.nodes if node.failed is None}

        def late() -> list[Node]:
            # A word may get its number a moment later, as another thread may just be using the socket.
            return [
                n for n, d in said.items() if not 0 < d.number <= d.link.acknowledged and n.failed is None
            ]

        self.requests.wait(lambda: not late(), self.read, deadline, next(iter(said), None))
        return late()

    def _leave(self, why: str) -> None:
        self.closed = why
        self._stop = True
        self.stir()
        self.places.forget()
        self.requests.lose(None, "shutdown")
        if self._pump.is_alive() and self._pump is not threading.current_thread():
            self._pump.join(_LAST_STEPS)
        self.channel.close()
        self.strangers.finish()
        self.shared.close()


def _unknown(node: Node, group: int, reason: str) -> None:
    raise ProtocolError(f"a worker names the group {group}, and there are none")


# This has the one session of this process, if there is any.
active: list[Session] = []


def active_session() -> Session:
    """Return the session; raise `SessionClosed` if there is none."""
    if not active:
        raise SessionClosed("there is no session: call distruntime.init_master_worker() first")
    active[0].require_open()
    return active[0]
