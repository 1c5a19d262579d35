"""What a session knows of a worker that this process has started, in whatever way."""

from __future__ import annotations

from typing import Protocol


class WorkerProcess(Protocol):
    """A worker that this process has started."""

    @property
    def pid(self) -> int:
        """The number of its process, on its machine."""

    def poll(self) -> str | None:
        """Return how it has ended; None: it runs."""

    def last_lines(self, count: int) -> str:
        """Return the last lines that it has written."""

    def last_words(self) -> list[str]:
        """Return what it has written in the end that says why."""

    def terminate(self) -> None:
        """Ask it to end. Return at once."""

    def stop(self, timeout: float = ...) -> None:
        """Block until it has ended; one that takes longer than `timeout` seconds is killed."""

    def leave(self) -> None:
        """Let it run on, with the session that it is for."""
