"""Processes that a worker starts: one nursery, which imports torch once and forks the others.

The nursery is `distruntime_worker.nursery`, as a master starts it for local workers. Its processes inherit no
socket of this worker, and begin with one thread and no accelerator in use.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count

from distruntime.wire.descriptors import naming
from distruntime.wire.shield import Lock

from .skeleton import Real


@dataclass(frozen=True)
class Surroundings:
    """What the session of a master gives its processes.

    `host` returns where other workers reach this one, by the host that their master has dialled. `paused` is
    the context in which a thread blocks, and `closed` says whether the session has ended.
    """

    device: Real
    host: Callable[[str], str]
    paused: Callable[[], AbstractContextManager[object]]
    closed: Callable[[], bool]


_SET_PARENT_DEATH_SIGNAL = 1
# A request has at most so many bytes.
_BUFFER = 1 << 20
# A child's output is read in pieces of at most so many bytes.
_PIPE = 1 << 16
_REPORT = 4096
# The exit code of a child that has closed its socket is asked for during so many seconds, and so often.
_EXIT, _LOOK = 5.0, 0.05


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Return what can be read of these, or has been closed at its other end; wait so long for one of them.

    A worker may have more files than `select` takes.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in waiting.poll(max(0.0, seconds) * 1000)]


class Child:
    """A process that the nursery has forked. Its exit code is None while it runs."""

    def __init__(self, number: int, link: socket.socket, output: int) -> None:
        self.number, self.link, self.output = number, link, output
        self.pid = 0
        self.code: int | None = None
        # What it has written and nobody has shown: a line whose end has not come.
        self.said = b""
        # This is the last line that was shown, which may say why it has ended.
        self.last = ""
        # It stands before each line that is shown.
        self.prefix = ""

    def show(self, whole: bool = False) -> None:
        """Print what it has printed. Where only `whole` lines count, one without an end waits."""
        with suppress(BlockingIOError):
            data = os.read(self.output, _PIPE) if self.output >= 0 else b""
            if not data and self.output >= 0:
                os.close(self.output)
                self.output = -1
            self.said += data
        # Some write a line in parts.
        end = self.said.rfind(b"\n") + 1 if whole and len(self.said) <= _PIPE else len(self.said)
        said, self.said = self.said[:end], self.said[end:]
        for line in said.decode(errors="replace").splitlines():
            self.last = line
            print(f"{self.prefix}{line}", flush=True)

    def close(self) -> None:
        """Let go of the socket and of the pipe."""
        self.link.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class Nursery:
    """A nursery of this worker's own. It ends when it is closed, or with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._numbers = count(1)
        self._children: dict[int, Child] = {}
        self.users = 0
        self._lock = Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distruntime_worker.nursery", str(os.getpid())],
                stdin=theirs.fileno(),
                # numpy starts threads when it is imported, unless it may have one only, and a process with
                # threads cannot be forked.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start `python -m distruntime_worker` with these arguments; return at once."""
        link, stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        output, writes = os.pipe()
        os.set_blocking(output, False)
        child = Child(next(self._numbers), link, output)
        request = {
            "number": child.number,
            "arguments": [*arguments],
            "environment": {**environment},
            "directory": os.getcwd(),
            "umask": 0o22,
        }
        try:
            self._children[child.number] = child
            socket.send_fds(self._control, [json.dumps(request).encode()], [stdin.fileno(), writes])
        except BaseException:
            child.close()
            raise
        finally:
            stdin.close()
            os.close(writes)
        return child

    def look(self, timeout: float | None = 0.0) -> bool:
        """Read what the nursery reports, for `timeout` seconds at most; return whether it still runs.

        Another of its users may have found that it has ended, and have closed it.
        """
        with self._lock:
            while True:
                try:
                    self._control.settimeout(timeout)
                    report = self._control.recv(_REPORT)
                except (TimeoutError, BlockingIOError):
                    return True
                except OSError:
                    return False
                if not report:
                    return False
                number, pid, code = json.loads(report)
                child = self._children.get(number)
                if child is not None:
                    child.pid, child.code = pid, code
                    if code is not None:
                        del self._children[number]
                timeout = 0.0

    def signal(self, child: Child, number: int) -> None:
        """Send a child a signal, unless it has ended. Block until it has begun."""
        while child.pid == 0 and self.look(1.0):
            pass
        if child.code is None:
            with suppress(OSError), self._lock:
                self._control.settimeout(None)
                self._control.send(json.dumps({"pid": child.pid, "signal": int(number)}).encode())

    def end(self, child: Child) -> None:
        """Kill a child and wait until it is gone."""
        self.signal(child, signal.SIGKILL)
        while child.code is None and self.look(1.0):
            pass
        child.close()

    def end_of(self, child: Child) -> str:
        """Return how a child has ended that has closed its socket. Block until that is known, or for long."""
        until, runs = time.monotonic() + _EXIT, True
        while child.code is None and runs and time.monotonic() < until:
            runs = self.look(_LOOK)
        if child.code is not None:
            return _how(child.code)
        if runs:
            return "closed its socket"
        # Nobody has told how the child ended: it goes with its nursery.
        with suppress(subprocess.TimeoutExpired):
            own = _how(self.process.wait(_EXIT))
            return f"went with the process that had forked it (pid {self.process.pid}), which {own},"
        return "closed its socket, as did the process that had forked it,"

    def close(self) -> None:
        """End the nursery. Its children end with it."""
        self._control.close()
        self.process.wait()


def end_with_nursery() -> None:
    """Let this process end with the nursery: its main thread has forked it, and ends with the worker."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _how(code: int) -> str:
    """Return the words for a process that ended with this code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


_guard = Lock()
_nursery: list[Nursery] = []


def enter() -> Nursery:
    """Return the worker's nursery, and count one more user of it."""
    with _guard:
        if _nursery and not _nursery[0].look():
            _nursery.pop().close()
        if not _nursery:
            with naming("processes of dr.spmd need one from which they are forked"):
                _nursery.append(Nursery())
        _nursery[0].users += 1
        return _nursery[0]


def leave(nursery: Nursery) -> None:
    """Count one user less; end the nursery with its last."""
    with _guard:
        nursery.users -= 1
        if nursery.users == 0:
            if nursery in _nursery:
                _nursery.remove(nursery)
            nursery.close()
