"""What a waiting prompt says at a terminal.

After half a second it says what it waits for and how to leave, after five seconds also how long it has
waited.
"""

from __future__ import annotations

import sys
import threading
import time

from ..log.log import Log
from ..log.node import Node

# The first line comes after so many seconds of silence.
_FIRST = 0.5
# From so many seconds on, the line counts.
_COUNTING = 5.0


class Announcer:
    """Says on standard error what the master waits for.

    The pump calls `show`; the waiting thread only notes that it waits.
    """

    def __init__(self) -> None:
        self._waits: dict[int, tuple[float, Log, str]] = {}
        self._shown = ""
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        """Whether some thread waits."""
        return bool(self._waits)

    def start_waiting(self, node: Log, leave: str) -> None:
        """Note that this thread begins to wait for `node`; `leave` says what Ctrl-C does."""
        self._waits[threading.get_ident()] = time.monotonic(), node, leave

    def stop_waiting(self) -> None:
        """Note that this thread has stopped waiting, and take the line away."""
        self._waits.pop(threading.get_ident(), None)
        if self._shown and not self._waits:
            with self._lock:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = ""

    def show(self) -> None:
        """Show the longest wait if it is long enough to say so."""
        waits = list(self._waits.values())
        if not waits or not sys.stderr.isatty():
            return
        started, node, leave = min(waits, key=lambda wait: wait[0])
        seconds = time.monotonic() - started
        if seconds < _FIRST:
            return
        left = sum(len(flight.line_table) for flight in tuple(node.flights))
        count = f" for {seconds:.0f} s" if seconds >= _COUNTING else ""
        what = f"{left} operation{'s' if left != 1 else ''} under way" if left else "its answer is due"
        if isinstance(node, Node):
            if node.presence.absence is not None:
                what = f"{node.presence.absence.text}; it goes on when there is a connection again"
            if node.presence.connecting:
                what = node.presence.sought
        text = f"waiting for {node}{count}: {what} ({leave})"
        with self._lock:
            if text != self._shown and self._waits:
                sys.stderr.write(f"\r{text}\x1b[K")
                sys.stderr.flush()
                self._shown = text
