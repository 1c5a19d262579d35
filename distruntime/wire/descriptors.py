"""File descriptors, of which a process has so many: what it does before they are out, and what is said where
they are, or where processes, memory or a disk are.

libzmq ends the process (SIGABRT) where it needs one for a socket of its own and there is none, and reads its
sockets' listeners in a busy loop where it cannot accept. torch's and gloo's sockets fail in the midst. So it
is asked first.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import ConfigurationError
from .shield import Lock

# A channel with keys takes 15 descriptors (two threads' and six sockets' own, and the listener), and a group
# takes some 8. This is enough for one of each, and for something to live on.
ENOUGH = 24
# Some systems allow a thousand times as many descriptors. Programs that are started from here may walk
# through all of them.
_MUCH = 1 << 20
# At least and at most so many strangers may be connected at a time.
_FEW, _MANY = 16, 48
# So many are kept for what must not fail.
_SPARE = 4


def raise_limit() -> None:
    """Let this process have as many descriptors as it may.

    What is usual, 1024, is a thousand silent connections, or two large meshes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MUCH if hard == resource.RLIM_INFINITY else min(hard, _MUCH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A system may have a limit of its own, as macOS has.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def most_strangers() -> int:
    """Return how many connections through which nothing has come one listener keeps: an eighth of all
    descriptors, from 16 to 48.

    Each may hold a frame of libzmq's, half a MiB: 25 MiB together.
    """
    return max(_FEW, min(_MANY, _limit() // 8))


def require(what: str, count: int = ENOUGH) -> None:
    """Raise `ConfigurationError` unless this process has so many descriptors left for `what`."""
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(held) < count:
            held.append(os.dup(held[0]))
    except OSError:
        raise ConfigurationError(
            f"this process (pid {os.getpid()}) has {len(held)} file descriptors left of {_limit()}, "
            f"expected {count} for {what}: raise the "
            "limit (`ulimit -n` in the shell that starts it), or close files and connections"
        ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


class Spare:
    """Descriptors that are kept for what must not fail where there are none.

    To map the memory that a tensor comes in takes two.
    """

    def __init__(self) -> None:
        self._kept = list[int]()
        self._lock = Lock()

    def keep(self) -> None:
        """Take as many as are kept, as far as there are any."""
        with self._lock, suppress(OSError):
            while len(self._kept) < _SPARE:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Free what is kept for the length of a `with` block."""
        with self._lock:
            while self._kept:
                os.close(self._kept.pop())
        try:
            yield
        finally:
            self.keep()


# A worker keeps these from its start; a master keeps none.
spare = Spare()


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let an error of a `with` block that says that something is used up say what, where, and of how much.

    It is a `ConfigurationError` then. Other errors stay as they are.
    """
    try:
        yield
    except OSError as error:
        words = used_up(error)
        if not words:
            raise
        raise ConfigurationError(f"{what}: {words}") from error


def used_up(error: OSError) -> str:
    """Return the words for what is used up where a process was to be started; nothing for other errors."""
    match error.errno:
        case errno.EMFILE:
            return (
                f"this process (pid {os.getpid()}) has no file descriptor left of {_limit()}: raise the "
                "limit (`ulimit -n` in the shell that starts it), or close files and connections"
            )
        case errno.ENFILE:
            return "this machine has no file descriptor left: see /proc/sys/fs/file-nr"
        case errno.EAGAIN:
            processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            most = "" if processes == resource.RLIM_INFINITY else f", {processes}"
            return (
                f"this process (pid {os.getpid()}) may start no process and no thread: the limit of its user "
                f"(`ulimit -u`{most}) or of its control group (`pids.max`) is reached. Raise it, or end "
                "something there"
            )
        case errno.ENOMEM:
            return (
                f"this process (pid {os.getpid()}) gets no more memory from the system: see `free`, "
                "`ulimit -v`, and `memory.max` of its control group"
            )
    return ""


def on_full_disk(error: OSError, path: str, nbytes: int) -> OSError:
    """Return an error that says where a disk is full, and what was to be written there."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    free = shutil.disk_usage(path).free
    text = f"{os.strerror(error.errno)}: {nbytes} bytes were to be written, {free} are free there: make room"
    return OSError(error.errno, text, path)


def are_out(error: OSError) -> bool:
    """Whether an error says that there are no descriptors left, here or in the whole system."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
