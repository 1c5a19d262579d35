"""Memory that the master keeps for large tensors, and shares with workers of the same machine: there no
socket carries them.

Measured on 2 cores, 64 MiB: see "bandwidth" in docs/tables/benchmarks.md. The pages are kept and used again,
because fresh pages are what a large transfer costs: filling 64 MiB took 6 ms in kept pages and 60 to 120 ms
in fresh ones. The files have no name but `/proc/PID/fd/N`, so the kernel frees them when the master dies,
however it dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest

from ..errors import ProtocolError
from .descriptors import are_out, spare
from .shield import RLock

_NAME = re.compile(r"/proc/([0-9]+)/fd/[0-9]+")
# A challenge's segment begins with this mark. The bytes of a secret and of a nonce follow.
_MARK, _NONCE = (b"distruntime mine", 16)
# malloc keeps memory of at most so many bytes for itself. glibc's own limit for what follows is 32 MiB.
_LARGEST_KEPT = (32 << 20) - (1 << 16)

# From so many bytes on the detour pays. Below, a frame on the socket is as fast.
LEAST = 1 << 18
_SMALLEST = 1 << 20
# A session keeps at most so many bytes. Beyond that, transfers take the socket.
_MOST = 1 << 30
# A worker keeps at most so many bytes of memory that nothing uses.
_MOST_IDLE = 1 << 28


def warm_malloc() -> None:
    """Bring glibc's malloc to where it is after any program has freed a block of nearly 32 MiB: from then on
    it keeps pages.

    Its threshold for giving blocks back to the kernel grows with the largest block that it has given back. So
    no setting is changed, and nothing is touched: 64 MiB down a TCP socket, whose parts each took fresh pages
    before, went from 1.4 and 1.6 to 3.6 and 2.8 GiB/s (two runs each in turn, 2026-11, 2 shared cores).
    Elsewhere than on glibc nothing happens.
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
    """A segment that is lent for one transfer. It comes back with `give`, or when nobody holds the loan any
    more.

    So a transfer that fails, or that Ctrl-C ends, keeps no memory. Who writes into a segment must hold its
    loan as long as that lasts.
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

        So a fetched tensor needs no fresh pages and no second copy. Private, because what a tensor's owner,
        or a forked child, writes must stay its own.
        """
        mapped = mmap.mmap(
            self._segment.descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        weakref.finalize(mapped, self.give).atexit = False
        return mapped

    def give(self) -> None:
        """Give the segment back now. A second call does nothing."""
        self._back()


class SharedPool:
    """The master's side: segments that are lent for one transfer each. Any thread may call."""

    def __init__(self) -> None:
        self._lock = RLock()
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
        """Close every segment.

        Their descriptors stay open until now, because their numbers are their names.
        """
        with self._lock:
            for segment in self._all:
                os.close(segment.descriptor)
            self._all, self._idle, self._total = [], [], 0


def _make(size: int) -> Segment | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("distruntime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        # No shared memory is no error: the socket carries the bytes.
        return None
    try:
        # This fails now, and not as a bus error when the pages are touched.
        os.posix_fallocate(descriptor, 0, size)
        # A worker opens the file for writing, and whoever may do that may cut it. The next touch of the pages
        # would then end this process.
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        return Segment(f"/proc/{os.getpid()}/fd/{descriptor}", mmap.mmap(descriptor, size), descriptor)
    except OSError:
        os.close(descriptor)
        return None


class Attached:
    """A worker's side: the segments of one master, mapped once each.

    Invariant: what is mapped never shrinks, as its seals say: to read or write past the end of a file ends
    the process. It is a segment of the process that the greeting named, which has shown that it is the
    master: it has written this session's nonce into the segment that the greeting named. So no master can
    have a worker read to it what another process of the machine holds.

    Args:
        process: the master's, as `Hello.process` has it.
        challenge: the name of its segment with the secret, as `Hello.shared` has it.
    """

    def __init__(self, process: Sequence[object] = (), challenge: str = "") -> None:
        self.nonce = secrets.token_bytes(_NONCE)
        self._pid, self._challenge = process[1] if len(process) > 1 else None, challenge
        self._proven = False
        self._mapped: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: object) -> mmap.mmap:
        # This comes first: telling the secret maps the challenge's segment, which may be anybody's until
        # then.
        if not self._proven:
            if self._map(self._challenge).find(self.nonce) < 0:
                raise ProtocolError(
                    f"{self._challenge} is not the memory of this session's master: it has not written "
                    "there what it was told"
                )
            self._proven = True
        return self._map(name)

    def keep(self, words: Iterable[object]) -> None:
        """Map what a log's words name: the master leaves, and closes what it has lent."""
        for word in words:
            match word:
                case [str(name), int()]:
                    # An upload that cannot have it fails when it runs.
                    with suppress(OSError, ValueError, ProtocolError):
                        self[name]

    def secret(self) -> bytes:
        """Return the secret in the master's segment, or nothing where this process cannot read it."""
        try:
            memory = self._map(self._challenge)
        except (OSError, ValueError, ProtocolError):
            # The other end is on another machine, in another container or of another user: the socket carries
            # the bytes.
            return b""
        return memory[len(_MARK) : len(_MARK) + _NONCE] if memory[: len(_MARK)] == _MARK else b""

    def _map(self, name: object) -> mmap.mmap:
        named = _NAME.fullmatch(name) if isinstance(name, str) else None
        if named is None or not isinstance(name, str):
            raise ProtocolError(f"not a shared segment: {str(name)[:40]!r}")
        if int(named[1]) != self._pid:
            raise ProtocolError(
                f"{name} is a segment of process {named[1]}, and this session's master is process {self._pid}"
            )
        found = self._mapped.get(name)
        if found is None:
            try:
                found = _opened(name)
            except OSError as error:
                if not are_out(error):
                    raise
                # Otherwise an upload would fail that the socket could have brought.
                with spare.lent():
                    found = _opened(name)
            self._mapped[name] = found
        return found


def _opened(name: str) -> mmap.mmap:
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not _sealed(descriptor):
            raise ProtocolError(
                f"{name} may shrink while it is read: expected memory that is sealed against it"
            )
        # The mapping keeps a descriptor of its own from here on.
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _sealed(descriptor: int) -> bool:
    """Whether a file can never shrink."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        # It is no memory file at all.
        return False


class KeptMemory:
    """Memory for tensors that come from the master, used again when they die: pages that are there already
    cost a fifth of fresh ones.

    malloc does not do it: torch asks for aligned blocks, and a freed one is never quite large enough for the
    next.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._total = 0
        self._lock = RLock()

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory of `nbytes`, warm if some of this size class has died.

        It comes back when this very view object dies.
        """
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
            if self._total + len(memory) <= _MOST_IDLE:
                self._idle.setdefault(len(memory), []).append(memory)
                self._total += len(memory)


class Challenge:
    """A segment by which this process and a worker of this machine show each other who they are.

    It begins with a secret: a worker that can tell it reads this process's memory. Each worker has a nonce
    written behind it: so the memory is of the process that the worker talks to. Segments without the mark
    hold tensors: what they begin with, a worker tells nobody.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._secret = secrets.token_bytes(_NONCE)
        self._next = len(_MARK) + _NONCE
        self._loan = pool.take(_SMALLEST)
        if self._loan is not None:
            self._loan.memory[: self._next] = _MARK + self._secret

    @property
    def name(self) -> str:
        """How a worker opens the segment; nothing where there is no shared memory."""
        return self._loan.name if self._loan is not None else ""

    def answered(self, secret: bytes, nonce: bytes) -> bool:
        """Return whether a worker has told the secret, and write its nonce where it looks for it."""
        if self._loan is None or not compare_digest(secret, self._secret) or len(nonce) != _NONCE:
            return False
        # Some 65,000 workers have come since, so the first ones have looked long ago.
        if self._next + _NONCE > _SMALLEST:
            self._next = len(_MARK) + _NONCE
        self._loan.memory[self._next : self._next + _NONCE] = nonce
        self._next += _NONCE
        return True
