"""Memory that the master keeps for large tensors, and shares with workers of the same machine: there no socket carries them.

Measured on 2 shared cores, 64 MiB: see docs/benchmarks.md, "bandwidth". The pages are kept and used again, because fresh pages are what
a large transfer costs: filling 64 MiB took 6 ms in kept pages and 60 to 120 ms in fresh ones. The files have no name but
`/proc/PID/fd/N`, so the kernel frees them when the master dies, however it dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from distruntime.errors import ProtocolError

_NAME = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_LARGEST_KEPT = (32 << 20) - (1 << 16)  # bytes; glibc's own limit for what follows is 32 MiB

LEAST = 1 << 18  # bytes from which the detour pays: below, a frame on the socket is as fast
_SMALLEST = 1 << 20
_MOST = 1 << 30  # bytes that a session keeps at most; past that, transfers take the socket


def warm_malloc() -> None:
    """Bring glibc's malloc to where it is after any program has freed a block of nearly 32 MiB: from then on it keeps pages.

    Its threshold for giving blocks back to the kernel grows with the largest block that it has given back. So no setting is changed, and
    nothing is touched: 64 MiB down a TCP socket, whose parts each took fresh pages before, went from 1.4 and 1.6 to 3.6 and 2.8 GiB/s
    (two runs each in turn, 2026-11, 2 shared cores). Elsewhere than on glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_KEPT))


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of shared memory. `name` is how a worker opens it."""

    name: str
    memory: mmap.mmap
    descriptor: int


class Loan:
    """A segment that is lent for one transfer. It comes back with `give`, or when nobody holds the loan any more.

    So a transfer that fails, or that Ctrl-C ends, keeps no memory. Who writes into a segment must hold its loan as long as that lasts.
    """

    def __init__(self, segment: Segment, back: Callable[[Segment], None]) -> None:
        self._segment = segment
        self._back = weakref.finalize(self, back, segment)
        self._back.atexit = False

    @property
    def name(self) -> str:
        """How a worker opens the segment."""
        return self._segment.name

    @property
    def memory(self) -> mmap.mmap:
        """The segment's bytes."""
        return self._segment.memory

    def private(self, nbytes: int) -> mmap.mmap:
        """Return a private mapping of the segment's bytes, for a tensor to live in; it holds the loan.

        So a fetched tensor needs no fresh pages and no second copy. Private, because what a tensor's owner, or a forked child, writes
        must stay its own.
        """
        mapped = mmap.mmap(self._segment.descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        weakref.finalize(mapped, self.give).atexit = False
        return mapped

    def give(self) -> None:
        """Give the segment back now. A second call does nothing."""
        self._back()


class SharedPool:
    """The master's side: segments that are lent for one transfer each. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: list[Segment] = []
        self._all: list[Segment] = []
        self._total = 0

    def take(self, nbytes: int) -> Loan | None:
        """Return a segment of at least `nbytes`, or None where there is no shared memory to be had."""
        with self._lock:
            fitting = [s for s in self._idle if len(s.memory) >= nbytes]
            if fitting:
                best = min(fitting, key=lambda s: len(s.memory))
                self._idle.remove(best)
                return Loan(best, self._give)
            size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
            if self._total + size > _MOST:
                return None
            made = _make(size)
            if made is not None:
                self._all.append(made)
                self._total += size
            return Loan(made, self._give) if made is not None else None

    def _give(self, segment: Segment) -> None:
        """Take back a segment that nobody reads or writes any more."""
        with self._lock:
            self._idle.append(segment)

    def close(self) -> None:
        """Close every segment. Their descriptors stay open until now, because their numbers are their names."""
        with self._lock:
            for segment in self._all:
                os.close(segment.descriptor)
            self._all, self._idle, self._total = [], [], 0


def _make(size: int) -> Segment | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("distruntime", os.MFD_CLOEXEC)
    except OSError:
        return None  # no shared memory is no error: the socket carries the bytes
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, and not as a bus error when the pages are touched
        return Segment(f"/proc/{os.getpid()}/fd/{descriptor}", mmap.mmap(descriptor, size), descriptor)
    except OSError:
        os.close(descriptor)
        return None


class Attached:
    """A worker's side: the segments of one master, mapped once each."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: object) -> mmap.mmap:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ProtocolError(f"not a shared segment: {str(name)[:40]!r}")
        found = self._mapped.get(name)
        if found is None:
            with open(name, "r+b") as file:
                found = self._mapped[name] = mmap.mmap(file.fileno(), 0)
        return found


class KeptMemory:
    """Memory for tensors that come from the master, used again when they die: pages that are there already cost a fifth of fresh ones.

    malloc does not do it: torch asks for aligned blocks, and a freed one is never quite large enough for the next.
    """

    def __init__(self, most: int = 1 << 28) -> None:
        self._most = most  # bytes that lie idle at most
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._total = 0
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> memoryview:
        """Return memory of `nbytes`, warm if some of this size class has died; it comes back when this very view object dies."""
        size = -(-nbytes // _SMALLEST) * _SMALLEST
        with self._lock:
            free = self._idle.get(size)
            if free:
                memory = free.pop()
                self._total -= size
            else:
                memory = mmap.mmap(-1, size)
        view = memoryview(memory)[:nbytes]
        weakref.finalize(view, self._give, memory).atexit = False
        return view

    def _give(self, memory: mmap.mmap) -> None:
        with self._lock:
            if self._total + len(memory) <= self._most:
                self._idle.setdefault(len(memory), []).append(memory)
                self._total += len(memory)


def challenge(pool: SharedPool) -> tuple[Loan | None, bytes]:
    """Return a segment with a secret in it, and the secret: a worker that can tell it shares this memory."""
    token = secrets.token_bytes(16)
    loan = pool.take(_SMALLEST)
    if loan is not None:
        loan.memory[:16] = token
    return loan, token


def answer(name: str) -> bytes:
    """Return the secret in a master's segment, or nothing where this process cannot read it."""
    try:
        return bytes(Attached()[name][:16])
    except (OSError, ValueError, ProtocolError):
        return b""  # another machine, another container or another user: the socket carries the bytes
