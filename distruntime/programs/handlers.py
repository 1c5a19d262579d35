"""Signal handlers of Python that run in the midst of a recording: what they do is no part of the program.

Python runs them in the main thread, between any two of its instructions. While a call is recorded there,
another handler stands in the place of each, which calls it apart from the recording. It waits for a moment
where something is begun or ended: an exception of the handler would leave that half done.
"""

from __future__ import annotations

import inspect
import signal
import threading

# The public function makes enums.
from _signal import getsignal as handler_of  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Callable

from ..log.tape import recorded

_SIGNALS = tuple(map(int, signal.valid_signals()))
_MAIN = threading.main_thread().ident
Handler = Callable[[int, object], object]


class Handlers:
    """The signal handlers of one recording."""

    def __init__(self) -> None:
        # They wait while this is True, and run as they are when all is over.
        self._wait, self._over = True, False
        self._waiting: list[tuple[Handler, int, object]] = []
        self._instead: list[tuple[int, Handler, Handler]] = []

    def begin(self) -> None:
        """Stand in their places, where this is the main thread. They wait until `run`."""
        recorded.struck, recorded.mixed = "", False
        if threading.get_ident() != _MAIN:
            return
        for number in _SIGNALS:
            own = handler_of(number)
            if callable(own):
                instead = self._apart(own)
                self._instead.append((number, own, instead))
                set_handler(number, instead)

    def run(self) -> None:
        """Let them run from now on, and those that have waited at once."""
        self._wait = False
        self._run_waiting()

    def wait(self) -> None:
        """Let them wait from now on."""
        self._wait = True

    def end(self) -> None:
        """Let them stand where they stood. Those that have waited run now."""
        try:
            for number, own, instead in self._instead:
                # The function may have put another one there.
                if handler_of(number) is instead:
                    set_handler(number, own)
        finally:
            self._over = True
            self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting:
            own, number, frame = self._waiting.pop(0)
            self._run(own, number, frame)

    def _apart(self, own: Handler) -> Handler:
        def apart(number: int, frame: object) -> None:
            if self._wait and not self._over:
                self._waiting.append((own, number, frame))
            else:
                self._run(own, number, frame)

        return apart

    def _run(self, own: Handler, number: int, frame: object) -> None:
        if self._over:
            own(number, frame)
            return
        # What is no Python, such as the one of Ctrl-C, changes nothing.
        if not inspect.isbuiltin(own):
            recorded.struck = str(getattr(own, "__name__", type(own).__name__))
        before = recorded.name, recorded.covered, recorded.aside
        try:
            recorded.name, recorded.covered, recorded.aside = "", False, True
            own(number, frame)
        # What looks at a call's reads catches its own errors in the user's stack. It must let this one pass.
        except Exception as error:
            recorded.thrown = id(error)
            raise
        finally:
            recorded.name, recorded.covered, recorded.aside = before
