"""The process from which a worker forks others, and who uses it."""

from __future__ import annotations

import os
import signal

from distruntime_worker.python import children
from distruntime_worker.python.children import Nursery


def _ended(nursery: Nursery) -> None:
    os.kill(nursery.process.pid, signal.SIGKILL)
    nursery.process.wait()


def test_who_comes_later_closes_a_nursery_that_has_ended_and_others_end_their_children() -> None:
    first = children.enter()
    child = first.fork(["member"], {**os.environ})
    _ended(first)
    second = children.enter()
    try:
        assert second is not first
        assert not first.look()
        # Its processes have ended with it.
        first.end(child)
        assert child.link.fileno() == -1
    finally:
        children.leave(first)
        children.leave(second)
