"""A ROUTER socket that any thread may send on and one thread at a time waits on: only this and what it stands
on, `zeromq`, touch ZeroMQ sockets.

    sender threads --- send() ---> [lock] ROUTER <---> peers, by name
    one waiter ------ receive() -> poll(ZMQ_FD, wake, monitor) without the lock, then drain under it

ZMQ_FD is edge-triggered: any call that lets libzmq process its commands, a send included, swallows the edge
of a message that arrived meanwhile. Hence the two rules that keep messages from being lost from sight: a
waiter drains under the lock before it starts to wait, and whoever uses the socket while somebody waits looks
at EVENTS afterwards and wakes the waiter.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

import zmq
import zmq.auth.thread

from ..errors import ConfigurationError, DistruntimeError
from .descriptors import require
from .keys import KeyPair, needs_key
from .shield import shield
from .zeromq.connections import Connections, Peer
from .zeromq.connections import PeerEvent as PeerEvent
from .zeromq.inbox import Frames as Frames
from .zeromq.inbox import Inbox
from .zeromq.options import beat, bind, dial, let_in, set_up
from .zeromq.sender import CLOSED, EVENTS, POLLIN, Sender, open_channels
from .zeromq.sender import ChannelClosed as ChannelClosed
from .zeromq.sender import PeerGone as PeerGone
from .zeromq.zero_copy import for_many as for_many

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))
# A peer that hangs up so often in a row, in the handshake, is taken to hold another key. A flooded peer hangs
# up, too.
HANG_UPS = 8


@final
class Channel(Sender):
    """A ROUTER socket that any thread may send on and one thread at a time waits on.

    Args:
        listen: bind here: tcp://host:port (port 0 or *: any free port) or ipc://path.
        keys: peers must hold the same pair. None: anyone who reaches the socket is let in.
        name: what listening peers know this channel by; None: they choose.
        silence: seconds after which a peer that says nothing is disconnected; both sides then say something
            all the time, in libzmq's own thread, so that neither a long kernel nor a debugger keeps them from
            it. 0: never.
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
        super().__init__()
        self.address = ""
        self.keys = keys
        # A connection is closed here that has brought nothing for so many seconds; 0: none is.
        self.silence = silence
        # It is True once nobody has to prove who they are at some address of this channel: no pickle that
        # comes through it is opened.
        self.unproven = keys is None and listen is not None and needs_key(listen)
        self._woken = False
        self._guard: zmq.auth.thread.ThreadAuthenticator | None = None
        self._connections = Connections(self._context, self._socket, has_key=keys is not None)
        self._inbox = Inbox(self._socket, self._connections)
        # Each dialled peer has its address here.
        self._dialled: dict[Peer, str] = {}
        try:
            set_up(self._socket, name, keys, server=listen is not None)
            if keys is not None and listen is not None:
                self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
                let_in(self._guard, keys)
            if silence:
                beat(self._socket, silence, patient)
            if listen is not None:
                self.address = bind(self._socket, self._connections.strangers, listen)
        except BaseException:
            self.close()
            raise
        self._polling = False
        self._poll = select.poll()
        self._fd: int = self._option(zmq.FD)
        # They are reported in this order: connections before their messages.
        self._watched = self._connections.fd, self._fd, self._wake.fd
        for fd in self._watched:
            self._poll.register(fd, select.POLLIN)
        open_channels.add(self)

    def connect(self, address: str, peer: Peer) -> None:
        """Dial `address` and call what answers there `peer`, after reconnections too.

        Return at once; messages wait for it.
        """
        with self._lock:
            self._check_open()
            self.unproven = self.unproven or (self.keys is None and needs_key(address))
            endpoints = dial(self._socket, self.keys, address, peer)
            self._dialled[peer] = address
            self._connections.dial(peer, endpoints)
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
                raise ChannelClosed(CLOSED)
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

    def _spin(self, end: float) -> None:
        """Look for a message until `end`, leaving the lock to senders in between."""
        while time.perf_counter() < end:
            # libzmq's own thread may need this core to bring what is looked for.
            _yield()
            with self._lock:
                if self._closed:
                    return
                found = self._option(EVENTS) & POLLIN
                if found:
                    with shield, suppress(zmq.Again):
                        self._inbox.read()
            if self._late:
                self._send_late()
            if found:
                return

    def _wait(self, deadline: float | None) -> None:
        """Block until there is something to return from receive()."""
        waiting = True
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = self._polled(left)
            with shield, self._lock:
                if self._closed:
                    raise ChannelClosed(CLOSED)
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
