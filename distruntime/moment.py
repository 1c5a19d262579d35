"""One moment of the program: what makes one worker wait for another goes into the logs of both at once.

A collective, a copy between nodes, a collective along a mesh's dimension and the end of a group keep a worker waiting until its fellows
get to the same operation. The operations of a session have one order, that of their moments, and every log has them in it:

    Invariant: whoever puts such an operation into logs holds the session's lock from before the first log until after the last,
    and issues nothing else that waits for another worker in between.

So of all operations that have not run the earliest can run, and no two wait for each other, whatever threads, groups, meshes and
streams they come from. The lock is the one of every log. A lock apart from it does not do: a mesh that takes its turn sends what the
workers' own logs hold, and would send the first half of an operation whose second half is not issued yet.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from .errors import DistruntimeError
from .wire.shield import shield


class Moment:
    """A context manager that one thread is in at a time. Ctrl-C waits until its end."""

    def __init__(self, lock: Any) -> None:
        self._lock: threading.RLock = lock
        self._inside = False

    def __enter__(self) -> None:
        shield.__enter__()
        self._lock.acquire()
        if self._inside:  # by this thread: the lock keeps every other one out
            self._leave()
            raise DistruntimeError(
                "a finalizer or a signal handler runs while an operation of several workers is being issued, and issues another: their "
                "order would differ from worker to worker. Expected: it copies nothing from node to node and begins no collective"
            )
        self._inside = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside = False
        self._leave()

    def _leave(self) -> None:
        self._lock.release()
        shield.__exit__()
