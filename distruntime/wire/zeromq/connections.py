"""What libzmq's monitor tells of a socket's connections, in terms of peers.

The monitor knows connections by their endpoint (dialled ones) or their fd (accepted ones); messages know
their peer and, where they were received as zmq.Frame, the fd that they came through. libzmq reports a
connection before it passes on its messages.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, final

import zmq
import zmq.backend
import zmq.utils.monitor

from ..descriptors import most_strangers
from ..strangers import Strangers

Peer = bytes

# HANDSHAKE_FAILED_PROTOCOL would tell more, and is left out: libzmq 4.3.5 raises it for each message too that
# cannot be decrypted, and loses its `errno` over it. The connection then counts as one whose reader is slow:
# it never ends, and when the other side closes it, the next heartbeat aborts this process. One byte changed
# on the way was enough (2026-11: one in sixty meddled connections).
_MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS, _POLLIN, _NOBLOCK, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.RCVMORE)


@dataclass(frozen=True)
class PeerEvent:
    """What happened to a connection.

    "connected" comes with a dialled peer's handshake, or with the first message of one that dialled us;
    "disconnected" only after it. `peer` is None where somebody unknown failed to get in.
    """

    kind: Literal["connected", "disconnected", "handshake_failed", "auth_failed"]
    peer: Peer | None
    address: str
    detail: str = ""
    # It is True if a dialled peer surely did not get in. libzmq then does not dial it again by itself.
    final: bool = True


@final
class Connections:
    """The connections of one ROUTER socket. Not thread-safe: the channel's lock guards it.

    Invariant: `unplaced`, `_crowded_out` and the keys of `_peer_of` are disjoint; together they are the
    accepted connections that are open. `placed` is the inverse of `_peer_of`.

    The kernel gives an fd again as soon as it is closed, when words of who had it may still lie unread. So
    until all messages have been read, `_ghosts` are the fds of connections that have ended and `_gone` the
    peers that are known to have spoken through them; `doubted` are the fds that somebody was taken to speak
    through who may be such a ghost. If somebody else is heard through one of these, it belongs to whose name
    is the later one; a peer that has named itself was a ghost if it was heard first, as it mostly is.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], *, has_key: bool
    ) -> None:
        self.strangers = Strangers(most_strangers())
        # Nothing has come yet through these connections. The keys are their fds.
        self.unplaced = self.strangers.names
        # These fds were hung up on, as there were too many such connections.
        self._crowded_out: set[int] = set()
        self.doubted: set[int] = set()
        self._ghosts: set[int] = set()
        self._gone: set[Peer] = set()
        self.dialled: set[Peer] = set()
        # Each peer that dialled us has the fd of its connection here.
        self.placed: dict[Peer, int] = {}
        self._has_key = has_key
        # It is True after libzmq has reported a failed handshake of a peer, whoever dialled. libzmq then
        # reports the end of that connection.
        self._refused = False
        self._refused_by: set[Peer] = set()
        self._dialled_at: dict[str, Peer] = {}
        # These dialled peers are connected now.
        self._reached: set[Peer] = set()
        self._peer_of: dict[int, Peer] = {}
        self._events: deque[PeerEvent] = deque()
        self._router = router
        self._monitor = context.socket(zmq.PAIR)
        # The monitor is made by hand, not by get_monitor_socket(): past its default high-water mark, libzmq's
        # IO thread would block on unread events.
        self._monitor.rcvhwm = 0
        router.monitor("inproc://monitor", _MONITORED)
        self._monitor.connect("inproc://monitor")
        self._raw: list[bytes] = []
        self._receive: Callable[[int], bytes] = zmq.backend.Socket.recv.__get__(self._monitor)
        self._option: Callable[[int], int] = zmq.backend.Socket.get.__get__(self._monitor)
        self.fd: int = self._option(zmq.FD)
        # libzmq signals the fd only to a reader that has found nothing once.
        self._option(_EVENTS)
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        # It says whether there is anything to read. That takes a third of what asking libzmq takes.
        self.poll = poll.poll

    def dial(self, peer: Peer, endpoints: Iterable[str]) -> None:
        """Call what is connected at any of `endpoints` `peer`."""
        self.dialled.add(peer)
        self._dialled_at.update(dict.fromkeys(endpoints, peer))

    def hang_up(self, peer: Peer) -> None:
        """Forget a dialled peer."""
        for known in (self.dialled, self._reached, self._refused_by):
            known.discard(peer)
        for endpoint in [endpoint for endpoint, dialled in self._dialled_at.items() if dialled == peer]:
            del self._dialled_at[endpoint]

    def place(self, peer: Peer, fd: int | None) -> None:
        """Learn that `peer`, which has dialled us, speaks through `fd`.

        None: through one that we shall have to guess.
        """
        if fd is not None and self._peer_of.get(fd) == peer:
            if fd not in self._ghosts:
                self.doubted.discard(fd)
            return
        self.read()
        if fd is None and self.unplaced and peer not in self._gone:
            if len(self.unplaced) > 1:
                # Only noise has no fd; which of them it was, nobody needs to know.
                return
            (fd,) = self.unplaced
        old = self.placed.get(peer)
        # It came back before its half-open connection was found broken.
        if old is not None:
            self._events.append(
                PeerEvent("disconnected", peer, self._address(), "replaced by a new connection")
            )
            del self._peer_of[old], self.placed[peer]
        self._events.append(PeerEvent("connected", peer, self._address()))
        leftover = peer in self._gone and (fd is None or fd in self._ghosts)
        if fd is not None and fd in self.doubted and _earlier(peer, self._peer_of[fd]):
            self._gone.add(peer)
            leftover = True
        if fd is not None and fd in self.doubted and not leftover:
            ghost = self._lost(fd, self._address())
            self._events += [ghost] if ghost is not None else []
            self.strangers.add(fd)
        if not leftover and fd is not None and fd in self.unplaced:
            self.unplaced.pop(fd, None)
            self._peer_of[fd], self.placed[peer] = peer, fd
            if fd in self._ghosts:
                self.doubted.add(fd)
        else:
            self._events.append(
                PeerEvent("disconnected", peer, self._address(), "gone before its first message was read")
            )

    def open(self, peer: Peer) -> bool:
        """Return whether there is a connection to a peer, as far as is known."""
        return peer in self.placed or peer in self._reached

    def close_ended(self) -> None:
        """Take note that all messages have been read that came through connections known to have ended."""
        self._ghosts.clear()
        self._gone.clear()

    def read(self) -> bool:
        """Take in what the monitor reports; return whether that was news for `events`."""
        known = len(self._events)
        while len(self._raw) == 2 or self._option(_EVENTS) & _POLLIN:
            if len(self._raw) < 2:
                while self._option(_RCVMORE):
                    # This receives the rest of a report of which an interrupt cost a frame.
                    self._receive(_NOBLOCK)
                self._raw = []
                self._raw.extend(map(self._receive, (_NOBLOCK, _NOBLOCK)))
            report = zmq.utils.monitor.parse_monitor_message(self._raw)
            happened = self._interpret(
                int(report["event"]), int(report["value"]), report["endpoint"].decode("utf-8", "replace")
            )
            if happened is not None:
                self._events += (happened,)
            self._raw = []
        if len(self.unplaced) > self.strangers.most:
            self._crowded_out.update(self.strangers.crowd_out())
        return len(self._events) > known

    def events(self) -> list[PeerEvent]:
        """Return what happened since the last call, in order."""
        self.read()
        found = list(self._events)
        self._events.clear()
        return found

    def close(self) -> None:
        """Close the monitor."""
        self._router.monitor(None, 0)
        self._monitor.close(linger=0)

    def _address(self) -> str:
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _interpret(self, event: int, value: int, endpoint: str) -> PeerEvent | None:
        dialled = self._dialled_at.get(endpoint)
        match event:
            case zmq.EVENT_ACCEPTED:
                self._crowded_out.discard(value)
                # libzmq does not report connections that it closed by its own decision.
                lost = self._lost(value, endpoint)
                self.strangers.add(value)
                return lost
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if dialled is None:
                    # The connection is accepted, and place() reports it.
                    return None
                self._reached.add(dialled)
                return PeerEvent("connected", dialled, endpoint)
            case zmq.EVENT_DISCONNECTED if dialled is None and (
                value in self.unplaced or value in self._crowded_out
            ):
                return self._lost_stranger(value, endpoint)
            case zmq.EVENT_DISCONNECTED:
                return (
                    self._lost(value, endpoint) if dialled is None else self._lost_dialled(dialled, endpoint)
                )
            case _:
                return self._failed(event, value, dialled, endpoint)

    def _failed(self, event: int, value: int, dialled: Peer | None, endpoint: str) -> PeerEvent:
        if dialled is None:
            self._refused = True
        else:
            self._refused_by.add(dialled)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return PeerEvent("auth_failed", dialled, endpoint, f"key refused (status {value})")
        hint = (
            "; it may hold another key, or have no descriptors left"
            if dialled is not None and self._has_key
            else ""
        )
        return PeerEvent(
            "handshake_failed",
            dialled,
            endpoint,
            f"the other side hung up during the handshake{hint}",
            final=False,
        )

    def _lost_dialled(self, peer: Peer, endpoint: str) -> PeerEvent | None:
        if peer in self._reached:
            self._reached.discard(peer)
            return PeerEvent("disconnected", peer, endpoint)
        if peer in self._refused_by:
            self._refused_by.discard(peer)
            return None
        keys = "another key, or none" if self._has_key else "a key, where none is held here"
        return PeerEvent(
            "handshake_failed", peer, endpoint, f"the other side has {keys}; or it is no distruntime peer"
        )

    def _lost_stranger(self, fd: int, endpoint: str) -> PeerEvent | None:
        crowded_out = fd in self._crowded_out
        self.unplaced.pop(fd, None)
        self._crowded_out.discard(fd)
        self._ghosts.add(fd)
        reported, self._refused = self._refused, False
        if crowded_out:
            return (
                None
                if reported
                else PeerEvent(
                    "handshake_failed", None, endpoint, "too many others had not said who they are either"
                )
            )
        keys = "wrong or missing key" if self._has_key else "it has a key, where none is held here"
        why = f"{keys}, or it is no distruntime peer, or it hung up during the handshake"
        return None if reported else PeerEvent("handshake_failed", None, endpoint, why)

    def _lost(self, fd: int, endpoint: str) -> PeerEvent | None:
        self.doubted.discard(fd)
        peer = self._peer_of.pop(fd, None)
        if peer is None:
            # The peer never said its name, or it has come back on another connection since.
            return None
        del self.placed[peer]
        self._ghosts.add(fd)
        self._gone.add(peer)
        return PeerEvent("disconnected", peer, endpoint)


def _earlier(peer: Peer, other: Peer) -> bool:
    """Whether `peer` connected before `other`, as far as their names tell.

    Libzmq names who has no name by a zero and a counter.
    """
    if not (peer[:1] == other[:1] == b"\0" and len(peer) == len(other) == 5):
        return False
    return (int.from_bytes(peer[1:], "big") - int.from_bytes(other[1:], "big")) % (1 << 32) > 1 << 31
