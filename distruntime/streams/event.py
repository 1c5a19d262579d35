"""Events: points in streams, which other streams of any node, and this process, can wait for.

Nothing here waits for a worker except what says so: `synchronize`, `query` and `elapsed_time`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..errors import UsageError, WaitTimeout
from ..log.handle import Handle, Storage, next_ref
from ..log.issue import issue
from ..log.line import Line, line_text, user_line
from ..log.node import Node
from ..log.spec import NO_TENSOR, spec
from ..operators.proxies import wrap
from ..operators.signatures import template
from ..operators.transfer import item
from ..session.requests import Request
from ..session.session import active_session
from ..session.stalls import note_wait
from ..session.timeouts import checked
from ..tensors.tensor import DistributedTensor
from ..wire.messages import AWAIT, STAMP, AskPassed, Notify, Signal
from .queue import Queue, entered, expect, ordered

_TIME = spec((), (), 0, torch.float64)


def _current() -> Queue:
    residence = active_session().places.current()
    return entered(residence) or Queue(residence, 0)


class Event:
    """A point in a stream, which other streams, of any node, and this process can wait for.

    Args:
        enable_timing: whether `elapsed_time` may be asked: `record` then notes the time on the worker.
        blocking, interprocess: taken for torch's sake; `interprocess` refuses, as events cross nodes by themselves.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise UsageError(
                "an interprocess event is CUDA's way to other processes of one machine; Event.wait crosses nodes as it is"
            )
        self.enable_timing = enable_timing
        self._recorded: _Recorded | None = None

    def __repr__(self) -> str:
        return f"<distruntime.Event {f'recorded on {self._recorded.stream!r}' if self._recorded else 'not recorded'}>"

    def record(self, stream: Queue | None = None) -> None:
        """Record the event after all that `stream` (default: the current one) has been given. Return at once."""
        stream = _current() if stream is None else expect(stream, Queue, "Stream")
        node = stream.check()
        line = user_line()
        stamp: Handle | None = None
        with node.lock:
            if self.enable_timing:
                stamp = Handle(next_ref(), NO_TENSOR, stream.residence, Storage(NO_TENSOR))
                with stream:
                    issue([STAMP, stamp.ref], [stamp], (), (), stream.residence, line)
            if node.order is None:
                position = node.base + len(node.words)
            else:
                position = node.order.last[stream.number]
                node.order.cut(stream.number)
        self._recorded = _Recorded(stream, position, line, stamp)

    def wait(self, stream: Queue | None = None, timeout: float | None = None) -> None:
        """Make what is issued to `stream` (default: the current one) from now on wait for the event, on whatever node. Return at once.

        An event that was never recorded waits for nothing, as in torch. If the event has not come after `timeout` seconds of the
        stream's own waiting, the stream goes on and the next read or `synchronize` raises `WaitTimeout`. A timeout that is no number
        from 0 on raises `UsageError`, as wherever one is taken.
        """
        timeout = checked(timeout)
        recorded, stream = self._recorded, _current() if stream is None else expect(stream, Queue, "Stream")
        here = stream.check()
        if recorded is None:
            return
        there = recorded.stream.check()
        text = "" if timeout is None else f"{stream!r} waited {timeout:g} s for an event that {recorded.text}"
        if there is here:
            if recorded.stream.number != stream.number:
                order = ordered(here)
                with here.lock:
                    order.wait(
                        stream.number, recorded.stream.number, recorded.position, text, timeout, user_line()
                    )
            return
        there.flush()
        for source in there.workers():
            number = here.session.signals()
            others = [worker for worker in here.workers() if worker is not source]
            if not others:  # one worker, whose logs keep the order among each other
                continue
            # First who will send the signal: if the other node is lost just now, or Ctrl-C comes, nothing must be waiting for it.
            for worker in others:
                self._have_signalled(recorded, source, worker, number)
            if len(others) < len(here.workers()):
                here.session.post(source, Signal(number, ""))
            with here.lock:
                words = [AWAIT, number, timeout, text]
                if here.order is None:
                    here.append(words, user_line())
                else:
                    here.order.put(stream.number, words, user_line())

    def _have_signalled(self, recorded: _Recorded, there: Node, here: Node, number: int) -> None:
        """Have one worker tell another when the event has come."""
        meeting = here.session.meeting
        if meeting.done:
            log = recorded.stream.residence.node
            meeting.remember(number, here, there, recorded.position, log)
            wire = log.stream_on_wire(recorded.stream.number)
            there.session.post(there, Notify(wire, recorded.position, here.index, number))
        else:
            recorded.ask(there, quiet=True).when_done(_Forward(here, there, number))

    def query(self) -> bool:
        """Return whether all before the event has run; True if it was never recorded. Asks the worker: one round trip."""
        recorded = self._recorded
        if recorded is None:
            return True
        node = recorded.stream.check()
        node.flush()
        where = [node.stream_on_wire(recorded.stream.number), recorded.position]
        asked = [node.session.ask(worker, AskPassed, where) for worker in node.workers()]
        return all([bool(node.session.value(request)) for request in asked])

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all before the event has run; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds, naming the lines that recorded and that wait. Ctrl-C leaves the session usable.
        """
        timeout = checked(timeout)
        recorded = self._recorded
        if recorded is None:
            return
        node = recorded.stream.check()
        started = time.perf_counter()
        deadline = None if timeout is None else time.monotonic() + timeout
        requests = [recorded.ask(worker) for worker in node.workers()]
        for request in requests:
            if not node.session.result(
                request, None if deadline is None else max(0.0, deadline - time.monotonic())
            ):
                for late in requests:
                    node.session.requests.forget(late)
                raise WaitTimeout(
                    f"{recorded.stream!r} did not get to the event within {timeout:g} s\n  the event {recorded.text}\n"
                    f"  waited for at {line_text(user_line())}\n  the stream goes on; wait again, or drop its work: stream.cancel()"
                )
        note_wait("explicit synchronize", started)
        for request in requests:
            node.session.raise_for(request)
            request.node.file_early(request.value or [])
        for request in requests:
            node.session.raise_unread(request.node)

    def when_done(self, then: Callable[[Request], None]) -> None:
        """Call `then` when all before the event has run, in whichever thread hears of it. Return at once."""
        recorded = self._recorded
        if recorded is None:
            raise UsageError("an event that was never recorded has nothing to wait for")
        node = recorded.stream.check()
        workers = node.workers()
        if len(workers) == 1:
            recorded.ask(workers[0], quiet=True).when_done(then)
            return
        left = [len(workers)]

        def one_more(request: Request) -> None:
            with node.lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                then(request)

        for worker in workers:
            recorded.ask(worker, quiet=True).when_done(one_more)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events of one node, by its own clock. Block until both have happened."""
        start, end = self._recorded, expect(end_event, Event, "Event")._recorded
        if not (self.enable_timing and end_event.enable_timing):
            raise UsageError(
                "elapsed_time needs events that note the time: distruntime.Event(enable_timing=True), both of them"
            )
        if start is None or end is None or start.stamp is None or end.stamp is None:
            raise UsageError(
                "elapsed_time needs both events recorded: start.record(), the work, end.record()"
            )
        node = end.stream.check()
        if start.stream.check() is not node:
            raise UsageError(
                f"elapsed_time of events on {start.stream.place} and {end.stream.place}: two nodes have two clocks. Record both on one node"
            )
        stamps = [wrap(DistributedTensor, start.stamp), wrap(DistributedTensor, end.stamp)]
        with node.lock:
            number, words = template(
                None, DistributedTensor, stamps, {}, 1, node, name="distruntime::elapsed_time"
            )
            home = end.stream.residence
            result = Handle(next_ref(), _TIME, home, Storage(_TIME))
            with end.stream:
                issue([number, *words, result.ref], [result], [start.stamp, end.stamp], (), home, user_line())
        return float(item(result, "explicit elapsed_time"))


class _Recorded:
    """Where and by which line an event was recorded."""

    __slots__ = ("line", "position", "stamp", "stream")

    def __init__(self, stream: Queue, position: int, line: Line, stamp: Handle | None) -> None:
        self.stream, self.position, self.line, self.stamp = stream, position, line, stamp

    @property
    def text(self) -> str:
        return f"was recorded at {line_text(self.line)}"

    def ask(self, worker: Node, quiet: bool = False) -> Request:
        """Ask a worker to say when the event has happened, and what failed, unless `quiet`: nobody would raise it. Return at once."""
        log = self.stream.residence.node
        if log is not worker:
            log.flush()
        after = [log.stream_on_wire(self.stream.number), self.position]
        request: Request = worker.session.fetch(worker, 0, after, "passed", {"quiet": True} if quiet else {})
        return request


class _Forward:
    """Sends the signal of an event to the node that waits for it: in the first moments, before the workers have met."""

    def __init__(self, here: Node, there: Node, number: int) -> None:
        self.here, self.there, self.number = here, there, number

    def __call__(self, request: Request) -> None:
        if self.here.failed is None and self.here.session.closed is None:
            reason = (
                ""
                if request.lost is None
                else f"the node of an event that was waited for is lost: {request.lost}"
            )
            self.here.session.post(self.here, Signal(self.number, reason))
