"""One moment of the program: what makes one worker wait for another goes into the logs of both at once.

A collective, a copy between nodes, a collective along a mesh's dimension and the end of a group keep a worker
waiting until its fellows get to the same operation. The operations of a session have one order, that of their
moments, and every log has them in it:

    Invariant: whoever puts such an operation into logs holds the session's lock from before the first log
    until after the last, and issues nothing else that waits for another worker in between.

So of all operations that have not run the earliest can run, and no two wait for each other, whatever threads,
groups, meshes and streams they come from. The lock is the one of every log. A lock apart from it does not do:
a mesh that takes its turn sends what the workers' own logs hold, and would send the first half of an
operation whose second half is not issued yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ..errors import DistruntimeError
from ..wire.shield import RLock, shield

T = TypeVar("T")


class TotallyOrdered(Protocol):
    """A session, as it is seen from here."""

    lock: RLock
    # It is True while the thread that holds the lock issues such an operation.
    in_moment: bool


def in_total_order(session: TotallyOrdered, issue: Callable[[], T]) -> T:
    """Call `issue`, which puts one such operation into logs, and return what it returns.

    Ctrl-C waits until the end.

    No class with `__enter__` and `__exit__`: a signal's handler that raises there would leave the lock taken,
    or the mark set. Between the statements here Python runs no handler, but within `issue` itself.
    """
    with shield, session.lock:
        # It was this thread that set the mark: the lock keeps every other one out.
        if session.in_moment:
            raise DistruntimeError(
                "a finalizer or a signal handler runs while an operation of several workers is being issued, "
                "and issues another: their order would differ from worker to worker. "
                "Expected: it copies nothing from node to node and begins no collective"
            )
        session.in_moment = True
        try:
            return issue()
        finally:
            session.in_moment = False
