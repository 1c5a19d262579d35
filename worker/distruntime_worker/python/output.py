"""What functions print, log and warn of goes to their master, and all else where it went before."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO

from ..log.watching import hear_others
from .prompt import install_prompt
from .running import current, install_exit

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
