"""Streams and events: torch.cuda's concurrency, on any device of any node.

A stream is an in-order queue of one device. An event is a point in a stream, which other streams of any node,
and this process, can wait for. Nothing here waits for a worker but `synchronize`, `query` and `elapsed_time`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import torch

from ..errors import NotSupportedError, PlacementError, UsageError, WaitTimeout, without_our_frames
from ..log.current import DeviceLike, current_streams, enter_stream, leave_stream
from ..log.handle import Handle, Place, Residence, new_value
from ..log.issue import Between, covered, issue
from ..log.line import Line, line_text, user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog, workers_of
from ..log.node import Node
from ..log.order import Order
from ..log.spec import NO_TENSOR, spec
from ..log.tape import cuts
from ..operators.proxies import wrap
from ..operators.signatures import template
from ..operators.transfer import item
from ..session.requests import Request
from ..session.session import active_session, session_of_log
from ..session.spelling import named, on_node, require_alone
from ..session.stalls import note_wait
from ..session.timeouts import checked, deadline_in, left_until
from ..tensors.tensor import DistributedTensor
from ..wire.messages import AWAIT, MARK, STAMP, AskPassed, Notify, OpenStream, Signal
from .cancel import drop

# Each device has at most so many streams of one priority, as on CUDA. More Stream objects share them.
_MOST = 32
_TIME = spec((), (), 0, torch.float64)

T = TypeVar("T")
Where = int | str | torch.device | None


def _residence(node: Where, device: DeviceLike | None) -> Residence:
    places = active_session().places
    for place, name, other in ((node, "device", device), (device, "node", node)):
        found = named(places, place)
        if found is not None:
            require_alone(place, name, other)
            return found
    if isinstance(node, (str, torch.device)):
        raise PlacementError(
            "a stream belongs to a device of a node: "
            f'node=1, device="cuda:0", or x.device of a remote tensor; got {node}'
        )
    if node is None and device is None:
        return places.current()
    current = places.current().place
    index = current.node if node is None else node
    like = current.local_device if index == current.node else None
    return places.residence(on_node(places, index, device, like=like))


def has_streams(log: Log) -> bool:
    """Whether a log can have streams: no stream is of several GPUs of one node."""
    several = isinstance(log, MeshLog) and any(len(ranks) > 1 for ranks in log.ranks.values())
    return not (log.asynchronous and several)


def _expect(value: T, kind: type[object], name: str) -> T:
    """Return `value`; raise `UsageError` unless it is what users know as `distruntime.name`."""
    if not isinstance(value, kind):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"this takes a distruntime.{name}, got {got}; torch's own streams and events are this process's"
        )
    return value


def _order_of(log: Log) -> Order:
    """Return the order among a log's streams.

    From the first call on, its instructions go the way that knows streams.
    """
    order: Order | None = log.order
    if order is None:
        with log.lock:
            if log.order is None:
                log.order = Order(log)
                session_of_log(log).places.hide(log)
            order = log.order
    assert order is not None
    return order


class Stream:
    """An in-order queue of instructions on one device of a node, which runs beside the others.

    As a context it is current, and with it its node and device.

    Args:
        node: the node's number, a place, or the `device` of a remote tensor. By default it is the current
            node. A place and a tensor's `device` name the device, too, so `device` is not given besides.
        device: "cpu", "cuda:1" or a number (-1 is the CPU). By default a stream on the current node is on the
            current device. A stream on another node is on its first GPU, or on its CPU if it has no GPU.
        priority: as in `torch.cuda.Stream`: lower numbers run first, on GPUs.

    Returns at once. Raises `PlacementError` where the node or device is not there.
    """

    @without_our_frames
    def __init__(self, node: Where = None, device: DeviceLike | None = None, priority: int = 0) -> None:
        if type(priority) is not int or not -(1 << 31) <= priority < 1 << 31:
            raise UsageError(
                f"a stream's priority is a small whole number, as in torch.cuda.Stream; got {priority!r}"
            )
        self.residence, self.priority = _residence(node, device), priority
        log, name = self.residence.node, self.residence.place.local_device
        if not has_streams(log):
            raise NotSupportedError(
                f"a stream on {self.residence} would be of several GPUs of one node, which no stream is; "
                "use one member per node"
            )
        log.session.require_open()
        log.require_alive()
        order = _order_of(log)
        with log.lock:
            pool = order.pools.setdefault((name, priority), [])
            idle = order.idle.setdefault((name, priority), [])
            if not idle and len(pool) < _MOST:
                self.number = order.open()
                pool.append(self.number)
                openings = log.openings() if isinstance(log, MeshLog) else [(self.residence.worker, name, -1)]
                for worker, where, whose in openings:
                    session_of_log(log).post(worker, OpenStream(self.number, where, priority, whose))
            elif idle:
                self.number = idle.pop()
            else:
                self.number = pool[0]
                pool.append(pool.pop(0))
        # The number goes there when this object dies. A device's default stream keeps its own.
        self._idle: Callable[[int], None] | None = idle.append

    def __del__(self) -> None:
        # This runs after a failed __init__, too. It only appends, as the collector may run it inside any
        # lock.
        idle = getattr(self, "_idle", None)
        if idle is not None:
            idle(self.number)

    @classmethod
    def _numbered(cls, residence: Residence, number: int) -> Stream:
        made = cls.__new__(cls)
        made.residence, made.number, made.priority, made._idle = residence, number, 0, None
        return made

    @property
    def place(self) -> Place:
        """The node and device that it belongs to."""
        return self.residence.place

    @property
    def node(self) -> int:
        """The number of its node."""
        return self.place.node

    @property
    def device(self) -> torch.device:
        """Its place as a torch device, as `x.device` of the tensors there."""
        return self.residence.device

    @property
    def stream_id(self) -> int:
        """Its number on its node; 0 is the default stream of each device."""
        return self.number

    @property
    def device_index(self) -> int:
        """The number of its place, as `device.index` says it."""
        return self.residence.number

    @property
    def device_type(self) -> int:
        """torch's number of the device type that "remote" is."""
        # PrivateUse1 has this number in c10/core/DeviceType.h.
        return 20

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.residence, self.number) == (other.residence, other.number)

    def __hash__(self) -> int:
        return hash((id(self.residence), self.number))

    def __repr__(self) -> str:
        return f"<distruntime.Stream {self.number} on {self.place}>"

    def __enter__(self) -> Stream:
        self.check()
        enter_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        leave_stream(self)

    def check(self) -> Log:
        """Return its log; raise what is wrong where its session is closed or its node is lost."""
        log = self.residence.node
        log.session.require_open()
        log.require_alive()
        return log

    def wait_event(self, event: Event, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for `event`.

        Return at once; see `Event.wait`.
        """
        _expect(event, Event, "Event").wait(self, timeout)

    def wait_stream(self, stream: Stream, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for all that `stream` has been given.

        Return at once.

        The other stream may be on any node.
        """
        self.wait_event(_expect(stream, Stream, "Stream").record_event(), timeout)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, after all that this stream has been given. Return it at once."""
        event = Event() if event is None else _expect(event, Event, "Event")
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all that this stream has been given has run. Asks the worker: one round trip."""
        log = self.check()
        with log.lock:
            position = _end(log, self.number)
        return _has_passed(log, self.number, position)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all that this stream has been given has run; raise the first unread failure.

        Only failures of its node count. Raises `WaitTimeout` after `timeout` seconds. Ctrl-C leaves the
        session usable.
        """
        self.record_event().synchronize(timeout)

    def is_capturing(self) -> bool:
        """Return False: no graph records what a stream is given. Optimizers ask this in a take-over."""
        return False

    def keep(self, handle: Handle) -> None:
        """Keep a value until what this stream has been given until then has run: `tensor.record_stream`."""
        log = self.check()
        if log is not handle.place.node:
            raise PlacementError(
                f"a tensor on {handle.place.place} is not used by {self!r}, which is another node's"
            )
        order = _order_of(log)
        with log.lock:
            order.note_use(handle, self.number)

    def cancel(self) -> None:
        """Drop what this stream has been given and has not begun. Return at once.

        Reading a dropped result raises `StreamCancelled`. A function of yours that runs is interrupted, see
        `dr.cancel`. An operator that runs, ends. What is issued afterwards runs.
        Waits that it stands in are dropped too.
        """
        drop(self.check(), [self.number])


def _end(log: Log, stream: int) -> int:
    """Return the position of the last instruction that a stream has been given. The caller holds the lock."""
    return log.base + len(log.words) if log.order is None else log.order.last[stream]


def _has_passed(log: Log, stream: int, position: int) -> bool:
    """Ask each worker of a log whether a stream has run up to a position: one round trip."""
    log.flush()
    session = session_of_log(log)
    asked = [
        session.ask(worker, AskPassed, [log.stream_on_wire(stream), position]) for worker in workers_of(log)
    ]
    return all([session.value(request) for request in asked])


class Event:
    """A point in a stream, which other streams, of any node, and this process can wait for.

    Args:
        enable_timing: whether `elapsed_time` may be asked: `record` then notes the time on the worker.
        blocking: taken for torch's sake.
        interprocess: refuses, as events cross nodes by themselves.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            raise UsageError(
                "an interprocess event is CUDA's way to other processes of one machine; "
                "Event.wait crosses nodes as it is"
            )
        self.enable_timing = enable_timing
        self._recorded: _Recorded | None = None

    def __repr__(self) -> str:
        recorded = f"recorded on {self._recorded.stream!r}" if self._recorded else "not recorded"
        return f"<distruntime.Event {recorded}>"

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all that `stream` (default: the current one) has been given.

        Return at once.
        """
        stream = current_stream() if stream is None else _expect(stream, Stream, "Stream")
        self._noted("record", stream, None, lambda line: self._record(stream, line))

    def _noted(self, kind: str, stream: Stream, timeout: float | None, act: Callable[[Line], None]) -> None:
        """Call `act`. A program that is recorded now calls it again in each replay."""
        line = user_line()
        if not cuts():
            return act(line)
        log = stream.check()
        with covered(line) as note:
            act(line)
            sets = kind == "record"
            logs = [log] if sets or self._recorded is None else [log, self._recorded.stream.residence.node]

            def again(given: Sequence[Handle], at: Line) -> Sequence[Handle]:
                act(at)
                return []

            key = log.index, stream.number, timeout, self.enable_timing
            mine, other = (self, None) if sets else (None, self)
            note(Between(kind, key, logs, [], [], [], again, mine, other), [])

    def _record(self, stream: Stream, line: Line) -> None:
        log, home = stream.check(), stream.residence
        stamp: Handle | None = None
        with log.lock:
            if self.enable_timing:
                stamp = new_value(NO_TENSOR, home)
                with stream:
                    issue([STAMP, stamp.ref, home.place.local_device], [stamp], (), (), home, line)
            if log.order is None:
                # A free may come behind the word meanwhile, so its own entry tells where it stands.
                position = log.append([MARK], line)[0] if log.asynchronous else _end(log, stream.number)
            else:
                if log.asynchronous:
                    log.order.put(stream.number, [MARK], line)
                position = _end(log, stream.number)
        self._recorded = _Recorded(stream, position, line, stamp)

    def wait(self, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Make what is issued to `stream` (default: the current one) from now on wait for the event.

        Return at once.

        The stream may be on any node. An event that was never recorded waits for nothing, as in torch. If the
        event has not come after `timeout` seconds of the stream's own waiting, the stream goes on and the
        next read or `synchronize` raises `WaitTimeout`. A timeout that is no number from 0 on raises
        `UsageError`, as wherever one is taken.
        """
        timeout = checked(timeout)
        stream = current_stream() if stream is None else _expect(stream, Stream, "Stream")
        self._noted("wait", stream, timeout, lambda line: self._wait(stream, timeout, line))

    def _wait(self, stream: Stream, timeout: float | None, line: Line) -> None:
        recorded, here = self._recorded, stream.check()
        if recorded is None:
            return
        there = recorded.stream.check()
        text = "" if timeout is None else f"{stream!r} waited {timeout:g} s for an event that {recorded.text}"
        if there is here:
            if recorded.stream.number != stream.number:
                order = _order_of(here)
                with here.lock:
                    order.wait(stream.number, recorded.stream.number, recorded.position, text, timeout, line)
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
                _have_signalled(recorded, source, worker, number)
            if len(others) < len(workers_of(here)):
                session_of_log(here).post(source, Signal(number, ""))
            with here.lock:
                words = [AWAIT, number, timeout, text]
                if here.order is None:
                    here.append(words, line)
                else:
                    here.order.put(stream.number, words, line)

    def query(self) -> bool:
        """Return whether all before the event has run; True if it was never recorded.

        Asks the worker: one round trip.
        """
        recorded = self._recorded
        if recorded is None:
            return True
        return _has_passed(recorded.stream.check(), recorded.stream.number, recorded.position)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all before the event has run; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds, naming the lines that recorded and that wait. Ctrl-C
        leaves the session usable.
        """
        timeout = checked(timeout)
        recorded = self._recorded
        if recorded is None:
            return
        log = recorded.stream.check()
        session = session_of_log(log)
        started = time.perf_counter()
        deadline = deadline_in(timeout)
        requests = [recorded.ask(worker) for worker in workers_of(log)]
        for request in requests:
            left = left_until(deadline)
            if not session.result(request, left):
                for late in requests:
                    session.requests.discard(late)
                raise WaitTimeout(
                    f"{recorded.stream!r} did not get to the event within {timeout:g} s\n"
                    f"  the event {recorded.text}\n"
                    f"  waited for at {line_text(user_line())}\n"
                    "  the stream goes on; wait again, or drop its work: stream.cancel()"
                )
        note_wait("explicit synchronize", started)
        for request in requests:
            session.raise_for(request)
            request.node.file_early(request.value or [])
        for request in requests:
            session.raise_unread(request.node)

    def when_done(self, then: Callable[[Request[object]], None]) -> None:
        """Call `then` when all before the event has run, in whichever thread hears of it. Return at once."""
        recorded = self._recorded
        if recorded is None:
            raise UsageError("an event that was never recorded has nothing to wait for")
        log = recorded.stream.check()
        workers = workers_of(log)
        if len(workers) == 1:
            recorded.ask(workers[0], quiet=True).when_done(then)
            return
        left = [len(workers)]

        def one_more(request: Request[object]) -> None:
            with log.lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                then(request)

        for worker in workers:
            recorded.ask(worker, quiet=True).when_done(one_more)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events of one node, by its own clock.

        Block until both have happened.
        """
        start, end = self._recorded, _expect(end_event, Event, "Event")._recorded
        if not (self.enable_timing and end_event.enable_timing):
            raise UsageError(
                "elapsed_time needs events that note the time: "
                "distruntime.Event(enable_timing=True), both of them"
            )
        if start is None or end is None or start.stamp is None or end.stamp is None:
            raise UsageError(
                "elapsed_time needs both events recorded: start.record(), the work, end.record()"
            )
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


class _Recorded:
    """Where and by which line an event was recorded."""

    __slots__ = ("line", "position", "stamp", "stream")

    def __init__(self, stream: Stream, position: int, line: Line, stamp: Handle | None) -> None:
        self.stream, self.position, self.line, self.stamp = stream, position, line, stamp

    @property
    def text(self) -> str:
        return f"was recorded at {line_text(self.line)}"

    def ask(self, worker: Node, quiet: bool = False) -> Request[list[object] | None]:
        """Ask a worker to say when the event has happened. Return at once.

        The answer tells what failed. With `quiet` it does not, as nobody would raise that.
        """
        log = self.stream.residence.node
        if log is not worker:
            log.flush()
        after = [log.stream_on_wire(self.stream.number), self.position]
        return session_of_log(worker).fetch(worker, 0, after, "passed", {"quiet": True} if quiet else {})


def _have_signalled(recorded: _Recorded, there: Node, here: Node, number: int) -> None:
    """Have one worker tell another when an event has come."""
    meeting = session_of_log(here).meeting
    if meeting is not None and meeting.done and meeting.has_route(there, here):
        log = recorded.stream.residence.node
        meeting.remember(number, here, there, recorded.position, log)
        stream = log.stream_on_wire(recorded.stream.number)
        session_of_log(there).post(there, Notify(stream, recorded.position, here.index, number))
    else:
        recorded.ask(there, quiet=True).when_done(_Forward(here, number))


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


@without_our_frames
def default_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to when no other is current."""
    return Stream._numbered(_residence(node, device), 0)


@without_our_frames
def current_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to now, in this thread or asyncio task."""
    residence = _residence(node, device)
    entered = current_streams.get().get((residence.place.node, residence.place.local_device))
    if isinstance(entered, Stream) and entered.residence.node is residence.node:
        return entered
    return Stream._numbered(residence, 0)


def kept_number(residence: Residence) -> int:
    """Return the number of a new stream. No other Stream object gets it, until the log ends."""
    made = Stream(residence.device)
    made._idle = None
    return made.number


def numbered_stream(residence: Residence, number: int) -> Stream:
    """Return the stream that a number stands for. Its end gives nothing back."""
    return Stream._numbered(residence, number)


class StreamContext:
    """Sets a stream, and with it the current node and device, for a `with` block; see `stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


@without_our_frames
def stream(stream: Stream | None) -> StreamContext:
    """Return a context in which instructions on the stream's device go to it, and new tensors to its device.

    None changes nothing. As in `torch.cuda.stream`, operations on other devices go to these devices' current
    streams.
    """
    return StreamContext(None if stream is None else _expect(stream, Stream, "Stream"))


@without_our_frames
def set_implicit_waits(enabled: bool) -> None:
    """Say whether instructions wait by themselves for other streams' writes and reads; True at first.

    False is CUDA's own rules. It counts for what is issued from now on, in the whole session. A value that is
    not made yet is waited for all the same.
    """
    for node in active_session().nodes:
        if node.failed is None:
            _order_of(node).implicit = enabled


@without_our_frames
def synchronize(
    node: int | None = None, device: DeviceLike | None = None, timeout: float | None = None
) -> None:
    """Block until a node, or every node, has run everything issued so far; raise the first unread failure.

    With `device`, only what was issued to this device's streams of the node (default: the current one)
    counts. Raises `WaitTimeout` after `timeout` seconds. Ctrl-C leaves the session usable.
    """
    session, timeout = active_session(), checked(timeout)
    if device is not None:
        synchronize_device(_residence(node, device), timeout)
        return
    if node is not None:
        session.places.devices(node)
    deadline = deadline_in(timeout)
    for candidate in session.nodes:
        if node is None and candidate.failed is not None:
            continue
        if node is None or candidate.index == node:
            left = left_until(deadline)
            if not session.synchronize(candidate, left):
                raise WaitTimeout(
                    f"{candidate} has not run everything within {timeout:g} s\n"
                    f"  waited for at {line_text(user_line())}\n"
                    "  it goes on; wait again, or see what it does: dr.nodes()"
                )


def synchronize_device(residence: Residence, timeout: float | None) -> None:
    """Block until the streams of a device, or of a mesh, have run what they have; see `synchronize`."""
    log, deadline = residence.node, deadline_in(timeout)
    numbers = [0]
    if log.order is not None:
        pools = log.order.pools.items()
        own = residence.place.local_device
        numbers += [number for (name, _), pool in pools if name == own for number in pool]
    for number in numbers:
        left = left_until(deadline)
        Stream._numbered(residence, number).synchronize(left)
