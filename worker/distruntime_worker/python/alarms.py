"""Something that is to happen at a time, unless it is called off: one thread for the process.

The thread begins with the first alarm. What an alarm does must be short, and must not block.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count

log = logging.getLogger("distruntime.worker")

# So many alarms that were called off may lie among the others before they are removed.
_MOST_OFF = 64


class Alarm:
    """What happens at a time, on the clock of `time.monotonic`."""

    __slots__ = ("act", "at", "number")

    def __init__(self, at: float, number: int, act: Callable[[], None]) -> None:
        self.at, self.number = at, number
        # It is None when it was called off, or has happened.
        self.act: Callable[[], None] | None = act

    def __lt__(self, other: Alarm) -> bool:
        return (self.at, self.number) < (other.at, other.number)


class Alarms:
    """The alarms of the process, and the thread that waits for the next of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[Alarm] = []
        self._off = 0
        self._numbers = count().__next__
        self._begun = False

    def after(self, seconds: float, act: Callable[[], None]) -> Alarm:
        """Have something happen in so many seconds."""
        alarm = Alarm(time.monotonic() + seconds, self._numbers(), act)
        with self._changed:
            heapq.heappush(self._due, alarm)
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._run, name="alarms", daemon=True).start()
            elif self._due[0] is alarm:
                self._changed.notify()
        return alarm

    def call_off(self, alarm: Alarm) -> None:
        """Let an alarm not happen, unless it is happening now."""
        with self._changed:
            if alarm.act is not None:
                alarm.act = None
                self._off += 1
            if self._off > _MOST_OFF and 2 * self._off > len(self._due):
                self._due = [one for one in self._due if one.act is not None]
                heapq.heapify(self._due)
                self._off = 0

    def _run(self) -> None:
        while True:
            act = self._next()
            try:
                act()
            except Exception:
                log.exception("an alarm met an error; the others go on")
            # Otherwise this variable would hold what has ended.
            del act

    def _next(self) -> Callable[[], None]:
        """Block until something is due; return it."""
        with self._changed:
            while True:
                left = self._due[0].at - time.monotonic() if self._due else None
                if left is not None and left <= 0:
                    alarm = heapq.heappop(self._due)
                    act, alarm.act = alarm.act, None
                    if act is not None:
                        return act
                    self._off -= 1
                else:
                    self._changed.wait(left)


alarms = Alarms()
