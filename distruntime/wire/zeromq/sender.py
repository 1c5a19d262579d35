"""What goes out through a ROUTER socket, from any thread. `channel.py` has the rules."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import overload

import zmq
import zmq.backend

from ...errors import DistruntimeError
from ..link import Delivery, Link
from ..shield import RLock, shield
from ..wake import Wake
from .connections import Peer
from .frames import FRAME, Long, Part, is_large
from .zero_copy import tracked

# These are plain integers: `&` of two of pyzmq's enumerations costs 4 us, a tenth of a round trip.
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# The k-th entry has the flags of a message with k frames behind the peer's name.
_FLAGS = [(_MORE,) * frames + (_NOBLOCK,) for frames in range(8)]
CLOSED = "this channel is closed, or belongs to the process that forked this one"


class PeerGone(DistruntimeError):
    """No connection to a peer of this name."""


class ChannelClosed(DistruntimeError):
    """The channel was closed, or belongs to the process that forked this one."""


class Sender:
    """A ROUTER socket and its lock. `Channel` waits on it, and says so by `_waiting`."""

    def __init__(self) -> None:
        # It counts the bytes of messages without their peers' names.
        self.sent_bytes = 0
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
        self._wake = Wake()
        # This is a message on its way into the socket. It is one `map`, and its next item is the next frame,
        # whatever an interrupt did to the last. pyzmq runs signal handlers after each frame, and a message
        # that is cut in two would swallow the next.
        self._unsent: map[object] | None = None
        # The channel has a context of its own, because there is one ZAP handler per context, and so that
        # close() can be complete.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # These are the C methods, past pyzmq's Python layer. They cost half as much, and they run no bytecode
        # on which Ctrl-C could cut a message in two.
        self._send_frame: Callable[[Part, int], object] = zmq.backend.Socket.send.__get__(self._socket)
        self._option: Callable[[int], int] = zmq.backend.Socket.get.__get__(self._socket)

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
            parts, trackers = tracked(parts)
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
                        raise ChannelClosed(CLOSED)
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
                            # A send that libzmq refuses swallows an edge, too.
                            self._after_use()
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
            raise ChannelClosed(CLOSED)
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
                parts, delivery.trackers = tracked(Long(delivery.frames) if long else delivery.frames)
                flags: Sequence[int] = (_MORE,) * len(delivery.frames) + (_NOBLOCK,)
                sequence, flags = parts.to(peer) if isinstance(parts, Long) else ((peer, *parts), flags)
                self._unsent = map(self._send_frame, sequence, flags)
                self._finish_sending()
            if self._waiting:
                self._after_use()
        self._send_late()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(CLOSED)

    def _after_use(self) -> None:
        """Wake the waiter if the call just made swallowed its edge (the lock is held)."""
        if self._waiting and self._option(EVENTS) & POLLIN:
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


# These are the open channels of this process. A fork copies them half alive, without their IO thread. In the
# child they count as closed. They are kept there for ever, since even their destructors would speak to
# threads that the child does not have.
open_channels: weakref.WeakSet[Sender] = weakref.WeakSet()
_abandoned: list[Sender] = []


def _abandon_in_child() -> None:
    for channel in open_channels:
        # Another thread may have held it when the process forked.
        channel._lock = RLock()
        channel._held_here = channel._lock._is_owned  # type: ignore[attr-defined]
        channel._closed = True
        _abandoned.append(channel)
    open_channels.clear()


os.register_at_fork(after_in_child=_abandon_in_child)
