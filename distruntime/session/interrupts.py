"""What a prompt says after Ctrl-C: how much is still queued on the workers, and how to drop it.

A loop that issues operations runs ahead of its workers. So after Ctrl-C they may have minutes of work left,
and the next read waits behind it.
"""

from __future__ import annotations

import code
import sys
import time
from types import TracebackType
from typing import Protocol

from ..log.line import inside
from ..log.progress import queued
from ..wire.units import operator_text
from .session import Session, active

# So many seconds may pass until the workers have said what they run.
_PATIENCE = 0.3


class Result(Protocol):
    """What IPython tells of a cell that has run."""

    error_in_exec: BaseException | None


class Events(Protocol):
    """Where IPython calls back."""

    def register(self, event: str, function: object) -> None:
        """Call a function at each event of this name."""


class Shell(Protocol):
    """A prompt of IPython, or a kernel of Jupyter."""

    events: Events


def queued_text(session: Session) -> str:
    """Return what is queued on each worker; nothing if nothing is. Block for 0.3 s at most."""
    there = [node for node in session.nodes if node.failed is None and queued(node)]
    asked = [(node, session.ask_status(node)) for node in there if node.presence.absence is None]
    deadline, lines, total = time.monotonic() + _PATIENCE, list[str](), 0
    for node, request in asked:
        if not session.result(request, max(0.0, deadline - time.monotonic()), quietly=True):
            session.requests.discard(request)
        running = operator_text(request.value.running or "")[:100] if request.value is not None else ""
        count = queued(node)
        total += count
        if count:
            lines.append(
                f"{node}: {count:,} operation{'s' if count > 1 else ''} queued"
                + (f", {running} runs" if running else "")
            )
    if not lines:
        return ""
    rest = (
        "They run on. dr.cancel() drops those that have not begun."
        if total > 1
        else "It runs on. dr.cancel() drops it if it has not begun."
    )
    return "\n".join([*lines, rest])


def _tell() -> None:
    if not active or active[0].closed is not None or active[0].foreign:
        return
    try:
        text = queued_text(active[0])
    except KeyboardInterrupt:
        # Whoever presses it again wants the prompt, and no figures.
        return
    if text:
        print(text, file=sys.stderr)


def watch_prompt() -> None:
    """Have the prompts of this process say what is queued after Ctrl-C: Python's own, IPython and Jupyter."""
    # A hook that somebody has set since then calls this one, or is meant to stand alone.
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _hook
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        watch_shell(shell)


def watch_shell(shell: Shell) -> None:
    """Have a prompt of IPython, or a kernel of Jupyter, say what is queued after Ctrl-C."""
    if not any(shell is known for known in _shells):
        _shells.append(shell)
        shell.events.register("post_run_cell", _after_cell)


_before: list[object] = []
_shells: list[Shell] = []


def _after_cell(result: Result) -> None:
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        _tell()


def _cut(trace: TracebackType | None) -> None:
    """End a traceback at the user's line: where in this package Ctrl-C has struck says nothing to a user."""
    last: TracebackType | None = None
    while trace is not None:
        if not inside(trace.tb_frame.f_code):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # The module `code` shows a frame of its own to every hook but Python's.
    if trace is not None and trace.tb_frame.f_code.co_filename == code.__file__:
        trace = trace.tb_next
    if issubclass(kind, KeyboardInterrupt):
        _cut(trace)
    before = _before[0]
    assert callable(before)
    before(kind, error, trace)
    # A script that Ctrl-C ends, ends its session.
    if issubclass(kind, KeyboardInterrupt) and (hasattr(sys, "ps1") or sys.flags.interactive):
        _tell()
