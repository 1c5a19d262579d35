"""How far the workers of a log have come: what has run, what is under way, and whose line that is."""

from __future__ import annotations

import bisect

from . import log as sending
from .line import Line, line_text
from .log import Log
from .segment import Flight, line_at


def land(log: Log, flight: Flight[Log]) -> None:
    """Take note that the oldest segment of this log has run.

    Call under the log's lock, and `go_on` afterwards.
    """
    log.acknowledged = flight.end
    log.nbytes -= flight.nbytes
    log.heavy -= flight.weight
    if not log.asynchronous:
        log.executed = flight.end
    log.checks.confirm(flight.checks)


def go_on(log: Log) -> None:
    """Open the window again, and send what has gathered, if that is enough. Call under the log's lock."""
    log.look_at_window()
    if log.active and log.words and len(log.words) + log.weight > log.enough:
        log.flush(gathered=True)


def queued(log: Log) -> int:
    """Return how many operations are issued and not known to have run."""
    with log.lock:
        return len(log.line_table) + under_way(log)


def under_way(log: Log) -> int:
    """Return how many operations are sent and not known to have run."""
    return sum(_rest(log, flight) for flight in tuple(log.flights))


def _rest(log: Log, flight: Flight[Log]) -> int:
    """Return how many operations of a segment are not known to have run.

    A large segment takes half a minute, so the acknowledgements alone would not do.
    """
    lines = flight.line_table
    # With several streams, the worker tells where one of them is, and the others may be behind it.
    if flight.log is not log or log.order is not None or not lines or lines[0][0] > log.told:
        return len(lines)
    if flight.end <= log.told:
        return 0
    return len(lines) - bisect.bisect_right([line[0] for line in lines], log.told)


def until_room(log: Log) -> int:
    """Return how many operations must run until the window has room.

    The segments land in order, and the window opens when enough of them have.
    """
    nbytes, heavy, count = log.nbytes, log.heavy, 0
    for flight in tuple(log.flights):
        if flight.log is log:
            nbytes -= flight.nbytes
            heavy -= flight.weight
            count += _rest(log, flight)
            if log.base - flight.end + heavy <= sending.WINDOW and nbytes <= sending.PAYLOAD_WINDOW:
                break
    return count


def issued_at(log: Log, position: int) -> str:
    """Return the line that issued the instruction at a position that has not run; nothing if it has."""
    line = line_issued(log, position)
    return "" if line is None else line_text(line)


def line_issued(log: Log, position: int) -> Line | None:
    """Return what `issued_at` does as a line; None if the instruction has run."""
    with log.lock:
        for table in (
            *(flight.line_table for flight in log.flights if flight.log is log),
            log.line_table,
        ):
            line = line_at(table, position)
            if line is not None:
                return line
    return None
