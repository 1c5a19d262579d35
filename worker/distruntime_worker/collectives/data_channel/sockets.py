"""Tensors from worker to worker over sockets of our own: what the data channels tcp and tcp+tls share.

Before a byte of a tensor moves, both ends of a connection prove that they are who they should be
(`connection.py`). Then a message has a connection to itself until it is received: the receiver's side reads
the header; the bytes stay in the socket until `receive` asks for them, go straight into the tensor's memory,
and are answered with one byte. Then the sender may use the connection again. So a message whose receiver is
not there yet holds up its sender, and no other message.

    message   tag (8 bytes), size in bytes (8), the bytes
    answer    one byte

Members that are all on one machine meet at unix sockets in folders that only their user may enter; else each
listens at a tcp port.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from itertools import count

import torch

from distruntime.wire.codec import tensor_bytes
from distruntime.wire.data_channel import DataChannel, Membership
from distruntime.wire.identity import vicinity

from ..listening import LISTENING
from .connection import (
    ACCEPTED,
    SECRET,
    Address,
    Cover,
    Message,
    Unproven,
    address_of,
    fill,
    hang_up,
    left_until,
    private_folder,
    prove,
    proven,
)

log = logging.getLogger("distruntime.worker")

_HEADER = struct.Struct("!QQ")
_TAKEN = b"\x06"
# A message of at most so many bytes goes together with its header.
_SMALL = 1 << 16
# A socket takes at most so many seconds as a timeout.
_LONGEST = 1e6
# A member has so many seconds to connect, and to get through to a member whose strangers are in the way.
_CONNECT = 10.0
# A peer that connects has so many seconds to prove who it is.
_STRANGER = 2.0
# At most so many connections at a time have not proven it. With one more, one of them is closed.
_STRANGERS = 64
# So many seconds lie between looks whether the group has ended, where its end does not wake `accept`.
_LOOK = 5.0
# So many seconds lie between lines in the log about strangers.
_SAY = 60.0

_numbers = count().__next__


class SocketChannel(DataChannel):
    """Send and receive, side by side in any number of threads.

    Abstract: a subclass says what it is called, and its cover.
    """

    def __init__(self, membership: Membership, name: str, cover: Cover) -> None:
        super().__init__(membership)
        self._name, self._cover = name, cover
        self._timeout = min(membership.timeout, _LONGEST)
        # It guards what follows.
        self._changed = threading.Condition()
        self._ended = False
        self._open: set[socket.socket] = set()
        # These sockets lead to each member, and may be used.
        self._idle: dict[int, list[socket.socket]] = {}
        # The keys are source and tag.
        self._arrived: dict[tuple[int, int], Message] = {}
        # These peers have not proven who they are.
        self._strangers: list[socket.socket] = []
        # So many threads wait for a stranger's proof.
        self._proving = 0
        # So many strangers were refused since the last line in the log about them.
        self._refused, self._say_at = 0, 0.0
        # This is the path of the unix socket, if it is one.
        self._path = ""
        store = membership.store
        store.set(f"tcp-{self.rank}-is", json.dumps([vicinity(), cover.about()]))
        if self.rank == 0:
            store.set("tcp-secret", os.urandom(SECRET))
        said = [json.loads(store.get(f"tcp-{rank}-is")) for rank in range(self.size)]
        cover.learn([about for _, about in said])
        self._secret: bytes = store.get("tcp-secret")
        listener, address = self._listener(bool(said[0][0]) and all(where == said[0][0] for where, _ in said))
        listener.settimeout(_LOOK)
        self._open.add(listener)
        threading.Thread(target=self._accept, args=(listener,), name=f"tcp-{self.rank}", daemon=True).start()
        try:
            store.set(f"tcp-{self.rank}-at", json.dumps(address))
            self._members = [address_of(json.loads(store.get(f"tcp-{rank}-at"))) for rank in range(self.size)]
        except BaseException:
            self.abort()
            raise

    def _listener(self, together: bool) -> tuple[socket.socket, Address]:
        """Return a socket that listens, and its address for the others.

        A path where all are together, else [host, port].
        """
        if together:
            self._path = str(private_folder() / str(_numbers()))
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(self._path)
                listener.listen()
            except BaseException:
                listener.close()
                raise
            return listener, self._path
        host = self.membership.host
        with LISTENING:
            listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        return listener, (host, listener.getsockname()[1])

    # -- messages ----------------------------------------------------------------------------------

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        deadline, body = time.monotonic() + self._timeout, tensor_bytes(data)
        sock = self._connection(to, deadline)
        try:
            sock.settimeout(left_until(deadline))
            head = _HEADER.pack(tag, len(body))
            if len(body) <= _SMALL:
                sock.sendall(head + body)
            else:
                sock.sendall(head)
                sock.sendall(body)
            fill(sock, memoryview(bytearray(len(_TAKEN))), deadline)
        except OSError as error:
            self._close(sock)
            raise self._failed(f"sending {len(body)} bytes to rank {to}", error) from error
        with self._changed:
            self._idle.setdefault(to, []).append(sock)
            if self._ended:
                sock.close()

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        deadline, body = time.monotonic() + self._timeout, tensor_bytes(data)
        with self._changed:
            here = self._changed.wait_for(
                lambda: self._ended or (source, tag) in self._arrived, self._timeout
            )
            message = self._arrived.pop((source, tag), None)
        try:
            if message is None:
                raise (
                    ConnectionError("the group has ended")
                    if here
                    else TimeoutError("nothing has come in time")
                )
            if message.size != len(body):
                raise ConnectionError(f"it sends {message.size}")
            fill(message.sock, body, deadline)
            # This is sent before the tensor is returned: the group may be closed next.
            message.sock.sendall(_TAKEN)
        except OSError as error:
            if message is not None:
                self._close(message.sock)
                message.taken.set()
            raise self._failed(f"receiving {len(body)} bytes from rank {source}", error) from error
        message.taken.set()

    def abort(self) -> None:
        with self._changed:
            self._ended = True
            if self._path:
                # A unix socket's shutdown does not wake a thread that waits for a connection to it. A
                # connection does.
                with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                    sock.setblocking(False)
                    sock.connect(self._path)
            # The thread that uses it wakes, and closes it.
            for sock in self._open:
                hang_up(sock)
            for sock in (sock for row in self._idle.values() for sock in row):
                sock.close()
            for message in self._arrived.values():
                message.taken.set()
            self._changed.notify_all()
        if self._path:
            # The file may be gone already.
            with suppress(OSError):
                os.unlink(self._path)

    def close(self) -> None:
        self.abort()

    def _close(self, sock: socket.socket) -> None:
        with self._changed:
            self._open.discard(sock)
        sock.close()

    def _failed(self, what: str, error: OSError) -> OSError:
        return ConnectionError(f"{what}: {'the group has ended' if self._ended else error}")

    # -- the end that dials ------------------------------------------------------------------------

    def _connection(self, to: int, deadline: float) -> socket.socket:
        """Return a connection to a member, proven."""
        with self._changed:
            if self._idle.get(to):
                return self._idle[to].pop()
        give_up = 0.0
        while True:
            try:
                return self._dial(to, deadline)
            except (Unproven, ConnectionRefusedError, FileNotFoundError) as error:
                # Another try does not mend this.
                raise self._failed(f"reaching rank {to} at {self._where(to)}", error) from error
            # Strangers may have taken all places: one that is closed for the next may be this one.
            except OSError as error:
                now = time.monotonic()
                give_up = give_up or now + _CONNECT
                with self._changed:
                    if now > min(give_up, deadline) or self._changed.wait_for(
                        lambda: self._ended, random.uniform(0.001, 0.05)
                    ):
                        raise self._failed(f"reaching rank {to} at {self._where(to)}", error) from error

    def _where(self, to: int) -> str:
        address = self._members[to]
        return address if isinstance(address, str) else ":".join(map(str, address))

    def _dial(self, to: int, deadline: float) -> socket.socket:
        address, patience = self._members[to], min(left_until(deadline), _CONNECT)
        if isinstance(address, str):
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(patience)
                sock.connect(address)
            except BaseException:
                sock.close()
                raise
        else:
            sock = socket.create_connection((address[0], address[1]), patience)
        sock = self._entered(self._cover.around(sock, True))
        try:
            # This may take any time: a member that stands still is no stranger, and its machine has taken the
            # connection already.
            self._cover.greet(sock, left_until(deadline))
            self._cover.check(sock, to)
            prove(sock, self._secret, self.rank, to, deadline)
        except BaseException:
            self._close(sock)
            raise
        return sock

    def _entered(self, sock: socket.socket) -> socket.socket:
        """Let `abort` reach a socket."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._open.add(sock)
            if self._ended:
                sock.close()
        return sock

    # -- the end that listens ----------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._ended:
            try:
                raw = listener.accept()[0]
            except TimeoutError:
                continue
            except OSError as error:
                with self._changed:
                    # Too many files are open, most likely.
                    if not self._ended:
                        log.warning("the data channel %s did not accept a connection: %s", self._name, error)
                        self._changed.wait(1.0)
                continue
            if self._ended:
                raw.close()
                break
            try:
                sock = self._entered(self._cover.around(raw, False))
            except OSError as error:
                raw.close()
                self._refuse(error)
                continue
            self._admit(sock)
        self._close(listener)

    def _admit(self, sock: socket.socket) -> None:
        """Give who has connected a thread that waits for its proof; where all places are taken, one of them,
        drawn by lot.

        Not the oldest: a flood could keep members out then, however often they come again.
        """
        with self._changed:
            if len(self._strangers) >= _STRANGERS:
                hang_up(self._strangers.pop(random.randrange(len(self._strangers))))
            self._changed.wait_for(lambda: self._proving < _STRANGERS or self._ended, _STRANGER)
            self._strangers.append(sock)
            self._proving += 1
        try:
            threading.Thread(target=self._serve, args=(sock,), name=f"tcp-{self.rank}", daemon=True).start()
        except RuntimeError as error:
            # There is no more room for a thread.
            self._left_the_door(sock)
            self._close(sock)
            self._refuse(error)

    def _left_the_door(self, sock: socket.socket) -> None:
        with self._changed:
            if sock in self._strangers:
                self._strangers.remove(sock)
            self._proving -= 1
            self._changed.notify_all()

    def _refuse(self, error: Exception) -> None:
        """Note, in a line a minute at most, that somebody was not let in."""
        with self._changed:
            self._refused += 1
            now, refused = time.monotonic(), self._refused
            if self._ended or now < self._say_at:
                return
            self._refused, self._say_at = 0, now + _SAY
        log.warning(
            "the data channel %s at rank %d has closed %d connection%s that did not prove to be a member's, "
            "the last: %s",
            self._name,
            self.rank,
            refused,
            "" if refused == 1 else "s",
            error,
        )

    def _source(self, sock: socket.socket) -> int:
        """Return the rank at the other end, once it has proven it."""
        deadline = time.monotonic() + _STRANGER
        self._cover.greet(sock, _STRANGER)
        source = proven(sock, self._secret, self.rank, self.size, deadline)
        self._cover.check(sock, source)
        with self._changed:
            # This comes before the member hears that it is in: from then on it does not dial again, and
            # nobody may hang up on it.
            if sock not in self._strangers:
                raise ConnectionError("its place was given to another stranger in the last moment")
            self._strangers.remove(sock)
        sock.sendall(ACCEPTED)
        return source

    def _serve(self, sock: socket.socket) -> None:
        try:
            source = self._source(sock)
        except OSError as error:
            self._close(sock)
            self._refuse(error)
            return
        finally:
            self._left_the_door(sock)
        head = bytearray(_HEADER.size)
        try:
            while not self._ended:
                fill(sock, memoryview(head), time.monotonic() + _LONGEST)
                tag, size = _HEADER.unpack(head)
                message = Message(sock, size, threading.Event())
                with self._changed:
                    if (source, tag) in self._arrived or self._ended:
                        raise ConnectionError(f"rank {source} sends tag {tag} twice, or too late")
                    self._arrived[source, tag] = message
                    self._changed.notify_all()
                message.taken.wait()
        except OSError as error:
            # Most often the other side has ended the group.
            log.debug("the data channel %s closes a connection: %s", self._name, error)
        finally:
            self._close(sock)
