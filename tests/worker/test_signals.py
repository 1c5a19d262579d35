"""Waits for other nodes, as a worker keeps them: messages in, messages out, and nothing that stays behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from distruntime.wire.messages import AWAIT, Cancel, OpenStream, Segment, Signal
from distruntime_worker.log.waits import Waits
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session.executor import Executor
from distruntime_worker.values.streams import Stream, Work
from processes import until


class Worker:
    """An executor without a socket, and the one stream of it that waits."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.executor = Executor(
            Devices(),
            lambda message, payload=None, copy=True: self.sent.append(message),
            lambda node, message: None,
        )
        self.stream: Stream = self.executor.open(OpenStream(1, "cpu", 0, -1))
        self.position = self.seq = 0
        self.runs: list[threading.Thread] = []

    def wait_for(self, numbers: range, seconds: float | None) -> None:
        """Issue waits for signals, and begin to run them."""
        words = [word for number in numbers for word in (AWAIT, number, seconds, "late")]
        self.seq += 1
        work = Work(Segment(self.seq, self.position, [], words, [[1, len(words)]]), [], 1)
        self.position += len(words)
        self.executor.works.append(work)
        run = threading.Thread(target=self.executor.run_stretch, args=(self.stream, work, 0, len(words)))
        run.start()
        self.runs.append(run)

    def signal(self, numbers: range, reason: str = "") -> None:
        """Bring these signals."""
        for number in numbers:
            self.executor.signal(Signal(number, reason))

    def ended(self) -> None:
        """Wait until all that was issued has run."""
        for run in self.runs:
            run.join(30)
            assert not run.is_alive()

    def kept(self) -> int:
        """Return how many entries the tables of signals have."""
        (waits,) = (o for o in gc.get_objects() if type(o) is Waits and o._state is self.executor.state)
        return sum(len(table) for table in vars(waits).values() if isinstance(table, (dict, set, list)))


@pytest.mark.parametrize("order", ["waits first", "signals first"])
@pytest.mark.parametrize("reason", ["", "its node is lost"])
def test_nothing_is_kept_of_signals_that_were_waited_for(order: str, reason: str) -> None:
    worker = Worker()
    steps: list[Callable[[], None]] = [
        lambda: worker.wait_for(range(1, 9), None),
        lambda: worker.signal(range(1, 9), reason),
    ]
    for step in steps if order == "waits first" else reversed(steps):
        step()
    worker.ended()
    assert worker.kept() == 0
    assert len(worker.sent[0].failures) == (8 if reason else 0)


@pytest.mark.parametrize("seconds", [0.0, None], ids=["timed out", "cancelled"])
def test_nothing_is_kept_of_waits_that_ended_before_their_signal(seconds: float | None) -> None:
    worker = Worker()
    worker.wait_for(range(1, 9), seconds)
    if seconds is None:  # the first stands in it, the others have not begun
        until(lambda: worker.executor.status()[1] == "a wait for another node")
        worker.executor.cancel(Cancel(1, worker.position, False, ""))
    worker.ended()
    assert worker.kept() <= 8, "what a late signal needs to be known for one"
    worker.signal(range(1, 9))
    assert worker.kept() == 0
    worker.wait_for(range(9, 10), None)
    worker.signal(range(9, 10))
    worker.ended()
    assert worker.kept() == 0


def test_nothing_is_kept_of_signals_whose_waits_are_dropped_later() -> None:
    worker = Worker()
    worker.signal(range(1, 9))
    worker.executor.cancel(Cancel(1, 32, False, ""))
    worker.wait_for(range(1, 9), None)
    worker.ended()
    assert worker.kept() == 0
