"""The failures of one worker, by their first causes, and which of them nobody has read; and its warnings.

What workers' kernels have warned of is shown as warnings of this process.
"""

from __future__ import annotations

import builtins
import warnings
from dataclasses import dataclass

from ..wire.messages import Failure
from ..wire.shield import RLock
from ..wire.units import printable
from .line import Call, Line, line_number
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


# So many are noted until somebody waits, with so many characters of each.
_MOST, _MOST_TEXT = 100, 2000
# Python forgets what it has shown of a file where that is more.
_MOST_SHOWN = 1000
# What a worker may name.
_KNOWN = {
    name: cls
    for name, cls in vars(builtins).items()
    if isinstance(cls, type) and issubclass(cls, Warning) and cls is not Warning
}
_UNKNOWN = "<unknown>"


class WorkerWarnings:
    """The warnings of one session's workers that nobody has been shown."""

    def __init__(self) -> None:
        # A signal's handler may read while this thread holds it.
        self._lock = RLock()
        # By class, text, file and line, in the order in which they came.
        self._noted: dict[tuple[type[Warning], str, str, int], None] = {}
        # Python notes here what it has shown, for each file by itself.
        self._shown: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}

    def note(self, kind: str, text: str, line: Line | None) -> None:
        """Note what a worker has said; drop it where too much is noted (whoever reads the socket)."""
        name, number = _UNKNOWN, 0
        if line is not None and line[1] is not None:
            name, number = line[1].code.co_filename, line_number(line[1].code, line[2])
        with self._lock:
            if len(self._noted) < _MOST:
                cls = _KNOWN.get(kind, UserWarning)
                self._noted[cls, printable(text[:_MOST_TEXT]), name, number] = None

    def show(self) -> None:
        """Show what is noted, as this process's filters say; raise it if they say so (a user's thread)."""
        while self._noted:
            with self._lock:
                key = next(iter(self._noted), None)
                if key is None:
                    return
                self._noted.pop(key, None)
            cls, text, name, number = key
            shown = self._shown.setdefault(name, {})
            if len(shown) > _MOST_SHOWN:
                shown.clear()
            warnings.warn_explicit(text, cls, name, number, registry=shown)
