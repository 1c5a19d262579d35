"""What functions print, log and warn of goes to their master, and all else where it went before.

`breakpoint()` in a function opens a debugger whose prompt is at the master.
"""

from __future__ import annotations

import io
import logging
import pdb
import queue
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from types import FrameType
from typing import TextIO

from ..log.watching import hear_others
from .process import install_exit
from .running import Running, current, here

_OUR_MODULES = f"{__name__.partition('.')[0]}.*"
log = logging.getLogger("distruntime.worker")


class _Lines(io.StringIO):
    """What the debugger writes and reads: its text goes with the prompt, and a line comes back."""

    def __init__(self, call: Running) -> None:
        super().__init__()
        self._call = call
        self._written: list[str] = []
        self._typed: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def write(self, text: str) -> int:
        """Keep a text for the next prompt."""
        self._written.append(text)
        return len(text)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return what the user types; nothing where the user, or the session, ends it."""
        text, self._written = "".join(self._written), []
        line = self._call.ask(text, self._typed)
        return "" if line is None else line + "\n"


class _Debugger(pdb.Pdb):
    """Python's debugger, which takes no signals: it is not in the main thread."""

    def __init__(self, lines: _Lines, frame: FrameType) -> None:
        super().__init__(stdin=lines, stdout=lines, nosigint=True, readrc=False)
        self._caller = _ours_around(frame)

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether a frame is of the function: who steps out of it does not step through the worker."""
        around = _ours_around(frame)
        return around is not frame and around is self._caller and bool(super().stop_here(frame))


def _ours_around(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the worker's own that has called a frame, directly or not."""
    while frame is not None and not fnmatch(frame.f_globals.get("__name__", ""), _OUR_MODULES):
        frame = frame.f_back
    return frame


def _break(frame: FrameType | None) -> None:
    call = here.call
    if call is None or not call.around.present:
        log.warning("a breakpoint was passed: no master is there to whom it could open a prompt")
        return
    if frame is None or _ours_around(frame) is frame:
        log.warning("a breakpoint was passed: it is in no function of a master's")
        return
    call.patient()
    call.debugged = True
    _Debugger(_Lines(call), frame).set_trace(frame)


def _hook(*args: object, **kwargs: object) -> None:
    _break(sys._getframe().f_back)


def install_prompt() -> None:
    """Have `breakpoint()` and `pdb.set_trace()` open their prompts at the master."""
    sys.breakpointhook = _hook
    pdb.set_trace = _hook


# The worker's own records are for its own log.
_OURS = ("distruntime",)


class Routed:
    """`sys.stdout` or `sys.stderr`: what a function writes is its master's, and the rest is the process's."""

    def __init__(self, kind: str, real: TextIO) -> None:
        self._kind, self._real = kind, real

    def write(self, text: str) -> int:
        """Write a text."""
        call = current()
        # `print` writes an empty text for its `end=""`.
        if call is not None and text and call.write(self._kind, text):
            return len(text)
        return self._real.write(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


class _Records(logging.Handler):
    """Hands the records of a function's loggers on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, unless it is the worker's own."""
        call = current()
        if call is None or record.name.partition(".")[0] in _OURS:
            return
        try:
            call.write(f"log {record.levelno} {record.name}", self.format(record))
        # A record of the user's may raise anything while it is formatted.
        except Exception:
            self.handleError(record)


def _handle(own: Callable[[logging.LogRecord], bool], record: logging.LogRecord) -> bool:
    call = current()
    return own(record) if call is None else call.unstruck(partial(own, record))


def _warn(kind: str, text: str) -> bool:
    call = current()
    return call is not None and call.warn(kind, text)


def install_around() -> None:
    """Have this process's output come here first."""
    for kind in ("stdout", "stderr"):
        if not isinstance(getattr(sys, kind), Routed):
            setattr(sys, kind, Routed(kind, getattr(sys, kind)))
    root = logging.getLogger()
    root.addHandler(_Records())
    for handler in root.handlers:
        # A function takes this process's own handlers, too, and a worker that logs waits for their locks.
        handler.handle = partial(_handle, handler.handle)  # type: ignore[method-assign]
    hear_others[:] = [_warn]
    install_prompt()
    install_exit()
