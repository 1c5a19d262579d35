"""Where lines about a wait or a transfer go: a terminal, a notebook, or a log.

A terminal has one such line, which each text replaces. A notebook's cell has one output for them. A log gets
a line of its own for each text, and few of them.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable
from typing import Protocol, final

from ..wire.units import writable


class Screen(Protocol):
    """Shows one text at a time. `first` is how long something lasts before it is shown."""

    first: float

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""

    def finish(self, text: str) -> None:
        """Take the last text away, or leave this one where nothing can be taken away."""

    def pause(self, seconds: float) -> float:
        """Return how many seconds pass before a text of something that has lasted for so long is replaced."""


@final
class Terminal:
    """Standard error, where that is a terminal."""

    first = 0.5

    def show(self, text: str) -> None:
        sys.stderr.write(writable(f"\r{text}\x1b[K", sys.stderr))
        sys.stderr.flush()

    def finish(self, text: str) -> None:
        self.show("")

    def pause(self, seconds: float) -> float:
        # A number that changes faster than people read is noise.
        return 0.25


@final
class Notebook:
    """An output of the cell that runs. What it says last stays there."""

    # A cell keeps the output, so what is over soon is not worth one.
    first = 1.0

    def __init__(self) -> None:
        self._id, self._cell = "", -1

    def show(self, text: str) -> None:
        cell = _shell_cell()
        # Each cell has an output of its own.
        new = cell != self._cell
        if new:
            self._id, self._cell = f"distruntime-{uuid.uuid4().hex[:8]}", cell
        display = importlib.import_module("IPython.display")
        put = display.display if new else display.update_display
        put({"text/plain": text}, raw=True, display_id=self._id)

    def finish(self, text: str) -> None:
        self.show(text)

    def pause(self, seconds: float) -> float:
        return 0.25


@final
class Log:
    """Standard error, where that is a file or a pipe."""

    # So many seconds are worth a line in a log.
    first = 30.0

    def show(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def finish(self, text: str) -> None:
        self.show(text)

    def pause(self, seconds: float) -> float:
        return max(self.first, seconds)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    # Nobody imports it here: a kernel has done so.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "ipykernel" in sys.modules and getattr(shell, "kernel", None) is not None


def _shell_cell() -> int:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    count = getattr(shell, "execution_count", 0)
    return count if isinstance(count, int) else 0


_notebook = Notebook()
_terminal, _log = Terminal(), Log()


def screen() -> Screen:
    """Return where lines go now."""
    if in_notebook():
        return _notebook
    return _terminal if sys.stderr.isatty() else _log


def voice(quiet: bool | None) -> Callable[[str], None]:
    """Return what says how a session begins: to a terminal or a notebook, in lines to a log, or to nobody."""
    if quiet or (quiet is None and os.environ.get("DISTRUNTIME_QUIET")):
        return _silent
    if quiet is False or sys.stdout.isatty() or in_notebook():
        return _Begun(dots=not in_notebook()).say
    return _Lines().say


def _silent(text: str) -> None:
    """Say nothing, as the user has asked for."""


@final
class _Begun:
    """Standard output, at once. The end of a line says nothing where no line has begun."""

    def __init__(self, dots: bool) -> None:
        # A notebook that no browser shows keeps each dot of a wait as an output of its own.
        self._dots, self._begun = dots, False

    def say(self, text: str) -> None:
        """Print a text, which may be a part of a line."""
        if text == "." and not self._dots:
            return
        if text != "\n" or self._begun:
            print(writable(text, sys.stdout), end="", flush=True)
            self._begun = not text.endswith("\n")


@final
class _Lines:
    """Whole lines on standard error: standard output is the program's own."""

    def __init__(self) -> None:
        self._begun = ""

    def say(self, text: str) -> None:
        """Add to the line that has begun, and print what is whole. The dots of a wait are for terminals."""
        *whole, self._begun = (self._begun + ("" if text == "." else text)).split("\n")
        for line in whole:
            if line.strip():
                print(line.rstrip(), file=sys.stderr, flush=True)
