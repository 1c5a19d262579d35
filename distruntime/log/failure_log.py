"""The failures of one worker: their first causes, and which of them nobody has read."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.messages import Failure
from .line import Call
from .log import Log

_MOST_FAILURES = 1000
_CANCELLED = "distruntime.errors.StreamCancelled"
# What is named so fails on several workers together. The first one's failure says all.
BESIDE = " beside rank 0"

# A failed instruction has its segment, its position, and its number in a program.
Key = tuple[int, int, int]


def key_of(failure: Failure) -> Key:
    """Return what tells a worker's failure from its others."""
    return failure.seq, failure.position, failure.part


@dataclass(frozen=True)
class Cause:
    """A failure on a worker together with the master's line that issued the instruction."""

    failure: Failure
    line: str
    # The line is in this call, which knows its callers.
    call: Call | None = None
    # This is the number of that worker, where it is not the one that told of it.
    where: int | None = None
    # The failure's position is in this log, where that is a mesh's.
    log: Log | None = None


class FailureLog:
    """First causes by segment and position.

    Those that were read stay, for whoever reads the same value again.
    """

    def __init__(self) -> None:
        self._causes: dict[Key, Cause] = {}
        self.unread: dict[Key, Cause] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._causes

    def file(self, key: Key, cause: Cause) -> None:
        """Note a failure that nobody has read. The oldest goes where there are too many."""
        if len(self._causes) >= _MOST_FAILURES:
            self._causes.pop(next(iter(self._causes)))
        self._causes[key] = cause
        # Somebody has asked for a cancellation, so nobody needs to be told of it.
        quiet = cause.failure.kind == _CANCELLED or cause.failure.op.endswith(BESIDE)
        if len(self.unread) < _MOST_FAILURES and not quiet:
            self.unread[key] = cause

    def read(self, key: Key) -> Cause | None:
        """Return the cause of a failure and count it as read; None if it was not filed."""
        self.unread.pop(key, None)
        return self._causes.get(key)
