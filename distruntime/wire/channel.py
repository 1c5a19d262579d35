"""A ROUTER socket that any thread may send on: with `Inbox`, which reads it, the only place that touches
ZeroMQ sockets.

    sender threads --- send() ---> [lock] ROUTER <---> peers, by name
    one waiter ------ receive() -> poll(ZMQ_FD, wake, monitor) without the lock, then drain under it

ZMQ_FD is edge-triggered: any call that lets libzmq process its commands, a send included, swallows the edge
of a message that arrived meanwhile. Hence the two rules that keep messages from being lost from sight: a
waiter drains under the lock before it starts to wait, and whoever uses the socket while somebody waits looks
at EVENTS afterwards and wakes the waiter.
"""

from __future__ import annotations

import hmac
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final, overload

import zmq
import zmq.auth.thread
import zmq.backend

from ..errors import ConfigurationError, DistruntimeError
from .address import listener, resolve, unusable, wants_ipv6
from .connections import Connections, Peer
from .connections import PeerEvent as PeerEvent
from .descriptors import require
from .frames import FRAME, ROOM, Long, Part, is_large
from .inbox import LARGE as LARGE
from .inbox import Frames, Inbox
from .keys import KeyPair, needs_key
from .link import Delivery, Link
from .shield import RLock, shield
from .wake import Wake

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
_ZAP_DOMAIN = "distruntime"
# These are plain integers: `&` of two of pyzmq's enumerations costs 4 us, a tenth of a round trip.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# The k-th entry has the flags of a message with k frames behind the peer's name.
_FLAGS = [(_MORE,) * frames + (_NOBLOCK,) for frames in range(8)]
# The kernel holds at most so many connections until they are accepted.
_BACKLOG = 1024
# A connection has so many seconds to prove its key. The proof takes four short messages, and a peer that is
# slower dials again. A silent stranger holds a descriptor for that long.
HANDSHAKE = 2.0
# A dialled address that nobody listens at is tried again after so many milliseconds, which double up to the
# most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 100, 2_000
# A peer that hangs up so often in a row, in the handshake, is taken to hold another key. A flooded peer hangs
# up, too.
HANG_UPS = 8
# A network that brings fewer bytes a second is as good as none. A frame takes 16 s on it. If the rest of a
# frame has not come by then, it does not come: its length was changed on the way, or the other side has gone.
_SLOWEST = 1 << 15
_CLOSED = "this channel is closed, or belongs to the process that forked this one"


# pyzmq makes one socket and one mutex at a process's first frame that is not copied. Two threads that come
# first at once would make two of each, and then use one socket side by side. So the first such frame is an
# empty one, under this lock. A finalizer may come in between. Pyzmq's thread starts with it: what strikes
# there could leave that forgotten, and then no frame's memory would be known to be read.
_first = RLock()
# It has an item once that frame has been made.
_begun: list[bool] = []


def _begin() -> None:
    with shield, _first:
        if not _begun:
            zmq.Frame(b"", copy=False)
            _begun.append(True)


def _tracked(parts: Long | Sequence[Part]) -> tuple[Long | Sequence[Part], list[zmq.MessageTracker]]:
    """Return frames whose memory libzmq reads in place, if they are large, and a tracker for each."""
    if not _begun:
        _begin()
    if type(parts) is Long:
        return parts, parts.tracked(LARGE)
    made = [
        part if isinstance(part, zmq.Frame) else zmq.Frame(part, track=True, copy=len(part) < LARGE)
        for part in parts
    ]
    return made, [part.tracker for part in made if part.tracker is not None]


class PeerGone(DistruntimeError):
    """No connection to a peer of this name."""


def for_many(frame: bytes) -> zmq.Frame:
    """Return a frame that is sent to many peers and is in memory once, where each send of bytes makes a copy
    of its own.
    """
    return zmq.Frame(frame, copy=True)


class ChannelClosed(DistruntimeError):
    """The channel was closed, or belongs to the process that forked this one."""


@final
class Channel:
    """A ROUTER socket that any thread may send on and one thread at a time waits on.

    Args:
        listen: bind here: tcp://host:port (port 0 or *: any free port) or ipc://path.
        keys: peers must hold the same pair. None: anyone who reaches the socket is let in.
        name: what listening peers know this channel by; None: they choose.
        silence: seconds after which a peer that says nothing is disconnected; both sides then say something
            all the time, in libzmq's own
            thread, so that neither a long kernel nor a debugger keeps them from it. 0: never.
        patient: give the other side, whose thread may have gigabytes to send, longer: the time that a slow
            network takes for one frame.
    """

    def __init__(
        self,
        *,
        listen: str | None = None,
        keys: KeyPair | None = None,
        name: Peer | None = None,
        silence: float = 0.0,
        patient: bool = False,
    ) -> None:
        require("a socket")
        self.address = ""
        # It counts the bytes of messages without their peers' names.
        self.sent_bytes = 0
        self.keys = keys
        # A connection is closed here that has brought nothing for so many seconds; 0: none is.
        self.silence = silence
        # It is True once nobody has to prove who they are at some address of this channel: no pickle that
        # comes through it is opened.
        self.unproven = keys is None and listen is not None and needs_key(listen)
        # It knows its owner from the moment in which it is taken: a signal's handler may strike before the
        # holder's next line, and must be refused there and not wait for its own thread.
        self._lock = RLock()
        # It tells whether this very thread uses the socket: a handler or a finalizer runs inside that then.
        self._held_here: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        # Messages wait here if they come while another thread uses the socket.
        self._late: deque[tuple[Peer | Link, Delivery | None, Long | Sequence[Part], Sequence[int]]] = deque()
        self._closed = False
        # Invariant: while it is True, some thread is between a fruitless drain and the end of its poll.
        self._waiting = False
        self._woken = False
        self._wake = Wake()
        # This is a message on its way into the socket. It is one `map`, and its next item is the next frame,
        # whatever an interrupt did to the last. pyzmq runs signal handlers after each frame, and a message
        # that is cut in two would swallow the next.
        self._unsent: map[object] | None = None
        # The channel has a context of its own, because there is one ZAP handler per context, and so that
        # close() can be complete.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._connections = Connections(self._context, self._socket, has_key=keys is not None)
        self._inbox = Inbox(self._socket, self._connections)
        # Each dialled peer has its address here.
        self._dialled: dict[Peer, str] = {}
        try:
            self._set_up(name, server=listen is not None)
            if silence:
                self._beat(silence, patient)
            if listen is not None:
                self._bind(listen)
        except BaseException:
            self.close()
            raise
        # These are the C methods, past pyzmq's Python layer. They cost half as much, and they run no bytecode
        # on which Ctrl-C could cut a message in two.
        self._send_frame: Callable[[Part, int], object] = zmq.backend.Socket.send.__get__(self._socket)
        self._option: Callable[[int], int] = zmq.backend.Socket.get.__get__(self._socket)
        self._polling = False
        self._poll = select.poll()
        self._fd: int = self._option(zmq.FD)
        # They are reported in this order: connections before their messages.
        self._watched = self._connections.fd, self._fd, self._wake.fd
        for fd in self._watched:
            self._poll.register(fd, select.POLLIN)
        _channels.add(self)

    def connect(self, address: str, peer: Peer) -> None:
        """Dial `address` and call what answers there `peer`, after reconnections too.

        Return at once; messages wait for it.
        """
        with self._lock:
            self._check_open()
            self.unproven = self.unproven or (self.keys is None and needs_key(address))
            try:
                if self.keys is not None:
                    self._socket.curve_serverkey = self.keys.public
                resolved = resolve(address)
                self._socket.ipv6 = wants_ipv6(address, resolved)
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, peer)
                # 0 lets the pause between attempts not grow. On this machine an attempt costs nothing, and a
                # script's session waits for workers that have been there before it.
                self._socket.reconnect_ivl_max = 0 if address.startswith("ipc://") else _LONGEST_PAUSE
                self._socket.connect(address)
            except (zmq.ZMQError, UnicodeError) as error:
                raise unusable(address, error) from error
            self._dialled[peer] = address
            # The monitor names the first connection as it was dialled, later ones as it was resolved.
            self._connections.dial(
                peer, [address, self._socket.getsockopt_string(zmq.LAST_ENDPOINT), *resolved]
            )
            self._after_use()
        self._send_late()

    def hang_up(self, peer: Peer) -> None:
        """As `disconnect`, from wherever connect() has dialled this peer; of one that it has not, nothing."""
        address = self._dialled.get(peer)
        if address is not None:
            self.disconnect(address, peer)

    def disconnect(self, address: str, peer: Peer) -> None:
        """Hang up on a peer that connect() dialled and drop what was not sent yet. No event tells of it."""
        with self._lock:
            self._check_open()
            self._connections.hang_up(peer)
            self._dialled.pop(peer, None)
            try:
                self._socket.disconnect(address)
            except zmq.ZMQError as error:
                raise ConfigurationError(
                    f"got disconnect({address!r}), expected an address that connect() was given."
                ) from error
            self._after_use()
        self._send_late()

    @overload
    def send(self, to: Link, frames: Sequence[Part], *, copy: bool = True) -> Delivery: ...

    @overload
    def send(self, to: Peer, frames: Sequence[Part], *, copy: bool = True) -> zmq.MessageTracker | None: ...

    def send(
        self, to: Peer | Link, frames: Sequence[Part], *, copy: bool = True
    ) -> Delivery | zmq.MessageTracker | None:
        """Queue a message to a peer, or to whoever carries a link, which keeps it until it has arrived.
        Return at once.

        Args:
            frames: at least one; memory views must be contiguous. Large payloads belong behind the first.
            copy: False: frames of 64 KiB and more are not copied; leave them alone until what is returned is
                done.

        Raises:
            PeerGone: the peer is not connected (and was not dialled). A link's message is sent when there is
                a connection again.
        """
        if not frames:
            raise ValueError("got no frames, expected at least one")
        long = False
        # Nothing may fail once the first frame is in: the next message would become the tail of this one.
        for frame in frames:
            if type(frame) is not bytes and not (
                isinstance(frame, (bytearray, zmq.Frame))
                or (isinstance(frame, memoryview) and frame.contiguous)
            ):
                raise TypeError(
                    f"got a frame of {type(frame).__name__}, expected bytes, bytearray or a contiguous "
                    "memoryview"
                )
            size = frame.nbytes if type(frame) is memoryview else len(frame)
            self.sent_bytes += size
            if size > FRAME:
                long = True
        delivery = Delivery(to, frames) if type(to) is Link else None
        parts: Long | Sequence[Part] = Long(frames) if long else frames
        trackers: Sequence[zmq.MessageTracker] = ()
        # pyzmq runs Python code to make these, which an interrupt may end. So they are not made between two
        # frames.
        if not copy:
            parts, trackers = _tracked(parts)
            if delivery is not None:
                delivery.trackers = trackers
        flags: Sequence[int] = (
            _FLAGS[len(frames)] if len(frames) < len(_FLAGS) else (_MORE,) * len(frames) + (_NOBLOCK,)
        )
        # Otherwise Ctrl-C could come between the lock and the `try`.
        with shield:
            # This must never wait for the lock: its holder may be in a finalizer that waits for a lock of
            # this thread's, or may be this very thread.
            if self._held_here() or not self._lock.acquire(blocking=False):
                self._late.append((to, delivery, parts, flags))
                self._send_late()
            else:
                try:
                    if self._closed:
                        raise ChannelClosed(_CLOSED)
                    if self._unsent is not None:
                        self._finish_sending()
                    if self._late:
                        # What came first is sent first.
                        self._drain_late()
                    peer = to if isinstance(to, bytes) else to.peer
                    if delivery is not None:
                        delivery.link.keep(delivery)
                    if peer is not None:
                        sequence, flags = (
                            parts.to(peer) if isinstance(parts, Long) else ((peer, *parts), flags)
                        )
                        self._unsent = unsent = map(self._send_frame, sequence, flags)
                        try:
                            list(unsent)
                        except zmq.ZMQError as error:
                            self._unsent = None
                            if error.errno != zmq.EHOSTUNREACH:
                                raise
                            if delivery is None:
                                raise PeerGone(f"no connection to {peer!r}") from None
                            # An event tells of it.
                            delivery.link.peer = None
                        except BaseException:
                            self._finish_sending()
                            raise
                        self._unsent = None
                    if self._waiting:
                        self._after_use()
                finally:
                    self._lock.release()
                    if self._late:
                        self._send_late()
        if delivery is not None or copy:
            return delivery
        return zmq.MessageTracker(*trackers)

    def send_to_all(self, links: Sequence[Link], frames: Sequence[Part]) -> list[Delivery]:
        """Queue one message to whoever carries each of these links. Return at once.

        The frames are copied, unless they are those of `for_many`. A `send` for each link takes 2 to 3 times
        as long.
        """
        if self._closed:
            raise ChannelClosed(_CLOSED)
        parts = Long(frames) if any(map(is_large, frames)) else frames
        flags = (_MORE,) * len(frames) + (_NOBLOCK,)
        self.sent_bytes += sum(map(len, frames)) * len(links)
        deliveries = [Delivery(link, frames) for link in links]
        with shield:
            self._late.extend((delivery.link, delivery, parts, flags) for delivery in deliveries)
            self._send_late()
        return deliveries

    def resume(self, link: Link, peer: Peer, received: int) -> None:
        """Let `peer` carry a link from now on.

        Send it again what the other end, which has counted `received` messages, has not got.
        """
        with shield, self._lock:
            self._check_open()
            if self._unsent is not None:
                self._finish_sending()
            # They are younger, and stay so.
            self._drain_late()
            link.acknowledge(received)
            # This comes before the frames are read: see Delivery.done.
            link.peer = peer
            for delivery in link.kept:
                long = any(map(is_large, delivery.frames))
                parts, delivery.trackers = _tracked(Long(delivery.frames) if long else delivery.frames)
                flags: Sequence[int] = (_MORE,) * len(delivery.frames) + (_NOBLOCK,)
                sequence, flags = parts.to(peer) if isinstance(parts, Long) else ((peer, *parts), flags)
                self._unsent = map(self._send_frame, sequence, flags)
                self._finish_sending()
            if self._waiting:
                self._after_use()
        self._send_late()

    def receive(
        self, timeout: float | None, spin: float = 0.0, into: deque[tuple[Peer, Frames]] | None = None
    ) -> list[tuple[Peer, Frames]]:
        """Block until messages arrived, events() has news, wake() was called or `timeout` seconds passed;
        return the messages, if any.

        Each message is its sender and its frames: the first as bytes, the others as bytes, or from 64 KiB on
        as zmq.Frame (a buffer without a copy), or as Joined, where they came in pieces. A wake() while nobody
        waits makes the next wait return. `timeout` 0 only takes what is there, None waits for ever. Ctrl-C
        interrupts a wait and loses nothing. `into` takes the messages too, before Ctrl-C can come between.

        `spin` looks again and again for so many seconds before it sleeps: an answer that is about to come
        finds this thread awake. It keeps other Python threads waiting meanwhile.

        Raises:
            ChannelClosed: it is closed, or was closed meanwhile.
        """
        if self._held_here():
            raise DistruntimeError(
                "a finalizer or a signal handler that runs inside the socket's own code cannot wait for a "
                "value: let it note what it wants, and read later"
            )
        with shield, self._lock:
            if self._closed:
                raise ChannelClosed(_CLOSED)
            if self._connections.poll(0):
                # The connections are read before their messages, so each message is received with its fd.
                self._connections.read()
            self._inbox.drain()
            self._waiting = waiting = not self._inbox.messages and timeout != 0
        if self._late:
            self._send_late()
        if waiting:
            try:
                if spin:
                    self._spin(time.perf_counter() + spin)
                if not self._inbox.messages:
                    self._wait(None if timeout is None else time.monotonic() + timeout)
            finally:
                self._waiting = False
            if self._late:
                self._send_late()
        with shield:
            messages, self._inbox.messages = self._inbox.messages, []
            if into is not None:
                into.extend(messages)
        return messages

    @property
    def received_bytes(self) -> int:
        """Bytes of the messages that have come, without their peers' names."""
        return self._inbox.received_bytes

    def wake(self) -> None:
        """Make a waiting receive() return, or else the next one that would wait. From any thread."""
        # This takes no lock, because signal handlers call it.
        self._woken = True
        self._wake.signal()

    def events(self) -> list[PeerEvent]:
        """Return, without blocking, what happened to the connections since the last call, in order."""
        with self._lock:
            self._check_open()
            events = self._connections.events()
        self._send_late()
        return events

    def close(self, linger: float = 0.0) -> None:
        """Close the socket and drop what was not sent, at once or after so many seconds.

        Idempotent, without effect in a forked child.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.signal()
        if self._guard is not None:
            self._guard.stop()
        self._connections.close()
        self._socket.close(linger=round(linger * 1000))
        self._context.term()

    def __repr__(self) -> str:
        return f"<Channel {'closed' if self._closed else self.address or 'dialling'}>"

    def _set_up(self, name: Peer | None, *, server: bool) -> None:
        router = self._socket
        router.linger = 0
        # The windows of the command log bound memory; a send must never block or drop.
        router.sndhwm = router.rcvhwm = 0
        router.router_mandatory = True
        # A peer that reconnects under its name replaces its half-open predecessor.
        router.router_handover = True
        router.maxmsgsize = FRAME + ROOM
        router.backlog = _BACKLOG
        router.handshake_ivl = round(HANDSHAKE * 1000)
        # Without this the kernel would try for two minutes, at the end once a minute.
        router.connect_timeout = 5_000
        router.reconnect_ivl = _SHORTEST_PAUSE
        (
            router.tcp_keepalive,
            router.tcp_keepalive_idle,
            router.tcp_keepalive_intvl,
            router.tcp_keepalive_cnt,
        ) = 1, 30, 10, 3
        router.tcp_maxrt = 60_000
        if name is not None:
            router.routing_id = name
        if self.keys is not None:
            router.curve_publickey, router.curve_secretkey = self.keys.public, self.keys.secret
            if server:
                router.curve_server = True
                router.zap_domain = _ZAP_DOMAIN.encode("ascii")
                self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
                self._guard.start()
                self._guard.configure_curve_callback(_ZAP_DOMAIN, _OnlyKey(self.keys.public))

    def _beat(self, silence: float, patient: bool) -> None:
        router, beat = self._socket, max(1, round(silence * 1000 / 5))
        router.heartbeat_ivl = beat
        # A frame counts when it is whole. The side that gets the large ones must not take them for silence;
        # the other hears its beats.
        longest = (FRAME + ROOM) / _SLOWEST if patient else 0.0
        router.heartbeat_timeout = max(1, round((silence + longest) * 1000) - beat)
        router.tcp_maxrt = max(1, round(silence * 1000))

    def _bind(self, address: str) -> None:
        try:
            self._socket.ipv6 = wants_ipv6(address, resolve(address))
            own = listener(address, _BACKLOG)
            if own is None:
                self._socket.bind(address)
            else:
                with own:
                    # libzmq's own way asks for the system's interfaces, and ends the process where there is
                    # no descriptor for that.
                    self._socket.setsockopt(zmq.USE_FD, own.fileno())
                    self._socket.bind(address)
                    self._connections.strangers.listen(own.fileno())
                    own.detach()
                self._socket.setsockopt(zmq.USE_FD, -1)
        except (zmq.ZMQError, UnicodeError, OSError) as error:
            raise unusable(address, error) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if address.startswith("ipc://") and not address.startswith("ipc://@"):
            os.chmod(address[len("ipc://") :], 0o600)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(_CLOSED)

    def _after_use(self) -> None:
        """Wake the waiter if the call just made swallowed its edge (the lock is held)."""
        if self._waiting and self._option(_EVENTS) & _POLLIN:
            self._wake.signal()

    def _send_late(self) -> None:
        """Send what came while somebody was using the socket.

        Never waits: whoever has the lock now does this when it lets go of it.
        """
        while self._late:
            with shield:
                if self._held_here() or not self._lock.acquire(blocking=False):
                    return
                try:
                    if self._closed:
                        self._late.clear()
                    else:
                        self._drain_late()
                    if self._waiting:
                        self._after_use()
                finally:
                    self._lock.release()

    def _drain_late(self) -> None:
        while self._late:
            if self._unsent is not None:
                self._finish_sending()
            to, delivery, parts, flags = self._late.popleft()
            link = to if isinstance(to, Link) else None
            peer = to if isinstance(to, bytes) else to.peer
            if link is not None and delivery is not None:
                link.keep(delivery)
            if peer is not None:
                sequence, flags = parts.to(peer) if isinstance(parts, Long) else ((peer, *parts), flags)
                self._unsent = map(self._send_frame, sequence, flags)
                # A peer that has gone meanwhile shows as "disconnected".
                self._finish_sending()

    def _finish_sending(self) -> None:
        """Send the rest of a message that an interrupt cut short (the lock is held)."""
        try:
            for _ in self._unsent or ():
                pass
        except zmq.ZMQError:
            # Its first frame was refused already: the peer has gone.
            pass
        self._unsent = None

    def _spin(self, end: float) -> None:
        """Look for a message until `end`, leaving the lock to senders in between."""
        while time.perf_counter() < end:
            # libzmq's own thread may need this core to bring what is looked for.
            _yield()
            with self._lock:
                if self._closed:
                    return
                if self._option(_EVENTS) & _POLLIN:
                    with shield, suppress(zmq.Again):
                        self._inbox.read()
                    return
            if self._late:
                self._send_late()

    def _wait(self, deadline: float | None) -> None:
        """Block until there is something to return from receive()."""
        waiting = True
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = self._polled(left)
            with shield, self._lock:
                if self._closed:
                    raise ChannelClosed(_CLOSED)
                # Otherwise the time is up.
                waiting = bool(ready) and self._look(ready)
            if self._late:
                self._send_late()

    def _polled(self, timeout: float | None) -> list[tuple[int, int]]:
        # A signal handler may wait within a wait, and a poll object serves one at a time.
        if self._polling:
            nested = select.poll()
            for fd in self._watched:
                nested.register(fd, select.POLLIN)
            return nested.poll(timeout)
        self._polling = True
        try:
            return self._poll.poll(timeout)
        finally:
            self._polling = False

    def _look(self, ready: list[tuple[int, int]]) -> bool:
        """Take what the poll found (the lock is held); return whether to wait on."""
        waiting = True
        for fd, _ in ready:
            if fd == self._fd:
                try:
                    # This reads one message, and the next receive() looks for more. That saves two looks on
                    # the way of a lone reply.
                    self._inbox.read()
                except zmq.Again:
                    # Something else kept libzmq busy.
                    pass
            elif fd == self._connections.fd:
                waiting = not self._connections.read() and waiting
            else:
                self._wake.clear()
                waiting, self._woken = waiting and not self._woken, False
                self._inbox.drain()
        return waiting and not self._inbox.messages


class _OnlyKey:
    """The credentials provider of zmq.auth that lets in the holders of one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


# These are the open channels of this process. A fork copies them half alive, without their IO thread. In the
# child they count as closed. They are kept there for ever, since even their destructors would speak to
# threads that the child does not have.
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_abandoned: list[Channel] = []


def _abandon_in_child() -> None:
    global _first
    _first = RLock()
    _begun.clear()
    for channel in _channels:
        # Another thread may have held it when the process forked.
        channel._lock = RLock()
        channel._held_here = channel._lock._is_owned  # type: ignore[attr-defined]
        channel._closed = True
        _abandoned.append(channel)
    _channels.clear()


os.register_at_fork(after_in_child=_abandon_in_child)
