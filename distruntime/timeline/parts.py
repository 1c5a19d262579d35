"""What workers bring of a trace: when each instruction, fetch and kernel began and ended, by their clocks."""

from __future__ import annotations

import sys
import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DistruntimeError, ProtocolError
from ..log.node import Node
from ..session.requests import Request
from ..session.session import Session
from ..wire.messages import StartTrace, StopTrace, TakeTrace, TracedStep, TracedThread, TraceKept

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
