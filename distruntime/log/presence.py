"""Whether a worker is there: reached, unreachable for now, or gone for a known reason."""

from __future__ import annotations

import time


class Absence:
    """A worker cannot be reached. `since` is a time of `time.monotonic`, `clock` tells it to people."""

    def __init__(self, why: str) -> None:
        self.why, self.since, self.clock = why, time.monotonic(), time.strftime("%H:%M:%S")
        # So often nobody was listening where the worker was.
        self.refusals = 0
        # It is True once the user has heard of it.
        self.told = False

    @property
    def text(self) -> str:
        """Say it in words."""
        return f"unreachable since {self.clock}: {self.why}"


class Presence:
    """What is known of a worker's being there, apart from its loss."""

    def __init__(self) -> None:
        # The absence stands here while there is no connection.
        self.absence: Absence | None = None
        # It is True if the worker said farewell before it was lost.
        self.has_left = False
        # It is True if another worker has been asked for in its place. The text says what is waited for.
        self.connecting = False
        self.sought = "another worker is started in its place"
        # It is True if another master has the session now.
        self.taken = False

    def state(self, lost: bool, busy: bool) -> str:
        """Return "ready", "busy", "unreachable", "lost", "left", or "connecting"."""
        if lost:
            return "connecting" if self.connecting else "left" if self.has_left else "lost"
        return "unreachable" if self.absence is not None else "busy" if busy else "ready"
