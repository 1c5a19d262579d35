"""Streams and events: torch.cuda's concurrency, on any device of any node.

A stream is an in-order queue of one device. An event is a point in a stream, which other streams of any node,
and this process, can wait for. Nothing here waits for a worker but `synchronize`, `query` and `elapsed_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from ..errors import NotSupportedError, PlacementError, UsageError, without_our_frames
from ..log.current import DeviceLike, current_streams, enter_stream, leave_stream
from ..log.handle import Handle, Place, Residence, new_value
from ..log.issue import Between, covered, issue
from ..log.line import Line, user_line
from ..log.log import Log
from ..log.mesh_log import MeshLog
from ..log.spec import NO_TENSOR
from ..log.tape import cuts
from ..session.requests import Request
from ..session.session import session_of_log
from ..session.spelling import Where, home_of_stream
from ..session.timeouts import checked
from ..wire.messages import MARK, STAMP, OpenStream
from .cancel import drop
from .order import has_streams, order_of
from .point import Point, elapsed, has_passed, make_wait

# Each device has at most so many streams of one priority, as on CUDA. More Stream objects share them.
_MOST = 32

T = TypeVar("T")


def expect(value: T, kind: type[object], name: str) -> T:
    """Return `value`; raise `UsageError` unless it is what users know as `distruntime.name`."""
    if not isinstance(value, kind):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"this takes a distruntime.{name}, got {got}; torch's own streams and events are this process's"
        )
    return value


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
        self.residence, self.priority = home_of_stream(node, device), priority
        log, name = self.residence.node, self.residence.place.local_device
        if not has_streams(log):
            raise NotSupportedError(
                f"a stream on {self.residence} would be of several GPUs of one node, which no stream is; "
                "use one member per node"
            )
        log.session.require_open()
        log.require_alive()
        order = order_of(log)
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
        expect(event, Event, "Event").wait(self, timeout)

    def wait_stream(self, stream: Stream, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for all that `stream` has been given.

        Return at once.

        The other stream may be on any node.
        """
        self.wait_event(expect(stream, Stream, "Stream").record_event(), timeout)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, after all that this stream has been given. Return it at once."""
        event = Event() if event is None else expect(event, Event, "Event")
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all that this stream has been given has run. Asks the worker: one round trip."""
        log = self.check()
        with log.lock:
            position = _end(log, self.number)
        return has_passed(log, self.number, position)

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
        order = order_of(log)
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
        self._recorded: Point | None = None

    def __repr__(self) -> str:
        recorded = f"recorded on {self._recorded.stream!r}" if self._recorded else "not recorded"
        return f"<distruntime.Event {recorded}>"

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all that `stream` (default: the current one) has been given.

        Return at once.
        """
        stream = current_stream() if stream is None else expect(stream, Stream, "Stream")
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
        self._recorded = Point(stream, position, line, stamp)

    def wait(self, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Make what is issued to `stream` (default: the current one) from now on wait for the event.

        Return at once.

        The stream may be on any node. An event that was never recorded waits for nothing, as in torch. If the
        event has not come after `timeout` seconds of the stream's own waiting, the stream goes on and the
        next read or `synchronize` raises `WaitTimeout`. A timeout that is no number from 0 on raises
        `UsageError`, as wherever one is taken.
        """
        timeout = checked(timeout)
        stream = current_stream() if stream is None else expect(stream, Stream, "Stream")
        self._noted("wait", stream, timeout, lambda line: make_wait(stream, self._recorded, timeout, line))

    def query(self) -> bool:
        """Return whether all before the event has run; True if it was never recorded.

        Asks the worker: one round trip.
        """
        recorded = self._recorded
        if recorded is None:
            return True
        return has_passed(recorded.stream.check(), recorded.stream.number, recorded.position)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all before the event has run; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds, naming the lines that recorded and that wait. Ctrl-C
        leaves the session usable.
        """
        timeout = checked(timeout)
        if self._recorded is not None:
            self._recorded.synchronize(timeout)

    def when_done(self, then: Callable[[Request[object]], None]) -> None:
        """Call `then` when all before the event has run, in whichever thread hears of it. Return at once."""
        if self._recorded is None:
            raise UsageError("an event that was never recorded has nothing to wait for")
        self._recorded.when_done(then)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events of one node, by its own clock.

        Block until both have happened.
        """
        start, end = self._recorded, expect(end_event, Event, "Event")._recorded
        if not (self.enable_timing and end_event.enable_timing):
            raise UsageError(
                "elapsed_time needs events that note the time: "
                "distruntime.Event(enable_timing=True), both of them"
            )
        return elapsed(start, end)


@without_our_frames
def stream(stream: Stream | None) -> AbstractContextManager[object]:
    """Return a context in which instructions on the stream's device go to it, and new tensors to its device.

    None changes nothing. As in `torch.cuda.stream`, operations on other devices go to these devices' current
    streams.
    """
    return nullcontext() if stream is None else expect(stream, Stream, "Stream")


@without_our_frames
def default_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to when no other is current."""
    return Stream._numbered(home_of_stream(node, device), 0)


@without_our_frames
def current_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to now, in this thread or asyncio task."""
    residence = home_of_stream(node, device)
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
