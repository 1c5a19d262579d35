"""The data channel for where nothing else works: tensors from worker to worker over plain sockets, and nothing more.

Each message has a connection to itself until it is received: the receiver's side reads the header; the bytes stay in the socket until
`receive` asks for them, go straight into the tensor's memory, and are answered with one byte. Then the sender may use the connection
again. So a message whose receiver is not there yet holds up its sender, and no other message.

    message   the receiver's secret (16 bytes, from the group's store), the sender's rank (4), tag (8), size in bytes (8), the bytes
    answer    one byte
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from hmac import compare_digest
from typing import NamedTuple, final

import torch

from distruntime.wire.codec import tensor_bytes
from distruntime.wire.data_channel import Capabilities, DataChannel, Membership

log = logging.getLogger("distruntime.worker")

_HEADER = struct.Struct("!16sIQQ")
_TAKEN = b"\x06"
_LONGEST = 1e6  # seconds, of what a socket takes as a timeout
_GREETING = 10.0  # seconds to connect, and for the first header to come
_LOOK = 5.0  # seconds between looks whether the group has ended, where that does not wake `accept`


class _Message(NamedTuple):
    """A message whose header is here, and whose bytes are in its socket."""

    sock: socket.socket
    size: int
    taken: threading.Event


@final
class TCP(DataChannel):
    """Send and receive, side by side in any number of threads."""

    capabilities = Capabilities(frozenset({"send"}))

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        host, store, self._secret = membership.host, membership.store, os.urandom(16)
        self._timeout = min(membership.timeout, _LONGEST)
        self._changed = threading.Condition()  # guards what follows
        self._ended = False
        self._open: set[socket.socket] = set()
        self._idle: dict[int, list[socket.socket]] = {}  # of these, what leads to each member and may be used
        self._arrived: dict[tuple[int, int], _Message] = {}  # by source and tag
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.settimeout(_LOOK)
        self._open.add(listener)
        threading.Thread(target=self._accept, args=(listener,), name=f"tcp-{self.rank}", daemon=True).start()
        try:
            store.set(f"tcp-{self.rank}", json.dumps([self._secret.hex(), host, listener.getsockname()[1]]))
            self._members = [json.loads(store.get(f"tcp-{rank}")) for rank in range(self.size)]
        except BaseException:
            self.abort()
            raise

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        deadline, body = time.monotonic() + self._timeout, tensor_bytes(data)
        sock = self._connection(to, deadline)
        head = _HEADER.pack(bytes.fromhex(self._members[to][0]), self.rank, tag, len(body))
        try:
            sock.settimeout(_left(deadline))
            sent = sock.sendmsg([head, body])
            sock.sendall(head[sent:])
            sock.sendall(body[max(0, sent - len(head)) :])
            _fill(sock, memoryview(bytearray(len(_TAKEN))), deadline)
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
            here = self._changed.wait_for(lambda: self._ended or (source, tag) in self._arrived, self._timeout)
            message = self._arrived.pop((source, tag), None)
        try:
            if message is None:
                raise ConnectionError("the group has ended") if here else TimeoutError("nothing has come in time")
            if message.size != len(body):
                raise ConnectionError(f"it sends {message.size}")
            _fill(message.sock, body, deadline)
            message.sock.sendall(_TAKEN)  # before this returns: the group may be closed next
        except OSError as error:
            if message is not None:
                self._close(message.sock)
                message.taken.set()
            raise self._failed(f"receiving {len(body)} bytes from rank {source}", error) from error
        message.taken.set()

    def abort(self) -> None:
        with self._changed:
            self._ended = True
            for sock in self._open:  # the thread that uses it wakes, and closes it
                with suppress(OSError):  # it is not connected any more
                    sock.shutdown(socket.SHUT_RDWR)
            for sock in (sock for row in self._idle.values() for sock in row):
                sock.close()
            for message in self._arrived.values():
                message.taken.set()
            self._changed.notify_all()

    def close(self) -> None:
        self.abort()

    def _close(self, sock: socket.socket) -> None:
        with self._changed:
            self._open.discard(sock)
        sock.close()

    def _failed(self, what: str, error: OSError) -> OSError:
        return ConnectionError(f"{what}: {'the group has ended' if self._ended else error}")

    def _connection(self, to: int, deadline: float) -> socket.socket:
        with self._changed:
            if self._idle.get(to):
                return self._idle[to].pop()
        _, host, port = self._members[to]
        try:
            return self._entered(socket.create_connection((host, port), min(_left(deadline), _GREETING)))
        except OSError as error:
            raise self._failed(f"reaching rank {to} at {host}:{port}", error) from error

    def _entered(self, sock: socket.socket) -> socket.socket:
        """Let `abort` reach a socket."""
        with self._changed:
            self._open.add(sock)
            if self._ended:
                sock.close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _accept(self, listener: socket.socket) -> None:
        while not self._ended:
            try:
                sock = self._entered(listener.accept()[0])
            except TimeoutError:
                continue
            except OSError as error:
                with self._changed:
                    if not self._ended:  # too many files are open, most likely
                        log.warning("the data channel tcp did not accept a connection: %s", error)
                        self._changed.wait(1.0)
                continue
            threading.Thread(target=self._serve, args=(sock,), name=f"tcp-{self.rank}", daemon=True).start()
        self._close(listener)

    def _serve(self, sock: socket.socket) -> None:
        limit, head = _GREETING, bytearray(_HEADER.size)
        try:
            while not self._ended:
                _fill(sock, memoryview(head), time.monotonic() + limit)
                secret, source, tag, size = _HEADER.unpack(head)
                if not compare_digest(secret, self._secret):
                    raise ConnectionError("it does not know the group's secret")
                message, limit = _Message(sock, size, threading.Event()), _LONGEST
                with self._changed:
                    if (source, tag) in self._arrived or self._ended:
                        raise ConnectionError(f"rank {source} sends tag {tag} twice, or too late")
                    self._arrived[source, tag] = message
                    self._changed.notify_all()
                message.taken.wait()
        except OSError as error:  # the other side's end of the group, most often
            log.debug("the data channel tcp closes a connection: %s", error)
        finally:
            self._close(sock)


def _left(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _fill(sock: socket.socket, memory: memoryview, deadline: float) -> None:
    """Receive as many bytes as `memory` has room for."""
    while memory:
        sock.settimeout(_left(deadline))
        count = sock.recv_into(memory)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        memory = memory[count:]
