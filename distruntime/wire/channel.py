"""A ROUTER socket that any thread may send on: the only place that touches ZeroMQ sockets.

    sender threads --- send() ---> [lock] ROUTER <---> peers, by name
    one waiter ------ receive() -> poll(ZMQ_FD, wake, monitor) without the lock, then drain under it

ZMQ_FD is edge-triggered: any call that lets libzmq process its commands, a send included, swallows the edge of a message that arrived
meanwhile. Hence the two rules that keep messages from being lost from sight: a waiter drains under the lock before it starts to wait, and
whoever uses the socket while somebody waits looks at EVENTS afterwards and wakes the waiter.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import zmq
import zmq.auth.thread
import zmq.backend
import zmq.utils.monitor

from distruntime.errors import ConfigurationError, DistruntimeError
from distruntime.wire.keys import KeyPair

Peer = bytes
Frames = list["bytes | zmq.Frame"]

# Frames this large stay where libzmq received them, smaller ones become bytes: a copy is cheaper than keeping a message alive (pyzmq's
# COPY_THRESHOLD draws the same line for sending).
LARGE = 65536

_ZAP_DOMAIN = "distruntime"
_MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HEAD = (zmq.NOBLOCK, zmq.NOBLOCK), (True, False)  # receive two frames: the name copied, the first of the message not
_REST = (zmq.NOBLOCK,), (False,)


class PeerGone(DistruntimeError):
    """No connection to a peer of this name."""


class ChannelClosed(DistruntimeError):
    """The channel was closed, or belongs to the process that forked this one."""


@dataclass(frozen=True)
class PeerEvent:
    """What happened to a connection.

    "connected" comes with a dialled peer's handshake, or with the first message of one that dialled us; "disconnected" only after it.
    `peer` is None where somebody unknown failed to get in.
    """

    kind: Literal["connected", "disconnected", "handshake_failed", "auth_failed"]
    peer: Peer | None
    address: str
    detail: str = ""


@final
class Channel:
    """A ROUTER socket that any thread may send on and one thread at a time waits on.

    Args:
        listen: bind here: tcp://host:port (port 0 or *: any free port) or ipc://path.
        keys: peers must hold the same pair. None: anyone who reaches the socket is let in.
        name: what listening peers know this channel by; None: they choose.
        max_message: a peer that sends a larger frame is disconnected, in bytes.
    """

    def __init__(
        self, *, listen: str | None = None, keys: KeyPair | None = None, name: Peer | None = None, max_message: int = 1 << 34
    ) -> None:
        self.address = ""
        self._keys = keys
        self._lock = threading.Lock()
        self._closed = False
        self._waiting = False  # Invariant: True => some thread is between a fruitless drain and the end of its poll
        self._woken = False
        self._wake = _Wake()
        self._inbox: list[tuple[Peer, Frames]] = []  # read from the socket, not returned yet
        self._partial: list[
            Any
        ] = []  # read of the next message: its sender (bytes), then zmq.Frames; not empty only within _drain or after Ctrl-C
        self._events: deque[PeerEvent] = deque()
        self._dialled: dict[str, Peer] = {}  # endpoint -> peer, for connect()
        self._dialled_peers: frozenset[Peer] = frozenset()
        self._reached: set[Peer] = set()  # dialled peers that are connected now
        self._open: set[int] = set()  # accepted connections, by fd
        self._peer_of: dict[int, Peer] = {}  # accepted connections whose peer has spoken, and its inverse
        self._fd_of: dict[Peer, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: one ZAP handler per context, and close() can be complete
        self._guard: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._context.socket(zmq.PAIR)
        try:
            self._set_up(name, max_message, server=listen is not None)
            if listen is not None:
                self._bind(listen)
        except BaseException:
            self.close()
            raise
        # The C methods, past pyzmq's Python layer: half the cost, and no bytecode on which Ctrl-C could cut a message in two.
        self._send_frame: Callable[..., Any] = zmq.backend.Socket.send.__get__(self._socket)
        self._receive_frame: Callable[..., Any] = zmq.backend.Socket.recv.__get__(self._socket)
        self._option: Callable[[int], Any] = zmq.backend.Socket.get.__get__(self._socket)
        self._poll = select.poll()
        for fd in (self._option(zmq.FD), self._wake.fd, self._monitor_fd):
            self._poll.register(fd, select.POLLIN)
        _channels.add(self)

    def connect(self, address: str, peer: Peer) -> None:
        """Dial `address` and call what answers there `peer`, after reconnections too. Return at once; messages wait for it."""
        with self._lock:
            self._check_open()
            try:
                if self._keys is not None:
                    self._socket.curve_serverkey = self._keys.public
                resolved = _resolve(address)
                self._socket.ipv6 = _wants_ipv6(address, resolved)
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, peer)
                self._socket.connect(address)
            except (zmq.ZMQError, UnicodeError) as error:
                raise _unusable(address, error) from error
            # The monitor names the first connection as it was dialled, later ones as it was resolved.
            self._dialled.update(dict.fromkeys([address, self._socket.getsockopt_string(zmq.LAST_ENDPOINT), *resolved], peer))
            self._dialled_peers |= {peer}
            self._after_use()

    def disconnect(self, address: str, peer: Peer) -> None:
        """Hang up on a peer that connect() dialled and drop what was not sent yet. No event tells of it."""
        with self._lock:
            self._check_open()
            for endpoint in [endpoint for endpoint, dialled in self._dialled.items() if dialled == peer]:
                del self._dialled[endpoint]
            self._dialled_peers -= {peer}
            self._reached.discard(peer)
            try:
                self._socket.disconnect(address)
            except zmq.ZMQError as error:
                raise ConfigurationError(f"got disconnect({address!r}), expected an address that connect() was given.") from error
            self._after_use()

    def send(self, peer: Peer, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> zmq.MessageTracker | None:
        """Queue a message to `peer`. Return at once.

        Args:
            frames: at least one; memory views must be contiguous.
            copy: False: frames of 64 KiB and more are not copied; leave them alone until the returned tracker is done.

        Raises:
            PeerGone: `peer` is not connected (and was not dialled).
        """
        last = len(frames)
        if not last:
            raise ValueError("got no frames, expected at least one")
        for frame in frames:  # nothing may fail once the first frame is in: the next message would become the tail of this one
            if not isinstance(frame, bytes) and not (isinstance(frame, memoryview) and frame.contiguous):
                raise TypeError(f"got a frame of {type(frame).__name__}, expected bytes or a contiguous memoryview")
        flags = [zmq.SNDMORE | zmq.NOBLOCK] * last
        flags.append(zmq.NOBLOCK)
        trackers: list[zmq.MessageTracker | None] = []
        with self._lock:
            self._check_open()
            try:
                # One C call for the whole message, so that an interrupt cannot leave half of it in the socket.
                trackers.extend(map(self._send_frame, (peer, *frames), flags, (True, *[copy] * last), (False, *[not copy] * last)))
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    raise PeerGone(f"no connection to {peer!r}") from None
                raise
            if self._waiting:
                self._after_use()
        if copy:
            return None
        return zmq.MessageTracker(*[tracker for tracker in trackers if tracker is not None])

    def receive(self, timeout: float | None) -> list[tuple[Peer, Frames]]:
        """Block until messages arrived, events() has news, wake() was called or `timeout` seconds passed; return the messages, if any.

        Each message is its sender and its frames: bytes, or from 64 KiB on zmq.Frame (a buffer without a copy). A wake() while nobody waits
        makes the next wait return. `timeout` 0 only takes what is there, None waits for ever. Ctrl-C interrupts and loses nothing.

        Raises:
            ChannelClosed: it is closed, or was closed meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._check_open()
            self._drain(all=True)
            self._waiting = not self._inbox and timeout != 0
        try:
            waiting = self._waiting
            while waiting:
                ready = self._poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000)
                with self._lock:
                    self._check_open()
                    waiting = not self._look(ready)
        finally:
            self._waiting = False
        messages, self._inbox = self._inbox, []
        return messages

    def wake(self) -> None:
        """Make a waiting receive() return, or else the next one that would wait. From any thread."""
        self._woken = True  # no lock: signal handlers call this
        self._wake.signal()

    def events(self) -> list[PeerEvent]:
        """Return, without blocking, what happened to the connections since the last call, in order."""
        with self._lock:
            self._check_open()
            self._read_monitor()
            found = list(self._events)
            self._events.clear()
            return found

    def close(self) -> None:
        """Close the socket and drop what was not sent. Prompt, idempotent, and without effect in a forked child."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.signal()
        if self._guard is not None:
            self._guard.stop()
        self._socket.monitor(None, 0)
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def __repr__(self) -> str:
        return f"<Channel {'closed' if self._closed else self.address or 'dialling'}>"

    def _set_up(self, name: Peer | None, max_message: int, *, server: bool) -> None:
        router = self._socket
        router.linger = 0
        router.sndhwm = router.rcvhwm = 0  # the windows of the command log bound memory; a send must never block or drop
        router.router_mandatory = True
        router.router_handover = True  # a peer that reconnects under its name replaces its half-open predecessor
        router.maxmsgsize = max_message
        router.backlog = 1024
        router.handshake_ivl = 10_000
        router.reconnect_ivl, router.reconnect_ivl_max = 100, 2_000
        router.tcp_keepalive, router.tcp_keepalive_idle, router.tcp_keepalive_intvl, router.tcp_keepalive_cnt = 1, 30, 10, 3
        router.tcp_maxrt = 60_000
        if name is not None:
            router.routing_id = name
        if self._keys is not None:
            router.curve_publickey, router.curve_secretkey = self._keys.public, self._keys.secret
            if server:
                router.curve_server = True
                router.zap_domain = _ZAP_DOMAIN.encode("ascii")
                self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
                self._guard.start()
                self._guard.configure_curve_callback(_ZAP_DOMAIN, _OnlyKey(self._keys.public))
        # By hand, not by get_monitor_socket(): past its default high-water mark libzmq's IO thread would block on unread events.
        self._monitor.rcvhwm = 0
        router.monitor("inproc://monitor", _MONITORED)
        self._monitor.connect("inproc://monitor")
        self._raw_news: list[bytes] = []
        self._receive_news: Callable[..., bytes] = zmq.backend.Socket.recv.__get__(self._monitor)
        self._news_option: Callable[[int], Any] = zmq.backend.Socket.get.__get__(self._monitor)
        self._monitor_fd: int = self._news_option(zmq.FD)

    def _bind(self, address: str) -> None:
        try:
            self._socket.ipv6 = _wants_ipv6(address, _resolve(address))
            self._socket.bind(address)
        except (zmq.ZMQError, UnicodeError) as error:
            raise _unusable(address, error) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if address.startswith("ipc://") and not address.startswith("ipc://@"):
            os.chmod(address[len("ipc://") :], 0o600)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed("this channel is closed, or belongs to the process that forked this one")

    def _after_use(self) -> None:
        """Wake the waiter if the call just made swallowed its edge (the lock is held)."""
        if self._waiting and self._option(zmq.EVENTS) & zmq.POLLIN:
            self._wake.signal()

    def _look(self, ready: list[tuple[int, int]]) -> bool:
        """Take in what the poll found; return whether the wait is over (the lock is held)."""
        over = not ready  # the time is up
        for fd, _ in ready:
            if fd == self._wake.fd:
                self._wake.clear()
                over, self._woken = over or self._woken, False
            elif fd == self._monitor_fd:
                known = len(self._events)
                self._read_monitor()
                over = over or len(self._events) > known
        self._drain(all=False)  # one message, and the next receive() looks for more: one look less on the way of a lone reply
        return over or bool(self._inbox)

    def _drain(self, *, all: bool) -> None:
        """Move what arrived to the inbox: every message, or the first (the lock is held)."""
        while self._partial or self._option(zmq.EVENTS) & zmq.POLLIN:
            if not self._partial:
                self._partial.extend(map(self._receive_frame, *_HEAD))  # one C call: no interrupt falls in between
            while self._partial[-1].more:
                self._partial.extend(map(self._receive_frame, *_REST))
            peer = self._partial[0]
            body: list[zmq.Frame] = self._partial[1:]
            if peer not in self._dialled_peers:
                self._identify(peer, body[0])
            entry = (peer, [frame.bytes if len(frame) < LARGE else frame for frame in body])
            self._inbox += (entry,)  # these two statements hold no call and no jump, so no interrupt falls in between either
            self._partial = []
            if not all:
                return

    def _identify(self, peer: Peer, frame: zmq.Frame) -> None:
        """Learn from the first message on an accepted connection whose it is: the monitor knows connections by fd only."""
        fd = int(frame.get(zmq.SRCFD))
        if self._peer_of.get(fd) == peer:
            return
        self._read_monitor()  # libzmq reported this connection before it passed on its messages, so after this `_open` is right
        predecessor = self._peer_of.pop(fd, None)
        if predecessor is not None and self._fd_of.get(predecessor) == fd:
            del self._fd_of[predecessor]
            self._events.append(PeerEvent("disconnected", predecessor, self.address))
        self._events.append(PeerEvent("connected", peer, self.address))
        if fd in self._open:
            self._peer_of[fd], self._fd_of[peer] = peer, fd
        else:
            self._events.append(PeerEvent("disconnected", peer, self.address, "gone before its first message was read"))

    def _read_monitor(self) -> None:
        while len(self._raw_news) == 2 or self._news_option(zmq.EVENTS) & zmq.POLLIN:
            if not self._raw_news:
                self._raw_news.extend(map(self._receive_news, (zmq.NOBLOCK, zmq.NOBLOCK)))
            news = zmq.utils.monitor.parse_monitor_message(self._raw_news)
            happened = self._interpret(news["event"], news["value"], news["endpoint"].decode("utf-8", "replace"))
            self._events += happened
            self._raw_news = []

    def _interpret(self, event: int, value: int, endpoint: str) -> tuple[PeerEvent, ...]:
        dialled = self._dialled.get(endpoint)
        match event:
            case zmq.EVENT_ACCEPTED:
                self._open.add(value)
                return ()
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if dialled is None:
                    return ()  # accepted: _identify reports it once it has said its name
                self._reached.add(dialled)
                return (PeerEvent("connected", dialled, endpoint),)
            case zmq.EVENT_DISCONNECTED:
                if dialled is not None:
                    known = dialled in self._reached
                    self._reached.discard(dialled)
                    return (PeerEvent("disconnected", dialled, endpoint),) if known else ()  # a failed handshake was reported as such
                self._open.discard(value)
                peer = self._peer_of.pop(value, None)
                if peer is None or self._fd_of.get(peer) != value:
                    return ()  # never said its name, or has come back on another connection since
                del self._fd_of[peer]
                return (PeerEvent("disconnected", peer, endpoint),)
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return (PeerEvent("auth_failed", dialled, endpoint, f"key refused (status {value})"),)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return (PeerEvent("auth_failed", dialled, endpoint, "one side has a key, the other has none"),)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                return (PeerEvent("auth_failed", dialled, endpoint, "the two sides hold different keys"),)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return (PeerEvent("handshake_failed", dialled, endpoint, f"not what ZeroMQ speaks (ZMTP error {value:#x})"),)
            case _:
                hint = "" if dialled is None or self._keys is None else "; it may hold another key"
                return (PeerEvent("handshake_failed", dialled, endpoint, f"the other side hung up during the handshake{hint}"),)


class _OnlyKey:
    """The credentials provider of zmq.auth that lets in the holders of one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class _Wake:
    """An fd that signal() makes readable. Its fds live as long as the object, so a late signal() cannot hit a stranger's fd."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.fd = self._write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def signal(self) -> None:
        try:
            os.write(self._write_fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            pass  # full, and so readable already

    def clear(self) -> None:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass  # empty already

    def __del__(self) -> None:
        os.close(self.fd)
        if self._write_fd != self.fd:
            os.close(self._write_fd)


def _resolve(address: str) -> list[str]:
    """Return the endpoints that a tcp address stands for; none where its host is a wildcard, an interface or unknown yet."""
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if transport != "tcp":
        return []
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = [str(where[0]) for *_, where in found]
    return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]


def _wants_ipv6(address: str, resolved: list[str]) -> bool:
    """Return whether to turn on libzmq's IPv6, which then takes a name's IPv6 address even where the peer listens on its IPv4 one only."""
    return address.startswith("tcp://*") or (bool(resolved) and all("[" in endpoint for endpoint in resolved))


def _unusable(address: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"got address {address!r}: {error}. Expected tcp://host:port or ipc://path (at most 107 characters of path).")


# The open channels of this process. A fork copies them half alive (no IO thread): in the child they count as closed, and are kept for ever,
# since even their destructors would speak to threads that the child does not have.
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_abandoned: list[Channel] = []


def _abandon_in_child() -> None:
    for channel in _channels:
        channel._lock = threading.Lock()  # another thread may have held it when the process forked
        channel._closed = True
        _abandoned.append(channel)
    _channels.clear()


os.register_at_fork(after_in_child=_abandon_in_child)
