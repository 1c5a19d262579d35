"""Where the program is while a trace is on: a thread looks at its frames some hundred times a second."""

from __future__ import annotations

import queue
import sys
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import final

from ..log.line import inside, line_number, of_a_library

# So many seconds lie between two looks. A look takes the interpreter away from the program for a moment.
_EVERY = 0.005
# So many changes of the line are kept.
_MOST = 200_000


@dataclass(slots=True)
class Stay:
    """How long the program was at a line: of the user's own, and of a library's that it has called.

    While it is `issuing`, it is inside torch or this package.
    """

    file: str
    number: int
    library: str
    issuing: bool
    began: int
    ended: int


@final
class Sampler:
    """Notes at which line one thread is."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self.stays: list[Stay] = []
        # An Event's lock is taken in Python code, where Ctrl-C can come before the lock is given back.
        self._over: SimpleQueue[None] = SimpleQueue()
        self._own: dict[str, bool] = {}
        self._runs = threading.Thread(target=self._run, name="distruntime-trace", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._runs.start()

    def stop(self) -> None:
        """Look no more. Block until the thread has ended."""
        self._over.put(None)
        self._runs.join()

    def _run(self) -> None:
        before = time.perf_counter_ns()
        while True:
            try:
                self._over.get(timeout=_EVERY)
                return
            except queue.Empty:
                pass
            frame, now = sys._current_frames().get(self._thread), time.perf_counter_ns()
            if frame is not None:
                self._look(frame, before, now)
            # Otherwise this variable would hold what the frame's own variables hold.
            del frame
            before = now

    def _look(self, frame: FrameType, before: int, now: int) -> None:
        issuing, found, library = inside(frame.f_code), "", ""
        number = 0
        caller: FrameType | None = frame
        # Where Dynamo has run functions, Python 3.11 once gave a dict as the caller of a frame of another
        # thread.
        while isinstance(caller, FrameType):
            file = caller.f_code.co_filename
            if self._is_own(file):
                # A frame between two lines has no `f_lineno`.
                found, number = file, line_number(caller.f_code, caller.f_lasti)
                break
            if not library and not inside(caller.f_code):
                library = f"{file}:{line_number(caller.f_code, caller.f_lasti)}"
            caller = caller.f_back
        last = self.stays[-1] if self.stays else None
        if (
            last is not None
            and (last.file, last.number, last.issuing) == (found, number, issuing)
            and last.library == library
        ):
            last.ended = now
        elif len(self.stays) < _MOST:
            self.stays.append(Stay(found, number, library, issuing, before, now))

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's own."""
        known = self._own.get(file)
        if known is None:
            known = self._own[file] = not of_a_library(file)
        return known
