"""A nursery: one process imports torch once, and forks the workers that this process starts on its machine.

    this process --- requests, with descriptors --->  nursery (python -m distruntime_worker.nursery)
                 <-- [request, pid, exit code] -----     forks worker 0, worker 1, ...

Requests and reports are packets of JSON. A request for a worker brings two descriptors, its standard input
and its output. A report has no exit code when the worker has just started. A worker gets the environment, the
working directory and the umask that this process has at the time of the request. It gets the limits, the
priority and the CPU affinity that this process had when the nursery started.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, final

from ..wire.identity import has_died, process

# A nursery that was started with other values of these variables serves as well: they are read when they are
# needed, or set in the forked worker. Libraries may have read any other variable while torch was imported.
# pytest writes its own variable anew for each test, and torch writes its own in the first session.
# A nursery initialises no GPU, so each of its workers sees those that it may see.
_READ_LATE = (
    *("DISTRUNTIME_", "XDG_", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
)
# The largest request that is hoped for has so many bytes. A worker with a larger environment is not forked.
_BUFFER = 1 << 20
# A report has at most so many bytes.
_REPORT = 4096
# So many seconds lie between looks at a worker whose nursery has ended.
_LOOK = 0.05
# A nursery has so many seconds to end with this process.
_ENDING = 5.0

# A worker that ended after its nursery has this exit code: only a parent hears of an exit code.
NOBODY_KNOWS = 256

_nurseries: list[Nursery] = []


def fork_worker(
    arguments: Sequence[str], environment: dict[str, str], output: IO[bytes], piped: bool
) -> ForkedWorker | None:
    """Ask a nursery for a worker, after starting a nursery if there is none. Return at once.

    Return None where workers cannot be forked: macOS has libraries that do not work in a forked process.

    Args:
        arguments: those of `python -m distruntime_worker`.
        output: where it writes, standard output and errors.
        piped: whether its standard input is a pipe from this process; else it reads nothing.
    """
    if sys.platform != "linux":
        return None
    for _ in range(2):
        nursery = _nursery(environment, output)
        try:
            return nursery.fork(arguments, environment, output, piped)
        except BrokenPipeError:
            # The nursery was idle for so long that it has ended.
            nursery.close()
        except OSError:
            return None
    return None


def begin_nursery(environment: Mapping[str, str], output: IO[bytes]) -> None:
    """Start a nursery for such workers if there is none. Return at once; it imports torch meanwhile."""
    if sys.platform == "linux":
        _nursery(environment, output)


def _nursery(environment: Mapping[str, str], output: IO[bytes]) -> Nursery:
    fixed = {name: value for name, value in environment.items() if not name.startswith(_READ_LATE)}
    for nursery in list(_nurseries):
        if not nursery.serves():
            # A nursery that has ended by itself stays a zombie with an open socket otherwise.
            nursery.close()
            _nurseries[:] = [other for other in _nurseries if other is not nursery]
    for nursery in _nurseries:
        if nursery.fixed == fixed:
            return nursery
    _nurseries.append(Nursery(fixed, environment, output))
    return _nurseries[-1]


@final
class Nursery:
    """The process, and the socket to it.

    It ends with this process, however that ends, and after an idle minute.

    Any thread may call it, and so may signal handlers. So there is no lock, and an exception leaves no state
    half done.

    Args:
        fixed: the part of its environment that its workers must have, too.
        output: where it writes, which is nothing unless it cannot start.
        module: its program.
    """

    def __init__(
        self,
        fixed: Mapping[str, str],
        environment: Mapping[str, str],
        output: IO[bytes],
        module: str = "distruntime_worker.nursery",
    ) -> None:
        self.fixed = fixed
        self._master = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._reports: list[bytes] = []
        # So many of them have been acted on.
        self._read = 0
        # The keys are the numbers of requests.
        self._workers: dict[int, ForkedWorker] = {}
        self._numbers = count(1)
        with theirs:
            self._process = start_process(module, theirs, environment, output)
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """The process id of the nursery itself."""
        number: int = self._process.pid
        return number

    @property
    def ended(self) -> bool:
        """Whether the nursery has ended. Its workers may go on."""
        return bool(self._reports) and self._reports[-1] == b""

    @property
    def code(self) -> int:
        """The exit code of the nursery. Block until it has ended."""
        code: int = self._process.wait()
        return code

    def serves(self) -> bool:
        """Whether this process can ask it for a worker: a process that was forked from this one cannot."""
        self.read()
        return not self.ended and self._master == os.getpid()

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], piped: bool
    ) -> ForkedWorker:
        """Ask for a worker. Raise `OSError` if the request cannot be sent."""
        number = next(self._numbers)
        request = {
            "number": number,
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": _directory(),
            "umask": _umask(),
        }
        with open(os.devnull, "rb") as nothing:
            theirs, ours = os.pipe() if piped else (os.dup(nothing.fileno()), None)
        try:
            stdin = None if ours is None else _Pipe(ours, "wb")
            worker = self._workers[number] = ForkedWorker(self, stdin)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs, output.fileno()])
            except BaseException:
                del self._workers[number]
                if stdin is not None:
                    stdin.close()
                raise
        finally:
            os.close(theirs)
        return worker

    def send_signal(self, pid: int, number: int) -> bool:
        """Have a worker get a signal, unless it has ended. Return whether the nursery could be asked."""
        with suppress(OSError):
            self._socket.send(json.dumps({"pid": pid, "signal": number}).encode())
            return True
        return False

    def cancel(self) -> bool:
        """End the nursery if it has not forked any worker yet. Return whether it has ended."""
        self.read()
        if not self._reports:
            self._process.terminate()
            self._process.wait()
            self.read()
        return self.ended

    def read(self) -> None:
        """Read what the nursery has reported. Return at once."""
        # This process would never hear what a process that was forked from it reads.
        if self._master != os.getpid():
            return
        flags = socket.MSG_DONTWAIT
        try:
            while not self.ended:
                # The call in C appends what it reads, so that no interrupt comes in between.
                self._reports.extend(map(self._socket.recv, (_REPORT,), (flags,)))
        except BlockingIOError:
            # There is nothing more to read now.
            pass
        except OSError:
            # The nursery has ended before it read all requests, or this process has closed the socket.
            self._reports.append(b"")
        # Another thread may read the same reports now. Acting on one twice does nothing more, but counting
        # one twice would skip another.
        first = self._read
        reports = self._reports[first:]
        for report in filter(None, reports):
            number, pid, code = json.JSONDecoder().decode(report.decode("ascii"))
            worker = self._workers.get(number)
            if worker is not None and code is None:
                worker.process = [*process(pid)]
            elif worker is not None:
                worker.returncode = code
                self._workers.pop(number, None)
        self._read = max(self._read, first + len(reports))

    def wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        """Block until `condition()` holds, for `timeout` seconds at most.

        Reports of the nursery may change it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not condition():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            # Without its nursery a worker is looked at again and again.
            watched = select.poll()
            if not self.ended:
                watched.register(self._socket, select.POLLIN)
            watched.poll(1000 * (_LOOK if left is None else min(_LOOK, left)))

    def close(self) -> None:
        """End the nursery. Its workers go on."""
        self._socket.close()
        atexit.unregister(self.close)
        if self._master != os.getpid():
            return
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_process(
    module: str, control: socket.socket, environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a nursery with this program, and with this end of a socket for its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=control.fileno(),
        stdout=output,
        stderr=subprocess.STDOUT,
        # With more threads than one, numpy starts threads when it is imported, and a process with threads
        # cannot be forked.
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@final
class _Pipe(io.FileIO):
    """A worker's standard input, which whoever lets go of it closes, in whatever order a cycle ends."""

    def __del__(self) -> None:
        # A file that is still open would warn here.
        self.close()


@final
class ForkedWorker:
    """A worker that a nursery forks. It has what is used of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, stdin: IO[bytes] | None) -> None:
        self.stdin = stdin
        self.returncode: int | None = None
        # It is [machine, pid, start], and empty until the worker is forked.
        self.process: list[object] = []
        self._nursery = nursery

    def __del__(self) -> None:
        # Nobody can write to the worker any more, and a worker that dialled this process ends with it.
        if self.stdin is not None:
            self.stdin.close()

    @property
    def pid(self) -> int:
        """The process id; 0 if the nursery ended before. Block until the nursery has forked the worker."""
        self._nursery.wait(lambda: self.poll() is not None or bool(self.process), None)
        return int(str(self.process[1])) if self.process else 0

    def poll(self) -> int | None:
        """Return the exit code, None while the worker runs. A signal has the code -number."""
        self._nursery.read()
        if self.returncode is None and self._nursery.ended:
            if not self.process:
                self.returncode = self._nursery.code
            elif not self.process[2] or has_died(self.process):
                self.returncode = NOBODY_KNOWS
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Block until the worker has ended; return its exit code.

        Raise `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        self._nursery.wait(lambda: self.poll() is not None, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the worker has ended."""
        if self.poll() is not None or (not self.process and self._nursery.cancel()):
            return
        # The nursery sends the signal: only a parent knows that a process still has its number.
        if not self._nursery.send_signal(self.pid, number) and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _directory() -> str:
    """Return the working directory; nothing if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _umask() -> int:
    # A process can read its umask only by setting it, and then other threads would make files with the wrong
    # one.
    found = re.search(
        r"^Umask:\s*(\d+)",
        Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"),
        re.MULTILINE,
    )
    return int(found[1], 8) if found else 0o022
