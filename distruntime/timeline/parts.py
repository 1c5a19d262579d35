"""What workers bring of a trace, by their clocks: when each instruction, fetch and kernel began and ended.

Round trips tell how far a worker's clock is ahead of this process's. Also the user's lines of a log's
instructions, as the slices of a trace show them.
"""

from __future__ import annotations

import bisect
import os
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from ..errors import DistruntimeError, ProtocolError
from ..log.line import Call, Line, Replayed, as_key, code_text, line_number, of_a_library
from ..log.node import Node
from ..session.requests import Request
from ..session.session import Session
from ..wire.messages import (
    AskClock,
    ClockTimes,
    StartTrace,
    StopTrace,
    TakeTrace,
    TracedStep,
    TracedThread,
    TraceKept,
)

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


# A slice shows so many of the library's functions that it is in: the innermost ones.
_INNERMOST = 5


class Stretch(NamedTuple):
    """The lines of the instructions between two positions of a log."""

    start: int
    end: int
    lines: Sequence[Line]


class Lines:
    """The lines of one log, by position."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = sorted(stretches, key=lambda stretch: stretch.end)
        self._ends = [stretch.end for stretch in self._stretches]

    def at(self, position: int) -> Line | None:
        """Return the line of the instruction at a position, if it is known."""
        k = bisect.bisect_right(self._ends, position)
        if k == len(self._ends) or position < self._stretches[k].start:
            return None
        lines = self._stretches[k].lines
        i = bisect.bisect_right(lines, position, key=lambda line: line[0])
        return lines[i] if i < len(lines) else None


class Texts:
    """What slices say of lines, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Call, int], dict[str, str]] = {}
        # Equal codes of different files are one key.
        self._texts: dict[tuple[str, CodeType, int], tuple[str, str]] = {}

    def of(self, line: Line | None) -> Mapping[str, str]:
        """Return the line of the user's own file with its code, and the library's functions in between."""
        if line is None or line[1] is None:
            return {}
        key = line[1], line[2]
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(*key)
        return found

    def short(self, line: Line | None) -> str:
        """Return "train.py:12"."""
        return self.of(line).get("line", "an unknown line")

    def _made(self, innermost: Call, offset: int) -> dict[str, str]:
        call, at, layers = innermost, offset, list[str]()
        while of_a_library(call.code.co_filename) and call.outer is not None:
            layers.append(self._layer(call.code, at))
            call, at = call.outer, call.at
        if of_a_library(call.code.co_filename):
            # No line of a user's own has led there.
            call, at, layers = innermost, offset, []
        text, source = self._text(call.code, at)
        found = {"line": text, "code": source}
        if layers:
            found["layer"] = " > ".join(reversed(layers[:_INNERMOST]))
        if isinstance(innermost, Replayed):
            found["program"] = innermost.name
        return found

    def _text(self, code: CodeType, offset: int) -> tuple[str, str]:
        key = code.co_filename, as_key(code), offset
        found = self._texts.get(key)
        if found is None:
            text, _, source = code_text(code, offset).partition("   ")
            found = self._texts[key] = text, source
        return found

    def _layer(self, code: CodeType, offset: int) -> str:
        # Python has the qualified name from 3.11 on.
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        return f"{name} ({os.path.basename(code.co_filename)}:{line_number(code, offset)})"


# A row has so many numbers, a pair two, and each number so many bytes.
_ROW, _PAIR, _NUMBER = 6, 2, 8
# No worker brings more than this.
_MOST = 1 << 29
# It is behind all bytes that a worker can have.
_BEHIND = 1 << 62


class Row(NamedTuple):
    """What ran: a step, in the log of a mesh (-1: the worker's own), at a position, from when to when.

    What still runs has ended at -1. Times are of the worker's clock, in nanoseconds.
    """

    step: TracedStep
    mesh: int
    position: int
    sequence: int
    began: int
    ended: int


@dataclass(frozen=True)
class Brought:
    """What a worker has brought: rows by thread, and when each segment arrived."""

    threads: list[tuple[TracedThread, list[Row]]]
    arrived: dict[int, int]
    dropped: int
    why: str


def begin(session: Session, nodes: list[Node], most: int, timeout: float) -> dict[Node, str]:
    """Let workers note what they run. Return why some do not, by worker.

    Block until all have answered, for `timeout` seconds at most.
    """
    asked: dict[Node, Request[None]] = {}
    missing: dict[Node, str] = {}
    for node in nodes:
        try:
            asked[node] = session.ask(node, StartTrace, most)
        except DistruntimeError as error:
            missing[node] = str(error)
    deadline = time.monotonic() + timeout
    for node, request in asked.items():
        why = _answered(session, request, deadline)
        if why:
            missing[node] = why
    return missing


def take(session: Session, node: Node, timeout: float) -> Brought | str:
    """Return what a worker has noted, or why there is nothing. Block for `timeout` seconds at most."""
    deadline = time.monotonic() + timeout
    try:
        stopped = session.ask(node, StopTrace)
        why = _answered(session, stopped, deadline)
        if why:
            return why
        kept, data = stopped.value, bytearray()
        if kept.nbytes > _MOST:
            return f"it says that its trace has {kept.nbytes:,} bytes"
        while len(data) < kept.nbytes:
            chunk = session.ask(node, TakeTrace, len(data))
            why = _answered(session, chunk, deadline)
            if why or not chunk.value:
                return why or "its trace ended too early"
            data += chunk.value
        return _read(kept, bytes(data))
    except DistruntimeError as error:
        return str(error)


def forget(session: Session, node: Node) -> None:
    """Let a worker note no more, and drop what it has noted. Return at once."""
    try:
        for asked in (session.ask(node, StopTrace), session.ask(node, TakeTrace, _BEHIND)):
            session.requests.discard(asked)
    except DistruntimeError:
        # It is lost, or the session is over, and its notes with it.
        return


def _answered(session: Session, request: Request[object], deadline: float) -> str:
    """Block until a worker has answered; return why there is no answer, or nothing."""
    if not session.result(request, max(0.0, deadline - time.monotonic()), quietly=True):
        session.requests.discard(request)
        return "it did not answer in time"
    if request.cause is not None:
        return request.cause.failure.text
    return request.lost or ""


def _read(kept: TraceKept, data: bytes) -> Brought:
    """Return the rows that a worker has sent as bytes; raise `ProtocolError` where they are none."""
    rows = sum(thread.rows for thread in kept.threads)
    if (rows * _ROW + kept.arrived * _PAIR) * _NUMBER != len(data):
        raise ProtocolError(f"a trace of {rows} rows in {len(data)} bytes makes no sense")
    numbers = array("q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    threads, i = list[tuple[TracedThread, list[Row]]](), 0
    for thread in kept.threads:
        found = []
        for k in range(i, i + thread.rows * _ROW, _ROW):
            step, *rest = numbers[k : k + _ROW]
            if not 0 <= step < len(kept.steps):
                raise ProtocolError(f"a trace names the step {step}, and there are {len(kept.steps)}")
            found.append(Row(kept.steps[step], *rest))
        threads.append((thread, found))
        i += thread.rows * _ROW
    pairs = numbers[i:]
    return Brought(threads, dict(zip(pairs[::2], pairs[1::2])), kept.dropped, kept.why)
