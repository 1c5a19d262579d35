"""The floors: what Python, torch and the system charge for the same thing, with nothing of distruntime.

A figure is held against the floor that grows with it on a slower machine, and the two are measured in turn.
A read waits for another process, so its floor is a bare pipe to one. An issued operation passes through
torch's dispatcher, so its floor is an empty `__torch_dispatch__`. A large transfer has a bare socket, and a
start has a Python that imports torch. A step has the same step here, which its benchmark makes itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from .harness import free_port, seconds

_OPERATIONS = 10_000
# The floor of an operation on the quick machine of docs/tables/benchmarks.md.
_QUICK = 4.3e-6
NBYTES = 64 << 20


# -- an issued operation -------------------------------------------------------------------------------------


class _Empty(torch.Tensor):
    """Dispatches to nothing and returns a wrapper that is there already."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (20, 20),
            strides=(20, 1),
            storage_offset=0,
            dtype=torch.float32,
            device=torch.device("lazy", 5),
            storage_size=1 << 50,
        )

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _EMPTY


_EMPTY: Any = _Empty()


def operation(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of an empty `__torch_dispatch__` and of a new wrapper with full metadata."""
    start = clock()
    for _ in range(_OPERATIONS):
        _EMPTY + _EMPTY
        _Empty()
    return (clock() - start) / _OPERATIONS


def slowness() -> float:
    """Return how many times as long as the quick machine this one takes for an operation, 1 at least.

    Workers that sleep instead of computing sleep so many times as long, since issuing takes longer, too.
    """
    return max(1.0, operation(time.thread_time) / _QUICK)


# -- a read --------------------------------------------------------------------------------------------------

Answer = Callable[[bytes], bytes]


def _answer(pipe: Connection, make: Callable[[], Answer]) -> None:
    torch.set_num_threads(1)
    answer = make()
    pipe.send_bytes(b"ready")
    while asked := pipe.recv_bytes():
        pipe.send_bytes(answer(asked))


class Pipe:
    """A bare pipe to another Python process, which has imported torch and answers each message."""

    def __init__(self, pipe: Connection, process: Any) -> None:
        self._pipe, self._process = pipe, process

    def ask(self, message: bytes = bytes(16)) -> bytes:
        """Send a message and wait for its answer."""
        self._pipe.send_bytes(message)
        return self._pipe.recv_bytes()

    def death(self) -> float:
        """Kill the process; return the seconds until the pipe says so."""
        killed = time.perf_counter()
        os.kill(self._process.pid, signal.SIGKILL)
        try:
            self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return time.perf_counter() - killed
        raise AssertionError("a killed process has answered")


def echo() -> Answer:
    """Return what answers with the same bytes."""
    return lambda message: message


@contextmanager
def pipe(make: Callable[[], Answer] = echo) -> Iterator[Pipe]:
    """Run a process at the other end of a bare pipe; `make` makes there what answers."""
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(there, make), daemon=True)
    process.start()
    # This end would keep the pipe open after the other process has died.
    there.close()
    try:
        here.recv_bytes()
        yield Pipe(here, process)
    finally:
        process.kill()
        process.join()
        here.close()


# -- a large transfer ----------------------------------------------------------------------------------------


def _receive(connection: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += connection.recv_into(view[got:])


def _peer(port: int) -> None:
    """Take 64 MiB into a kept buffer, answer one byte; on the next byte send it back; until the other side
    closes.
    """
    kept = bytearray(NBYTES)
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
        with connection:
            while command := connection.recv(1):
                if command == b"u":
                    _receive(connection, memoryview(kept))
                    connection.sendall(b"k")
                else:
                    connection.sendall(kept)


class Socket:
    """A bare TCP socket to another Python process, which reads into a buffer that it keeps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._kept = connection, bytearray(NBYTES)

    def up(self, data: memoryview) -> float:
        """Return the seconds of 64 MiB there."""

        def run() -> None:
            self._connection.sendall(b"u")
            self._connection.sendall(data)
            self._connection.recv(1)

        return seconds(run)

    def down(self) -> float:
        """Return the seconds of 64 MiB back."""

        def run() -> None:
            self._connection.sendall(b"d")
            _receive(self._connection, memoryview(self._kept))

        return seconds(run)


@contextmanager
def bare_socket() -> Iterator[Socket]:
    """Run a process at the other end of a bare TCP socket on loopback."""
    port = free_port()
    process = get_context("spawn").Process(target=_peer, args=(port,))
    process.start()
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            continue  # the peer is still importing
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        yield Socket(connection)
    process.join()


# -- a start -------------------------------------------------------------------------------------------------


def import_torch() -> float:
    """Return the seconds of a Python that imports torch and ends."""
    return seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
