"""What a master has issued that has left, while it is finished for the master that follows in its session.

The new session's threads begin behind it. An instruction that does not end in time costs what stands behind
it: that is dropped, so what it would have written is poisoned, in what is published too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import final

import torch

from distruntime.errors import StreamCancelled
from distruntime.wire.deadlines import FINISH

from ..values.streams import Stream
from .session import Session

log = logging.getLogger("distruntime.worker")

# A thread has so many seconds at most to come to the end of what was dropped.
_STUCK = 5.0
# Other workers may be behind, and ask this one's session something for so many seconds after its end.
_LINGER = 10.0


@final
class Finishing:
    """A session whose master has left and has a successor. The reader calls it.

    One of the session's threads calls `then` when nothing is left to run, before its successor's begin.
    """

    def __init__(self, session: Session, seconds: float, then: Callable[[], None]) -> None:
        self.session, self._seconds = session, seconds
        self._seen: list[int] = []
        self._since = time.monotonic()
        self._dropped = self._gone = False
        session.finish(then)

    def look(self) -> bool:
        """Drop what does not get on. Return whether the session is to be closed."""
        session, now = self.session, time.monotonic()
        if session.broken is not None and not session.over.is_set():
            session.spoil(session.broken)
            session.over.set()
            return True
        position = session.executor.progress.position
        seen = [position(stream).position for stream in session.executor.state.all_streams()]
        if seen != self._seen or session.waits_for_another():
            self._seen, self._since = seen, now
        if session.over.is_set():
            return now > self._since + _LINGER
        if not self._dropped and now > self._since + self._seconds:
            runs = session.executor.status().running or "what was issued"
            self.drop(f"{runs} did not end within {self._seconds:g} s ({FINISH.variable}, at the worker)")
        elif self._dropped and not self._gone and now > self._since + min(_STUCK, self._seconds):
            self._gone = True
            with session.executor.state.gate:
                rows = session.alive.copy()
            for row in rows.items():
                threading.Thread(target=self._step_over, args=row, name="drops", daemon=True).start()
        return False

    def drop(self, because: str) -> None:
        """Drop what has not begun, and interrupt what runs."""
        log.warning("session of master %s is not finished: %s", self.session.master, because)
        self._dropped, self._since = True, time.monotonic()
        text = f"its master had left the session, another one has come, and {because}"
        self.session.executor.drop(StreamCancelled(f"dropped before it ran: {text}"), f"as {text}")

    def _step_over(self, stream: Stream, thread: int) -> None:
        """Drop a stream's rest in place of its thread, which does not come back from an instruction."""
        executor = self.session.executor
        try:
            with torch.no_grad():
                place = executor.progress.stretch(thread)
                if place is not None:
                    executor.run_stretch(stream, *place)
                self.session.run_queue(stream)
        except Exception as error:
            # Nobody knows what would have been written.
            self.session.spoil(f"{type(error).__name__}: {error}")
        self.session.ended(stream)
