"""A nursery: one process imports torch once, and forks a worker for each request of its master.

A worker that is started by itself spends two seconds of a core on the import of torch. A fork of this process
costs a hundredth of that, and the workers share the memory of what was imported.
`distruntime.cluster.nursery` is the master's side, and says what goes over the socket.

Invariants: this process has one thread, uses no accelerator and has opened no libzmq context, so that a fork
copies nothing half alive. It draws no random numbers. It ends when the master closes the socket, when the
master dies, or when it has been idle for a while.
"""

from __future__ import annotations

import gc

# Importing torch makes objects that stay, and a collection would look through them again and again.
gc.disable()

import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections import deque  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from contextlib import suppress  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import final  # noqa: E402

import numpy  # noqa: E402

from distruntime.wire.descriptors import used_up  # noqa: E402

from .cli import leave  # noqa: E402
from .cli import main as run_worker  # noqa: E402
from .machine import accelerator  # noqa: E402
from .publishing import published  # noqa: E402
from .session import daemon as _daemon  # noqa: E402, F401
from .values import draws  # noqa: E402

# What was imported stays for ever. A collection in a worker would write into all of it, and so copy its
# pages.
gc.freeze()
gc.enable()

# So many seconds lie between looks whether the master still lives.
_LOOK = 1.0
# The nursery ends after so many seconds without a worker and without a request.
_IDLE = 60.0
# A worker that cannot be forked has this exit code: EX_OSERR of sysexits.h.
_CANNOT = 71
# A request has at most so many bytes.
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Request:
    """What the master asks for: a worker with these descriptors of input and output, or a signal for one."""

    # It is 0 for a request for a signal.
    number: int = 0
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # It is empty if the master's working directory was removed.
    directory: str = ""
    umask: int = 0
    descriptors: list[int] = field(default_factory=list)
    # This process gets the signal.
    pid: int = 0
    signal: int = 0


def _receive(control: socket.socket) -> Request | None:
    """Return the next request of the master; None where it has closed the socket."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(control, _LARGEST, 2)
    except ConnectionResetError:
        # The master was killed while something that it had to read was on its way.
        return None
    return Request(descriptors=descriptors, **json.loads(packet)) if packet else None


@final
class Nursery:
    """The loop of the nursery. `control` is the socket to the master."""

    def __init__(self, control: socket.socket, master: int) -> None:
        self._control = control
        self._master = master
        self._directory = os.getcwd()
        # Each process id has the number of its request, and the Popen object of a worker that could not be
        # forked.
        self._workers: dict[int, tuple[int, subprocess.Popen[bytes] | None]] = {}
        # These are for the master, which may not read for a long time.
        self._reports: deque[bytes] = deque()
        self._woken, self._wake = socket.socketpair()
        # It is True while the master can still ask for workers.
        self._open = True
        self._last_use = time.monotonic()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Request | None:
        """Serve the master. Return None where it is gone.

        Return a request in the worker that was forked for it.
        """
        while os.getppid() == self._master:
            watched = [self._woken, self._control] if self._open else [self._woken]
            readable, _, _ = select.select(watched, [self._control] if self._reports else [], [], _LOOK)
            if self._woken in readable:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            self._reap()
            self._send_reports()
            if self._control in readable:
                request = _receive(self._control)
                if request is None:
                    return None
                if self._start(request):
                    return request
            if self._workers or readable:
                self._last_use = time.monotonic()
            elif not self._open:
                return None
            elif time.monotonic() > self._last_use + _IDLE:
                # From here on the master's next request fails at once, and it starts another nursery. A
                # request that came before is still served.
                self._control.shutdown(socket.SHUT_RD)
                self._open = False
                request = _receive(self._control)
                if request is not None and self._start(request):
                    return request
        return None

    def _start(self, request: Request) -> bool:
        """Do what the master asks. Return whether this is the worker that it asked for."""
        if not request.number:
            if request.pid in self._workers:
                os.kill(request.pid, request.signal)
            return False
        pid, code = 0, None
        try:
            if _may_fork():
                pid = os.fork()
                if pid == 0:
                    self._become(request)
                    return True
                self._workers[pid] = request.number, None
            else:
                process = _spawned(request)
                pid = process.pid
                self._workers[pid] = request.number, process
        except OSError as error:
            # The master may ask again. It shows these words, as the last ones of a worker that has ended.
            code = _CANNOT
            with suppress(OSError):
                os.write(request.descriptors[1], f"cannot fork: {used_up(error) or error}\n".encode())
        for descriptor in request.descriptors:
            os.close(descriptor)
        self._report(request.number, pid, code)
        return False

    def _become(self, request: Request) -> None:
        """Make this forked process what `python -m distruntime_worker` would be with these arguments."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        differ_from_siblings()
        stdin, output = request.descriptors
        for number, descriptor in enumerate((stdin, output, output)):
            os.dup2(descriptor, number)
        for descriptor in {stdin, output}:
            os.close(descriptor)
        for end in (self._woken, self._wake):
            end.close()
        # The number of the control socket is 0, and that is the worker's own standard input now.
        self._control.detach()
        if request.directory:
            # `python -m` puts the directory in which it is started in front of the path.
            sys.path[:1] = [request.directory if sys.path[0] == self._directory else sys.path[0]]
            os.chdir(request.directory)
        os.umask(request.umask)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.argv[1:] = request.arguments

    def _reap(self) -> None:
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                number, process = self._workers.pop(pid)
                if process is not None:
                    process.returncode = code
                self._report(number, pid, code)

    def _report(self, number: int, pid: int, code: int | None) -> None:
        self._reports.append(json.dumps([number, pid, code]).encode())
        self._send_reports()

    def _send_reports(self) -> None:
        # A master that is gone needs no report: the next look finds that out.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._reports:
                self._control.send(self._reports[0], socket.MSG_DONTWAIT)
                self._reports.popleft()


def differ_from_siblings() -> None:
    """Draw all anew that a process draws while it imports.

    What uses `random`, `secrets` or `uuid` later differs anyway.
    """
    numpy.random.seed()
    draws.seed_anew()
    published.count_anew()


def _may_fork() -> bool:
    """Whether a fork of this process works: it lacks all other threads, and cannot use what is begun.

    macOS has libraries that do not work in a forked process.
    """
    return (
        sys.platform == "linux"
        and len(list(Path("/proc/self/task").iterdir())) == 1
        and accelerator.untouched()
    )


def _spawned(request: Request) -> subprocess.Popen[bytes]:
    stdin, output = request.descriptors
    return subprocess.Popen(
        [sys.executable, "-m", "distruntime_worker", *request.arguments],
        stdin=stdin,
        stdout=output,
        stderr=output,
        cwd=request.directory or None,
        umask=request.umask,
        env=request.environment,
        start_new_session=True,
    )


def main(arguments: Sequence[str]) -> int:
    """Serve the master with this process id, over the socket that standard input is; return the exit code."""
    control = socket.socket(fileno=0)
    nursery = Nursery(control, int(arguments[0]))
    request = nursery.serve()
    if request is None:
        # A worker that ends from here on must not wake a socket that is closed, or another's of its number.
        signal.set_wakeup_fd(-1)
        return 0
    leave(run_worker(request.arguments))


if __name__ == "__main__":
    # The master waits for this process at its own end. So all that was imported is not taken apart, which
    # would also copy the memory that workers share.
    leave(main(sys.argv[1:]))
