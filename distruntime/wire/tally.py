"""Log lines that strangers can cause.

The first few are written, of the others how many they were, or a flood would fill the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

# So many lines are written as they come.
_FIRST = 10
# So many seconds lie between sums.
_EVERY = 60.0


@final
class Tally:
    """Passes lines on to a log: so many, then one a minute that says how many more there were. After a minute
    without any, it begins anew.

    Nothing is lost: each line is written or counted, and `finish` writes the last sum. One thread at a time.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._left = _FIRST
        self._counted = 0
        # This is the last line that was counted.
        self._last = ""
        # The minute began at this time, if there is one.
        self._began: float | None = None

    def note(self, line: str) -> None:
        """Write a line, or count it."""
        self.look()
        if self._began is None:
            self._began = self._clock()
        if self._left:
            self._left -= 1
            self._write(line)
        else:
            self._counted, self._last = self._counted + 1, line

    @property
    def due(self) -> float | None:
        """Seconds until `look` has something to write; None: it has nothing."""
        return (
            None
            if self._began is None or not self._counted
            else max(0.0, self._began + _EVERY - self._clock())
        )

    def look(self) -> None:
        """Write the sum, if its time has come."""
        if self._began is None or (now := self._clock()) < self._began + _EVERY:
            return
        if self._counted:
            self.finish()
            self._began = now
        else:
            self._left, self._began = _FIRST, None

    def finish(self) -> None:
        """Write the sum of what has been counted, if there is any."""
        if self._counted and self._began is not None:
            seconds = self._clock() - self._began
            self._write(
                f"{self._counted} more lines of this kind in {seconds:.0f} s, the last of them: {self._last}"
            )
            self._counted = 0
