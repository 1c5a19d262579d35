"""Programs that end with this process, however that ends, and workers behind one, such as `srun`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

from ..errors import ConfigurationError
from ..session.launcher import LaunchSpec, WorkerProcess
from .log_ends import cut, last_lines

# Linux's number of the option by which a process asks for a signal at its parent's death.
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> bool:
    """Have the kernel kill this process when its parent ends. Return whether the kernel can.

    A program that this process turns into with `os.execv` keeps that. Only Linux has it.
    """
    if sys.platform != "linux":
        return False
    failed: int = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return failed == 0


def ends_with_us() -> Callable[[], None] | None:
    """Return the `preexec_fn` of a child that ends with this process; None where the kernel cannot do it.

    A `SIGKILL` of this process leaves no time to end its children.
    """
    if sys.platform != "linux":
        return None
    # Both are found here: a forked child may not load a library.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # This process may have ended before the line above.
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def how_ended(code: int) -> str:
    """Return what an exit code says, as "killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        # Real-time signals have no name.
        return f"killed by signal {-code}"


class Process(Protocol):
    """A child process, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended."""

    def kill(self) -> None:
        """End it at once."""


class ProcessWorker(WorkerProcess):
    """A worker that lives as long as a process that this one has started. Its output goes to `log`."""

    def __init__(self, process: Process, log: Path) -> None:
        self.log, self._process = log, process

    @property
    def pid(self) -> int:
        """The process id here."""
        return self._process.pid

    def last_lines(self, count: int = 20) -> str:
        """Return the end of what was written."""
        return last_lines(self.log, count)

    def terminate(self) -> None:
        """Ask the process to end. Return at once.

        To stop many workers, ask all of them before you `stop` each.
        """
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self, timeout: float = 5.0) -> None:
        """Block until the process has ended; one that takes longer than `timeout` seconds is killed."""
        self.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@final
class ProgramWorker(ProcessWorker):
    """A worker on some machine, and the program here that lives as long. Both write to `log`."""

    _process: subprocess.Popen[bytes]

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__(process, log)
        self.name = name

    def poll(self) -> str | None:
        """Return how the program has ended, or None while it runs."""
        # Whoever watches it asks now and then, for as long as it runs.
        cut(self.log)
        code = self._process.poll()
        if code is None:
            return None
        return f"{self.name} {'was ' if code < 0 else ''}{how_ended(code)}"

    def leave(self) -> None:
        """Let the program run on."""
        # Python warns of a process that nobody has waited for.
        self._process.returncode = 0

    def __repr__(self) -> str:
        return f"<ProgramWorker {self.name}, pid {self.pid}>"


def start_program(
    name: str, words: Sequence[str], spec: LaunchSpec, environment: Mapping[str, str], *, ends: bool
) -> ProgramWorker:
    """Start a program that starts a worker. Return at once.

    Args:
        name: what errors call it.
        words: the program and its arguments.
        environment: all of its variables.
        ends: whether it ends with this process.

    Raises:
        ConfigurationError: there is no such program, or it cannot be run.
    """
    log = (spec.logs or spec.directory) / f"worker-{spec.node}.log"
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                # Ctrl-C in the terminal is the script's alone.
                start_new_session=True,
                preexec_fn=ends_with_us() if ends else None,
            )
        except OSError as error:
            raise ConfigurationError(
                f"got {words[0]!r} to start a worker with, and it cannot be run: {error.strerror}. "
                "Install it, or put its folder on the PATH"
            ) from error
    return ProgramWorker(name, process, log)
