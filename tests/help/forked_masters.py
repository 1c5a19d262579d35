"""Masters for tests that need one in a process of its own: forked from one that has imported everything.

A master that is started by itself spends three seconds of a core on imports, and its nursery two more. One
that is forked spends a hundredth of that. It is the process that `python -c SOURCE` would be, and it ends as
that one does. The tests of launching, of the command line and of the examples start real ones.

This file is the helper of the tests, and, with `python -m forked_masters`, the process from which they fork:
the nursery of the workers, with another program.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from types import ModuleType
from typing import IO

from distruntime.cluster import nursery as masters_side
from distruntime.cluster.nursery import ForkedWorker, Nursery

_nurseries: list[Nursery] = []
# The nursery that imports has these values of variables. A master that needs others is started by itself.
_LATE = ("DISTRUNTIME_", "XDG_", "PYTEST_", "PYTHONPATH", "OMP_NUM_THREADS", "COVERAGE", "TERM")


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_LATE)}


def start_master(
    source: str, environment: dict[str, str], output: IO[bytes], strict: bool = False
) -> ForkedWorker | subprocess.Popen[bytes]:
    """Run a program in a process and a session of processes of its own, with a pipe as its standard input.

    With `strict` its warnings are errors, and its output is not buffered.
    """
    # What a master says of its start would come between the lines that a test waits for.
    environment = {**environment, "DISTRUNTIME_QUIET": "1"}
    if sys.platform == "linux" and _early(environment) == _early(dict(os.environ)):
        for _ in range(2):
            if not (_nurseries and _nurseries[0].serves()):
                for old in _nurseries:
                    old.close()
                helpers = os.path.dirname(__file__)
                path = os.pathsep.join([environment["PYTHONPATH"], helpers])
                _nurseries[:] = [
                    Nursery({}, {**os.environ, "PYTHONPATH": path}, sys.__stderr__, "forked_masters")
                ]
            try:
                return _nurseries[0].fork([str(int(strict)), source], environment, output, True)
            except BrokenPipeError:
                # It was idle for so long that it has ended.
                pass
    flags = ["-u", "-W", "error", "-X", "faulthandler"] if strict else []
    return subprocess.Popen(
        [sys.executable, *flags, "-c", source],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class _Forked:
    """A child that this process has forked. It has what `Nursery` uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked nursery", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _keep_a_nursery() -> None:
    """Fork what becomes this master's nursery once it needs one. Threads would be in the way later."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        asked, descriptors, _, _ = socket.recv_fds(theirs, 1, 2)
        if not asked:
            os._exit(0)
        control, output = descriptors
        for number, descriptor in enumerate((control, output, output)):
            os.dup2(descriptor, number)
        for descriptor in (control, output, theirs.fileno()):
            os.close(descriptor)
        from distruntime_worker import nursery

        os._exit(nursery.main([str(os.getppid())]))
    theirs.close()
    start_really = masters_side.start_process
    waiting = [_Forked(pid)]

    def start_process(
        module: str, control: socket.socket, environment: dict[str, str], output: IO[bytes]
    ) -> object:
        if not waiting:
            return start_really(module, control, environment, output)
        socket.send_fds(ours, [b"."], [control.fileno(), output.fileno()])
        return waiting.pop()

    masters_side.start_process = start_process  # type: ignore[assignment]


def _become(strict: bool, environment: dict[str, str]) -> None:
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.argv[:] = ["-c"]
    if strict:
        warnings.simplefilter("error")
        faulthandler.enable()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    # The shell of a background job, or the test runner, may have it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _serve() -> str | None:
    """Serve the tests; return the program of the master that this process was forked to be."""
    # The first session of a master imports these.
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401

    from distruntime_worker import nursery

    assert nursery._may_fork(), "the imports have started threads"
    # The imports take 2.3 s of a core, and a suite goes on without such a master for minutes.
    nursery._IDLE = 600.0
    request = nursery.Nursery(socket.socket(fileno=0), int(sys.argv[1])).serve()
    if request is None:
        return None
    strict, source = request.arguments
    _become(strict == "1", request.environment)
    _keep_a_nursery()
    return source


if __name__ == "__main__":
    program = _serve()
    if program is not None:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
