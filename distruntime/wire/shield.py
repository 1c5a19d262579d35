"""Ctrl-C that waits a moment.

Pyzmq drops the frame that it is handing over when a signal's handler raises.
"""

from __future__ import annotations

import signal
import threading

# The public function makes enums: without them it takes 0.6 us there and back.
from _signal import signal as set_handler  # type: ignore[import-not-found]

_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class Shield:
    """A context in which Ctrl-C is noted, and acts when the outermost one ends.

    Python's handlers run in the main thread only.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._struck: list[tuple[object, ...]] = []
        self._handler: object = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            if self._depth == 0:
                # It first runs the handlers of signals that have come: what Ctrl-C's raises must find nothing
                # begun.
                self._handler = set_handler(_SIGINT, self._note)
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN:
            self._depth -= 1
            if self._depth == 0:
                handler = self._handler
                set_handler(_SIGINT, handler if handler is not None else signal.SIG_DFL)
                if self._struck:
                    struck = self._struck.pop()
                    self._struck.clear()
                    if callable(handler):
                        handler(*struck)

    def _note(self, *struck: object) -> None:
        self._struck.append(struck)


shield = Shield()
