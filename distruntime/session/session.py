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
from typing import Any, Concatenate, ParamSpec

from ..errors import DistruntimeError, ProtocolError, SessionClosed, UsageError, WaitTimeout
from ..log.handle import Place
from ..log.ledger import Cause
from ..log.line import user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.node import Node
from ..log.presence import Absence
from ..wire.channel import Channel, ChannelClosed, PeerGone
from ..wire.codec import Buffer, decode, encode
from ..wire.deadlines import ASK, CONNECT, DETACH, SHUTDOWN
from ..wire.identity import has_died, out_of_memory_kills
from ..wire.inbox import Frames
from ..wire.link import Delivery
from ..wire.messages import (
    Ack,
    AskMemory,
    BreakGroup,
    Detach,
    Done,
    Failed,
    Fetch,
    Goodbye,
    Join,
    MemoryHeld,
    Message,
    Part,
    Question,
    Refused,
    Reply,
    Welcome,
)
from ..wire.shared import Challenge, Loan, SharedPool
from ..wire.shield import shield
from ..wire.tally import Tally
from .failures import out_of_memory, remote_error
from .holders import lost_lines
from .places import Places
from .requests import Request, Requests
from .stalls import note_wait
from .timeouts import checked
from .worker_process import WorkerProcess

log = logging.getLogger("distruntime")
P = ParamSpec("P")

_TICK = 0.001  # seconds between looks of the pump while something is in flight
_WAITED = 0.005  # the same while another thread reads the socket: the pump must not get in its way
_SPIN = 0.0002  # seconds that a waiting thread looks for its reply before it sleeps
_LOOK = 0.1  # seconds after which even a busy socket does not keep from looking for dead workers
_INSIDE = 5.0  # seconds that a finalizer inside a log's own code waits for a value
_LAST_WORD = 1.0  # seconds that the end of a session waits for workers to hear of it
_LAST_STEPS = 2.0  # seconds that it waits for its own thread to end, and then for the workers of this machine before they are killed
_IDLE = 0.2  # seconds between looks while nothing is

Greeting = Join | Welcome | Refused


class Session:
    """What `init_master_worker` returns. A context manager: leaving it shuts the session down."""

    def __init__(self, channel: Channel, nodes: list[Node], name: str) -> None:
        self.channel, self.nodes, self.name = channel, nodes, name
        self.lasting = False  # whether it has a name that the user gave it, and may outlive this process
        self.patience = CONNECT.seconds  # how long a worker is waited for that is to come, as the user has it
        self.lock = (
            threading.RLock()
        )  # of every log: meshes and workers are issued to, and sent to, one at a time
        self.in_moment = False  # see moment.py
        self.meshes: list[MeshLog] = []  # the logs of meshes
        self.places = Places(nodes, self.require_open)
        # It tells what of the user's lived on a worker that is lost.
        self.losses = lost_lines
        self.requests = Requests()
        self.signals = count(1).__next__  # numbers of what streams wait for across nodes
        self.shared = SharedPool()
        self.challenge = Challenge(self.shared)
        self.closed: str | None = None
        self.local_workers: list[WorkerProcess | None] = []  # by node, those that this process has started
        self.starter: Callable[[int], WorkerProcess] | None = None  # starts the worker of a node again
        self._kills = out_of_memory_kills()
        # Called when the session is to end, while its workers still answer. Each is told until when (monotonic) those are waited for that
        # cannot be reached; None: for as long as it takes.
        self.before_end: list[Callable[[float | None], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.on_end: list[
            Callable[[], None]
        ] = []  # called where not only this process leaves the session, but it is over
        self.on_loss: list[Callable[[Node], None]] = []  # called when a worker is declared dead
        self.on_broken: Callable[[Node, int, str], None] = (
            _unknown  # called when a worker says that a group has broken
        )
        self.groups: Any = None  # the Groups of its workers, a layer up
        self.meeting: Any = None  # how the workers have come to know each other
        self.joined = False  # whether workers wait for each other: then what has gathered for one may be what another waits for
        self._looked = 0.0
        self._arrived: deque[tuple[bytes, Frames]] = deque()
        self.greetings: list[tuple[bytes, Greeting]] = []
        self.keeper_to_be: Any = None  # the same, while it starts
        self.keeper: Any = None  # the Keeper of its workers' connections, a layer up, once it has started
        self.parted: set[bytes] = set()  # connections that were closed again before there was a keeper
        self.early: list[
            tuple[bytes, Join]
        ] = []  # of workers that are there, and have dialled anew before there was a keeper
        self.retired: deque[bytes] = deque(maxlen=4096)  # names of connections that have been given up
        self._by_peer: dict[bytes, Node] = {
            node.link.peer: node for node in nodes if node.link.peer is not None
        }
        self.strangers = Tally(log.warning)  # what those who are no workers of it make this process say
        self._pid = os.getpid()
        self._stop = False
        # No Event: its lock is taken in Python code, where Ctrl-C can come before the code that gives it back, and then nobody gets it.
        self._stirred: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stir, self.parked = (
            partial(self._stirred.put, None),
            [False],
        )  # what wakes the pump, and whether it sleeps
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

    # -- the start ---------------------------------------------------------------------------------------------------------------

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

    def add_node(self, node: Node) -> None:
        """Take a worker that has welcomed the session."""
        assert node.link.peer is not None
        self.nodes.append(node)
        self._by_peer[node.link.peer] = node

    def by_peer(self, peer: bytes) -> Node | None:
        """Return whom a connection reaches now."""
        return self._by_peer.get(peer)

    def replace(self, node: Node) -> None:
        """Let a worker have the number of one that is lost: what lived there stays lost."""
        assert node.link.peer is not None
        self.places.forget(self.nodes[node.index])
        self.places.leave(self.nodes[node.index])
        self._by_peer[node.link.peer] = node
        self.nodes[node.index] = node
        self._begin(node)

    # -- requests ----------------------------------------------------------------------------------------------------------------

    def fetch(
        self, node: Node, ref: int, after: list[int], form: str, options: dict[str, Any], buffer: Any = None
    ) -> Request:
        """Ask for a value. Return at once; everything up to the positions in `after`, [stream, position, ...], is on its way then.

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
                        "a finalizer or a signal handler that runs inside the log's own sending cannot wait for what is still to be "
                        "sent: let it note what it wants, and read later"
                    )
            self.post(node, Fetch(request.number, ref, after, form, options))
        return request

    def ask(
        self,
        node: Node,
        question: Callable[Concatenate[int, P], Question[object]],
        *fields: P.args,
        **named: P.kwargs,
    ) -> Request:
        """Ask a worker something outside the log, by the class of a question and its fields. Return at once."""
        self.require_open()
        node.require_alive()
        request = self.requests.new(node)
        message = question(request.number, *fields, **named)
        request.form = type(message).__name__
        self.post(node, message)
        return request

    def result(self, request: Request, timeout: float | None = None) -> bool:
        """Block until the reply is here, reading the socket. Return False past the timeout (seconds). Ctrl-C leaves all usable."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.joined:
            for node in self.logs:
                if node.words:
                    node.flush()
        inside = self._inside()
        if inside:  # another thread may be the reader, and need the lock to go on
            deadline = min(deadline or math.inf, time.monotonic() + _INSIDE)
        try:
            done = self.requests.wait(lambda: request.done, self._read, deadline, request.node)
            if inside and timeout is None and not done:
                raise DistruntimeError(
                    f"a finalizer or a signal handler that runs inside the log's own code waits no longer than {_INSIDE:.0f} s for a "
                    "value: let it note what it wants, and read later"
                )
            return done
        except KeyboardInterrupt:
            # A future may be asked again, and shared memory is the worker's to write until it has answered.
            if request.then is None and not isinstance(request.buffer, Loan):
                self.requests.forget(request)
            raise

    def _inside(self) -> bool:
        """Whether this is a finalizer that the collector runs in the midst of a log's own code: nothing else waits with the lock."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def results(self, requests: Sequence[Request], timeout: float) -> None:
        """Block until all replies are here, or one that says why not, or the timeout (seconds) is past."""

        def enough() -> bool:
            return all(r.done for r in requests) or any(r.done and (r.cause or r.lost) for r in requests)

        self.requests.wait(enough, self._read, time.monotonic() + timeout, requests[0].node)

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
        """Block while the window of `node` is full, after sending the other nodes what has gathered for them."""
        if (
            self._inside()
        ):  # a few words more than the window are better than a thread that waits with the lock
            return
        for other in self.logs:
            other.flush()
        started = time.perf_counter()
        try:
            self.requests.wait(lambda: not node.busy or node.failed is not None, self._read, None, node)
        finally:
            note_wait("a full window", started)

    def synchronize(self, node: Node, timeout: float | None = None) -> bool:
        """Block until a worker has run everything issued so far; raise its first failure that nobody has read.

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
        """Raise the first failure on `node` that nobody has read; later ones are dependents or come next time."""
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
        """Return what is poisoned on a worker: (node, ref), or (node, ref, k) where only a mesh's k-th member there is.

        Block for one round trip, at most 1 s; nothing is known of a lost worker.
        """
        if self.closed is not None or node.failed is not None:
            return frozenset()
        asked = self.ask(node, AskMemory)
        if not self.result(asked, ASK.get()):
            self.requests.forget(asked)
        held: MemoryHeld | None = asked.value
        refs = held.poisoned if held is not None else []
        return frozenset((node.index, *(ref if isinstance(ref, tuple) else [ref])) for ref in refs)

    def _poisoned_if(self, cause: Cause, node: Node) -> frozenset[tuple[int, ...]]:
        # Who holds memory is told from what this process believes to be there, and after a failure much of that is not.
        return self.poisoned(node) if out_of_memory(cause.failure) else frozenset()

    def post(self, node: Node, message: Message | Question[object]) -> Delivery:
        """Send one message without payload to a worker; while it cannot be reached, the message waits."""
        sent = self.channel.send(node.link, [encode(message)])
        assert isinstance(sent, Delivery)
        return sent

    def greet(self, peer: bytes, message: Message) -> None:
        """Send one message to whoever is at the other end of a connection, who may be gone."""
        with suppress(PeerGone):
            self.channel.send(peer, [encode(message)])

    def settle(self, node: Node, sent: Delivery) -> None:
        """Block until the memory of a message may be written again: it has arrived, or Ctrl-C or a cut made this keep a copy."""
        if self._inside():  # another thread may be the reader, and need the lock to go on
            sent.copy_frames()
            return
        try:
            self.requests.wait(lambda: sent.done or node.failed is not None, self._read, None, node)
        except BaseException:
            sent.copy_frames()
            raise

    # -- reading (one thread at a time, see Requests) ----------------------------------------------------------------------------

    def _read(self, timeout: float) -> None:
        if not self._arrived:
            self.channel.receive(timeout, _SPIN if timeout else 0.0, self._arrived)
        now = time.monotonic()
        if not self._arrived or now > self._looked + _LOOK:
            self._looked = now
            with shield:  # a loss that Ctrl-C cuts short would leave requests behind that nobody answers
                self._look()
        self._take_in()

    def _take_in(self) -> None:
        with shield:
            while self._arrived:  # one at a time: a reader within this one finds the rest here
                try:
                    peer, frames = self._arrived.popleft()
                except IndexError:  # such a reader has: a signal's handler, between these two lines
                    break
                self.take(peer, frames)

    def take(self, peer: bytes, frames: Sequence[Any]) -> None:
        """Act on one message. A worker that breaks the protocol is dropped; a stranger is not listened to."""
        buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
        try:
            if not buffers:
                raise ProtocolError("a message without frames")
            self._take(peer, decode(buffers[0]), buffers[1:])  # Invariant: counted exactly if it was taken
        except (
            ProtocolError,
            RecursionError,
        ) as error:  # the second where a worker nests what it says thousands deep
            node = self._by_peer.get(peer)
            if node is not None:
                self.lose(node, f"was dropped, because it broke the protocol: {error}")
            else:
                self.strangers.note(f"ignored a peer that is no worker: {error}")

    def _take(self, peer: bytes, message: Message, payloads: Sequence[Buffer]) -> None:
        node = self._by_peer.get(peer)
        if isinstance(message, (Join, Welcome, Refused)):
            if self.keeper is None:
                self.greetings.append((peer, message))
            else:
                self.keeper.greeted(peer, message)
            return
        if node is None:
            if peer in self.retired or (self.keeper is not None and self.keeper.knew(peer)):
                return  # sent before its connection was given up; it comes again on the next one
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
        if events:  # what came through a connection is there before the report of its end: a worker that has left is not one that died
            self.channel.receive(0, into=self._arrived)
            self._take_in()
        for event in events:
            node = self._by_peer.get(event.peer) if event.peer is not None else None
            if event.kind == "disconnected" and node is not None:
                self.cut(node, "the connection was closed" + (f" ({event.detail})" if event.detail else ""))
            elif self.keeper is not None:
                self.keeper.happened(event)
        for node in self.nodes[: len(self.local_workers)]:
            if node.failed is None and (epitaph := self._epitaph(node, wait=0)) is not None:
                self.lose(node, epitaph)
        for node in self.nodes:
            if node.failed is not None:  # also what was asked of it by who had just seen it alive
                self.requests.lose(node, node.failed)
        if self.keeper is not None:
            self.keeper.look()

    def cut(self, node: Node, why: str) -> None:
        """Note that a worker's connection is no more: what is sent to it waits for another one, unless the worker is known to be dead."""
        self._hang_up(node)
        if node.failed is not None or self.closed is not None:
            return
        epitaph = self._epitaph(node)
        if epitaph is not None or self.keeper is None:
            self.lose(node, epitaph or why)
        else:
            node.presence.absence = Absence(why)
            self.keeper.seek(node)

    def _hang_up(self, node: Node) -> None:
        peer, node.link.peer = node.link.peer, None
        if peer is not None:
            self._by_peer.pop(peer, None)
            self.retired.append(peer)
            self.channel.hang_up(
                peer
            )  # or libzmq would go on by itself, with messages that have no place any more

    def reached(self, node: Node, peer: bytes, received: int) -> None:
        """Go on with a worker on another connection, which has counted so many messages."""
        self._by_peer[peer] = node
        self.channel.resume(node.link, peer, received)
        node.presence.absence = None

    def _epitaph(self, node: Node, wait: float = 0.5) -> str | None:
        """Return how a worker of this machine has ended, or None if it runs, or nobody here can know."""
        worker = self.local_workers[node.index] if node.index < len(self.local_workers) else None
        if worker is None:
            assert node.welcome is not None
            return (
                f"(pid {node.welcome.pid}) died: there is no such process any more"
                if has_died(node.welcome.process)
                else None
            )
        deadline = time.monotonic() + wait
        ended = worker.poll()
        while ended is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the connection closes a moment before the kernel reports the death
            ended = worker.poll()
        if ended is None:
            return None
        words = worker.last_words()
        if "signal 9 " in ended and out_of_memory_kills() > self._kills:
            ended += ", by the kernel, which had no memory left (it says so in /proc/vmstat: oom_kill)"
        return f"(pid {worker.pid}) exited: {ended}" + (
            "; its last words:\n  " + "\n  ".join(words) + "\n" if words else ""
        )

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
                if self.keeper is not None and not quietly:
                    self.keeper.lost(node)

    def _pump_loop(self) -> None:
        while not self._stop:
            if self._active():
                time.sleep(_WAITED if self.requests.attended else _TICK)
            else:
                self.parked[0] = True
                if not self._active():  # something may have been sent before the mark stood
                    with suppress(queue.Empty):
                        self._stirred.get(timeout=_IDLE)
                self.parked[0] = False
                while not self._stirred.empty():
                    self._stirred.get_nowait()
            try:
                self.requests.glance(self._read)
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

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise `SessionClosed` if the session has ended, or this is a forked child of the process that owns it."""
        if self.closed is None:  # a forked child has called `abandon`
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
        """End the session: what is in flight gets `timeout` seconds (10) to finish, then workers drop their values.

        Raise the first failure that nobody has read, after everything is closed. Block for `timeout` and 5 s at most, and beyond that for
        a checkpoint whose workers can be reached. Ctrl-C ends that, too.
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

                self.requests.wait(idle, self._read, deadline, busy, "Ctrl-C ends the session now")
                unread = [
                    (n, n.ledger.unread[next(iter(n.ledger.unread))]) for n in self.nodes if n.ledger.unread
                ]
        finally:
            try:
                late = self._part(Goodbye("the master shut the session down"), time.monotonic() + _LAST_WORD)
                if late and self.lasting:
                    log.warning(
                        "%s has not heard that the session %r is over, and may keep it until its time is over",
                        late[0],
                        self.name,
                    )
            finally:  # Ctrl-C again, perhaps
                with shield:  # it takes no more than 2 s for the pump, and as many for all workers together
                    self._leave("it was shut down")
                    self._stop_workers(time.monotonic() + _LAST_STEPS)
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
                "this session has no name, so nobody could come back to it: name it, init_master_worker(session=...), "
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
                for worker in self.local_workers:
                    if worker is not None:
                        worker.leave()
                for callback in self.on_close:
                    callback()
        if late:
            raise WaitTimeout(
                f"not all that was issued to {late[0]} has arrived there within {limit:g} s; the rest is lost"
            )

    def _prepare_end(self, limit: float | None) -> float | None:
        """Let what must be over before the end come to its own; return until when (monotonic) what else is in flight is waited for.

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

    def _stop_workers(self, deadline: float) -> None:
        there = [worker for worker in self.local_workers if worker is not None]
        for worker in there:
            worker.terminate()
        for worker in there:
            worker.stop(max(0.0, deadline - time.monotonic()))

    def _part(self, word: Message, deadline: float | None) -> list[Node]:
        """Say the last word to each worker, which answers it by what has arrived, and wait for that; return whose answer has not come."""
        said = {node: self.post(node, word) for node in self.nodes if node.failed is None}

        def late() -> list[Node]:
            # By the word's number, which it may get a moment later: another thread may just be using the socket.
            return [
                n for n, d in said.items() if not 0 < d.number <= d.link.acknowledged and n.failed is None
            ]

        self.requests.wait(lambda: not late(), self._read, deadline, next(iter(said), None))
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


active: list[Session] = []  # the one session of this process, if any


def active_session() -> Session:
    """Return the session; raise `SessionClosed` if there is none."""
    if not active:
        raise SessionClosed("there is no session: call distruntime.init_master_worker() first")
    active[0].require_open()
    return active[0]
