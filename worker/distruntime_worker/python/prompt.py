"""`breakpoint()` in a function: a debugger whose prompt is at the master."""

from __future__ import annotations

import io
import logging
import pdb
import queue
import sys
from fnmatch import fnmatch
from types import FrameType

from .running import Running, here

_OURS = f"{__name__.partition('.')[0]}.*"
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
    while frame is not None and not fnmatch(frame.f_globals.get("__name__", ""), _OURS):
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
