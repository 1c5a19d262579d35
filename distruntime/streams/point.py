"""A point in a stream, and who waits until the stream has got there: this process, or another stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import UsageError, WaitTimeout
from ..log.current import StreamOfPlace
from ..log.handle import Handle, new_value
from ..log.issue import issue
from ..log.line import Line, line_text, user_line
from ..log.log import Log
from ..log.mesh_log import workers_of
from ..log.node import Node
from ..log.spec import spec
from ..operators.proxies import wrap
from ..operators.signatures import template
from ..operators.transfer import item
from ..session.fetching import ask_value, raise_unread
from ..session.meeting import Meeting
from ..session.requests import Request
from ..session.session import session_of_log
from ..session.stalls import note_wait
from ..session.timeouts import deadline_in, left_until
from ..tensors.tensor import DistributedTensor
from ..wire.messages import AWAIT, AskPassed, Notify, Signal
from .order import order_of

_TIME = spec((), (), 0, torch.float64)


class Queue(StreamOfPlace, Protocol):
    """A stream, as it is seen from here."""

    def check(self) -> Log:
        """Return its log; raise what is wrong where its session is closed or its node is lost."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class Point:
    """Where and by which line an event was recorded."""

    __slots__ = ("line", "position", "stamp", "stream")

    def __init__(self, stream: Queue, position: int, line: Line, stamp: Handle | None) -> None:
        self.stream, self.position, self.line, self.stamp = stream, position, line, stamp

    @property
    def text(self) -> str:
        """The line that recorded it, for people."""
        return f"was recorded at {line_text(self.line)}"

    def ask(self, worker: Node, quiet: bool = False) -> Request[list[object] | None]:
        """Ask a worker to say when the event has happened. Return at once.

        The answer tells what failed. With `quiet` it does not, as nobody would raise that.
        """
        log = self.stream.residence.node
        if log is not worker:
            log.flush()
        after = [log.stream_on_wire(self.stream.number), self.position]
        return ask_value(session_of_log(worker), worker, 0, after, "passed", {"quiet": True} if quiet else {})

    def synchronize(self, timeout: float | None) -> None:
        """Block until the stream has got there; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds.
        """
        log = self.stream.check()
        session = session_of_log(log)
        started = time.perf_counter()
        deadline = deadline_in(timeout)
        requests = [self.ask(worker) for worker in workers_of(log)]
        for request in requests:
            left = left_until(deadline)
            if not session.result(request, left):
                for late in requests:
                    session.requests.discard(late)
                raise WaitTimeout(
                    f"{self.stream!r} did not get to the event within {timeout:g} s\n"
                    f"  the event {self.text}\n"
                    f"  waited for at {line_text(user_line())}\n"
                    "  the stream goes on; wait again, or drop its work: stream.cancel()"
                )
        note_wait("explicit synchronize", started)
        for request in requests:
            session.raise_for(request)
            request.node.file_early(request.value or [])
        for request in requests:
            raise_unread(session, request.node)

    def when_done(self, then: Callable[[Request[object]], None]) -> None:
        """Call `then` when the stream has got there, in whichever thread hears of it. Return at once."""
        log = self.stream.check()
        workers = workers_of(log)
        if len(workers) == 1:
            self.ask(workers[0], quiet=True).when_done(then)
            return
        left = [len(workers)]

        def one_more(request: Request[object]) -> None:
            with log.lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                then(request)

        for worker in workers:
            self.ask(worker, quiet=True).when_done(one_more)


def has_passed(log: Log, stream: int, position: int) -> bool:
    """Ask each worker of a log whether a stream has run up to a position: one round trip."""
    log.flush()
    session = session_of_log(log)
    asked = [
        session.ask(worker, AskPassed, [log.stream_on_wire(stream), position]) for worker in workers_of(log)
    ]
    return all([session.value(request) for request in asked])


def elapsed(start: Point | None, end: Point | None) -> float:
    """Return the milliseconds between two points of one node, by its own clock. Block until it gets there."""
    if start is None or end is None or start.stamp is None or end.stamp is None:
        raise UsageError("elapsed_time needs both events recorded: start.record(), the work, end.record()")
    log = end.stream.check()
    if start.stream.check() is not log:
        raise UsageError(
            f"elapsed_time of events on {start.stream.place} and {end.stream.place}: "
            "two nodes have two clocks. Record both on one node"
        )
    stamps = [wrap(DistributedTensor, start.stamp), wrap(DistributedTensor, end.stamp)]
    with log.lock:
        number, words = template(
            None, DistributedTensor, stamps, {}, 1, log, name="distruntime::elapsed_time"
        )
        home = end.stream.residence
        result = new_value(_TIME, home)
        with end.stream:
            issue([number, *words, result.ref], [result], [start.stamp, end.stamp], (), home, user_line())
    return float(item(result, "explicit elapsed_time"))


def make_wait(stream: Queue, point: Point | None, timeout: float | None, line: Line) -> None:
    """Make what is issued to `stream` from now on wait for a point, if there is one. Return at once."""
    here = stream.check()
    if point is None:
        return
    there = point.stream.check()
    text = "" if timeout is None else f"{stream!r} waited {timeout:g} s for an event that {point.text}"
    if there is here:
        if point.stream.number != stream.number:
            order = order_of(here)
            with here.lock:
                order.wait(stream.number, point.stream.number, point.position, text, timeout, line)
        return
    there.flush()
    for source in workers_of(there):
        number = session_of_log(here).signals()
        others = [worker for worker in workers_of(here) if worker is not source]
        # The logs of one worker keep the order among each other.
        if not others:
            continue
        # This settles first who will send the signal. If the other node is lost just now, or Ctrl-C
        # comes, nothing must be waiting for it.
        for worker in others:
            _have_signalled(point, source, worker, number)
        if len(others) < len(workers_of(here)):
            session_of_log(here).post(source, Signal(number, ""))
        with here.lock:
            words = [AWAIT, number, timeout, text]
            if here.order is None:
                here.append(words, line)
            else:
                here.order.put(stream.number, words, line)


def _have_signalled(point: Point, there: Node, here: Node, number: int) -> None:
    """Have one worker tell another when an event has come."""
    meeting = session_of_log(here).meeting
    if isinstance(meeting, Meeting) and meeting.done and meeting.has_route(there, here):
        log = point.stream.residence.node
        meeting.remember(number, here, there, point.position, log)
        stream = log.stream_on_wire(point.stream.number)
        session_of_log(there).post(there, Notify(stream, point.position, here.index, number))
    else:
        point.ask(there, quiet=True).when_done(_Forward(here, number))


class _Forward:
    """Sends the signal of an event to the node that waits for it.

    It is for the first moments, before the workers have met, and for those that have no route.
    """

    def __init__(self, here: Node, number: int) -> None:
        self.here, self.number = here, number

    def __call__(self, request: Request[object]) -> None:
        if self.here.failed is None and self.here.session.closed is None:
            reason = (
                ""
                if request.lost is None
                else f"the node of an event that was waited for is lost: {request.lost}"
            )
            session_of_log(self.here).post(self.here, Signal(self.number, reason))
