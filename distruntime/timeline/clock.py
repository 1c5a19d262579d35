"""How far a worker's clock is ahead of this process's, estimated by round trips."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DistruntimeError
from ..log.node import Node
from ..session.requests import Request
from ..session.session import Session
from ..wire.messages import AskClock, ClockTimes

# The quickest of so many round trips tells most, and so many seconds are enough for them.
_TRIPS, _ENOUGH = 12, 0.5


class Reading(NamedTuple):
    """A look at a worker's clock. Times are in nanoseconds.

    In the middle of the round trip, `at` was the time here, and the worker's clock was `ahead` by so much. It
    can be wrong by half the round trip. `calendar` says by how much its calendar is ahead of ours.
    """

    at: int
    ahead: int
    trip: int
    calendar: int


@dataclass(frozen=True)
class Clock:
    """A worker's clock between a look at it before a trace and one after."""

    first: Reading
    last: Reading

    @property
    def trip(self) -> int:
        """The quicker round trip, in nanoseconds."""
        return min(self.first.trip, self.last.trip)

    @property
    def steady(self) -> bool:
        """Whether both looks can be of one clock that is always ahead by the same."""
        return abs(self.last.ahead - self.first.ahead) <= (self.first.trip + self.last.trip) // 2

    @property
    def uncertainty(self) -> int:
        """By how many nanoseconds a time of the worker's may be wrong here."""
        return (self.trip if self.steady else max(self.first.trip, self.last.trip)) // 2

    def here(self, there: int) -> int:
        """Return the time here when the worker's clock showed `there`."""
        first, last = self.first, self.last
        if self.steady:
            return there - min(first, last, key=lambda reading: reading.trip).ahead
        # One of the two clocks runs faster, so what it is ahead by grows with the time.
        gone = (there - first.ahead - first.at) / (last.at - first.at)
        return there - first.ahead - round(min(max(gone, 0.0), 1.0) * (last.ahead - first.ahead))


def read_clock(session: Session, node: Node, timeout: float) -> Reading | None:
    """Return a look at a worker's clock, by the quickest of some round trips; None where nobody answers.

    Block for `timeout` seconds at most.
    """
    now = time.monotonic()
    deadline, enough = now + timeout, now + _ENOUGH
    found: list[Reading] = []
    for _ in range(_TRIPS):
        if found and time.monotonic() > enough:
            break
        reading = _round_trip(session, node, deadline - time.monotonic())
        if reading is None:
            break
        found.append(reading)
    return min(found, key=lambda reading: reading.trip, default=None)


def _round_trip(session: Session, node: Node, timeout: float) -> Reading | None:
    came: list[int] = []

    def hear(_: Request[ClockTimes]) -> None:
        # Another thread may read the reply, and wake this one later.
        came.append(time.perf_counter_ns())

    try:
        asked_at = time.perf_counter_ns()
        asked = session.ask(node, AskClock)
        asked.when_done(hear)
        if not session.result(asked, max(timeout, 0.0), quietly=True):
            session.requests.discard(asked)
            return None
    except DistruntimeError:
        return None
    if asked.cause is not None or asked.lost is not None:
        return None
    trip = came[0] - asked_at
    middle = asked_at + trip // 2
    ours = time.time_ns() - time.perf_counter_ns() + middle
    return Reading(middle, asked.value.steady - middle, trip, asked.value.calendar - ours)
