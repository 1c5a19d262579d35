"""The script of a launch: a child that gets this process's signals, and that gives it its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import final

from ..errors import ConfigurationError
from .programs import ends_with_us

# These are passed on to the script.
_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A script that is to end has so many seconds for it.
_ENDING = 10.0


@final
class Script:
    """A child process, as a context manager: its end ends the child, and gives the signals back.

    Args:
        words: the program and its arguments.
        environment: all of its variables.
        watches_time: keep SIGUSR1 from the script. A scheduler tells with it that the time is nearly over,
            and `warned` is True from then on.

    Raises:
        ConfigurationError: there is no such program.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], *, watches_time: bool = False
    ) -> None:
        # The terminal itself sends Ctrl-C to all processes that share it. A prompt can read from it only if
        # it shares it.
        self._shares = _has_terminal()
        self.warned = False
        self._watches_time = watches_time
        # These have come before there was a script to get them.
        self._early: list[int] = []
        self._started = False
        self._before = {number: signal.signal(number, self._pass_on) for number in _PASSED}
        try:
            self._process = subprocess.Popen(
                list(words),
                env=dict(environment),
                start_new_session=not self._shares,
                preexec_fn=ends_with_us(),
            )
        except OSError as error:
            self._give_signals_back()
            raise ConfigurationError(
                f"got {words[0]!r} to run, and it cannot be run: {error.strerror}. Name a program that can "
                "be run"
            ) from error
        self._started = True
        while self._early:
            self._pass_on(self._early.pop(0), None)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._give_signals_back()

    def _give_signals_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def look(self, seconds: float) -> int | None:
        """Block until the script has ended, for so many seconds at most.

        Return its exit code, None while it runs.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return self.wait()
        return None

    def wait(self) -> int:
        """Block until the script has ended. Return its exit code.

        After a signal it is 128 and the signal's number, as a shell says it.
        """
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self) -> int:
        """Ask the script to end with SIGTERM, and kill it if it takes too long. Return its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
            if self.look(_ENDING) is None:
                self._process.kill()
        return self.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._started:
            self._early.append(number)
        elif number == signal.SIGUSR1 and self._watches_time:
            self.warned = True
        elif not (number == signal.SIGINT and self._shares) and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _has_terminal() -> bool:
    """Whether this process is in the foreground of the terminal from which it reads."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        # There is no standard input.
        return False


def command(words: Sequence[str], *, module: bool, program: bool) -> list[str]:
    """Return the program of a script: Python with a file, with a module, or with our prompt; or `words`.

    Args:
        words: the script and its arguments.
        module: whether the first one is the name of a module.
        program: whether the first one is a program and no script of Python.

    Raises:
        ConfigurationError: there is no such file.
    """
    script, *arguments = words
    if program:
        return list(words)
    if module:
        return [sys.executable, "-m", script, *arguments]
    if script == "repl" and not os.path.exists(script):
        return [sys.executable, "-m", "distruntime", "repl", *arguments]
    if not os.path.exists(script):
        raise ConfigurationError(
            f"got the script {script!r}, and there is no such file here ({os.getcwd()}). Name a script of "
            "Python, `repl` for a prompt, or -m and a module"
        )
    return [sys.executable, script, *arguments]
