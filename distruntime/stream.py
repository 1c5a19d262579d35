"""Streams and events: torch.cuda's concurrency, on any device of any node.

A stream is an in-order queue of one device; an event is a point in it. Nothing here waits for a worker except what says so:
`synchronize`, `query` and `elapsed_time`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from .context import DeviceLike, current_streams, device_name, enter_stream, leave_stream
from .errors import PlacementError, UsageError, WaitTimeout
from .first import template, wrap
from .group import groups_of
from .handle import Handle, Place, Residence, Storage, next_ref
from .issue import issue
from .line import user_line
from .node import Line, Node, line_text
from .order import Order
from .requests import Request
from .session import active_session
from .spec import NO_TENSOR, spec
from .stall import note_wait
from .tensor import DistributedTensor
from .transfer import item
from .wire.messages import AWAIT, STAMP, Cancel, Notify, OpenStream, Signal

_MOST = 32  # streams for each device and priority, as on CUDA: more Stream objects share them

Where = int | Place | torch.device | None
T = TypeVar("T")


def ordered(node: Node) -> Order:
    """Return the order among a node's streams; from the first call on, its instructions go the way that knows streams."""
    order: Order | None = node.order
    if order is None:
        with node.lock:
            if node.order is None:
                node.order = Order(node)
                node.session.hide_signatures(node)
            order = node.order
    assert order is not None
    return order


def _expect(value: T, kind: type[Any]) -> T:
    """Return `value`, which should be a stream or an event of this package, or raise `UsageError`."""
    if not isinstance(value, kind):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(f"this takes a distruntime.{kind.__name__}, got {got}; torch's own streams and events are this process's")
    return value


def _residence(node: Where, device: DeviceLike | None) -> Residence:
    session = active_session()
    if isinstance(node, torch.device):
        if node.type not in ("remote", "lazy"):
            raise PlacementError(
                f'a stream belongs to a device of a node: node=1, device="cuda:0", or x.device of a remote tensor; got {node}'
            )
        return session.numbered(node.index)
    if isinstance(node, Place):
        return session.residence(node)
    if node is None and device is None:
        return session.current()
    index = session.current().place.node if node is None else node
    have = session.devices(index)
    if device is None:
        name = session.current().place.device if index == session.current().place.node else "cuda:0" if "cuda:0" in have else "cpu"
    else:
        name = device_name(device)
    return session.residence(Place(index, name))


class Stream:
    """An in-order queue of instructions on one device of a node, which runs beside the others.

    Args:
        node: the node's number, a `Place`, or the `device` of a remote tensor; default: the current place.
        device: "cpu", "cuda:1" or a number (-1 is the CPU); default: the node's `cuda:0`, if it has one, else its CPU.
        priority: as in `torch.cuda.Stream`: lower numbers run first, on GPUs.

    Returns at once. Raises `PlacementError` where the node or device is not there.
    """

    def __init__(self, node: Where = None, device: DeviceLike | None = None, priority: int = 0) -> None:
        if type(priority) is not int or not -(1 << 31) <= priority < 1 << 31:
            raise UsageError(f"a stream's priority is a small whole number, as in torch.cuda.Stream; got {priority!r}")
        self.residence = _residence(node, device)
        self.priority = priority
        node_ = self.residence.node
        node_.session.require_open()
        node_.require_alive()
        order = ordered(node_)
        with node_.lock:
            key = self.place.device, priority
            pool, idle = order.pools.setdefault(key, []), order.idle.setdefault(key, [])
            if not idle and len(pool) < _MOST:
                self.number = order.open()
                pool.append(self.number)
                node_.session.post(node_, OpenStream(self.number, self.place.device, priority))
            elif idle:
                self.number = idle.pop()
            else:
                self.number = pool[0]
                pool.append(pool.pop(0))
        self._idle: Callable[[int], None] | None = idle.append

    def __del__(self) -> None:
        # Also after a failed __init__. Only an append, as the collector may run this inside any lock.
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.residence, self.number) == (other.residence, other.number)

    def __hash__(self) -> int:
        return hash((id(self.residence), self.number))

    def __repr__(self) -> str:
        return f"<distruntime.Stream {self.number} on {self.place}>"

    def __enter__(self) -> Stream:
        self._check()
        enter_stream(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave_stream(self)

    def _check(self) -> Node:
        """Return the node, if its session is open and it lives; raise the session's or the node's own error if not."""
        node = self.residence.node
        node.session.require_open()
        node.require_alive()
        return node

    def wait_event(self, event: Event, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for `event`. Return at once; see `Event.wait`."""
        _expect(event, Event).wait(self, timeout)

    def wait_stream(self, stream: Stream, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for all that `stream` has been given, on whatever node. Return at once."""
        self.wait_event(_expect(stream, Stream).record_event(), timeout)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, after all that this stream has been given. Return it at once."""
        event = Event() if event is None else _expect(event, Event)
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all that this stream has been given has run. Asks the worker: one round trip."""
        return self.record_event().query()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all that this stream has been given has run; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds. Ctrl-C leaves the session usable.
        """
        self.record_event().synchronize(timeout)

    def keep(self, handle: Handle) -> None:
        """What `tensor.record_stream(stream)` does: the value is freed after what this stream has been given until then."""
        node = self._check()
        if node is not handle.place.node:
            raise PlacementError(f"a tensor on {handle.place.place} is not used by {self!r}, which is another node's")
        order = ordered(node)
        with node.lock:
            order.note_use(handle, self.number)

    def cancel(self) -> None:
        """Drop what this stream has been given and has not begun: reading its results raises `StreamCancelled`. Return at once.

        What runs, ends; what is issued afterwards runs. Waits that it stands in are dropped too.
        """
        node = self._check()
        with node.lock:
            node.flush()
            position = node.base if node.order is None else node.order.cancelled(self.number)
        node.session.post(node, Cancel(self.number, position))


def default_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to when no other is current."""
    return Stream._numbered(_residence(node, device), 0)


def current_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to now, in this thread or asyncio task."""
    residence = _residence(node, device)
    entered: Stream | None = current_streams.get().get((residence.place.node, residence.place.device))
    return entered if entered is not None and entered.residence.node is residence.node else Stream._numbered(residence, 0)


class StreamContext:
    """Sets a stream, and with it the current node and device, for a `with` block; see `stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


def stream(stream: Stream | None) -> StreamContext:
    """Return a context in which instructions on the stream's device go to it, and new tensors to its device. None changes nothing.

    As `torch.cuda.stream`; operations on other devices go to these devices' current streams, as always.
    """
    return StreamContext(None if stream is None else _expect(stream, Stream))


class Event:
    """A point in a stream, which other streams, of any node, and this process can wait for.

    Args:
        enable_timing: whether `elapsed_time` may be asked: `record` then notes the time on the worker.
        blocking, interprocess: taken for torch's sake; `interprocess` refuses, as events cross nodes by themselves.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise UsageError("an interprocess event is CUDA's way to other processes of one machine; Event.wait crosses nodes as it is")
        self.enable_timing = enable_timing
        self._recorded: _Recorded | None = None

    def __repr__(self) -> str:
        return f"<distruntime.Event {f'recorded on {self._recorded.stream!r}' if self._recorded else 'not recorded'}>"

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all that `stream` (default: the current one) has been given. Return at once."""
        stream = current_stream() if stream is None else _expect(stream, Stream)
        node = stream._check()
        line = user_line()
        stamp: Handle | None = None
        with node.lock:
            if self.enable_timing:
                stamp = Handle(next_ref(), NO_TENSOR, stream.residence, Storage(NO_TENSOR))
                with stream:
                    issue([STAMP, stamp.ref], [stamp], (), (), stream.residence, line)
            if node.order is None:
                position = node.base + len(node.log)
            else:
                position = node.order.last[stream.number]
                node.order.cut(stream.number)
        self._recorded = _Recorded(stream, position, line, stamp)

    def wait(self, stream: Stream | None = None, timeout: float | None = None) -> None:
        """Make what is issued to `stream` (default: the current one) from now on wait for the event, on whatever node. Return at once.

        An event that was never recorded waits for nothing, as in torch. If the event has not come after `timeout` seconds of the
        stream's own waiting, the stream goes on and the next read or `synchronize` raises `WaitTimeout`.
        """
        recorded, stream = self._recorded, current_stream() if stream is None else _expect(stream, Stream)
        here = stream._check()
        if recorded is None:
            return
        there = recorded.stream._check()
        text = "" if timeout is None else f"{stream!r} waited {timeout:g} s for an event that {recorded.text}"
        if there is here:
            if recorded.stream.number != stream.number:
                order = ordered(here)
                with here.lock:
                    order.wait(stream.number, recorded.stream.number, recorded.position, text, timeout, user_line())
            return
        number = here.session.signals()
        groups = groups_of(here.session)
        # First who will send the signal: if the other node is lost just now, or Ctrl-C comes, nothing must be waiting for it.
        if groups.met:
            groups.remember(number, here, there, recorded.position)
            there.flush()
            there.session.post(there, Notify(recorded.stream.number, recorded.position, here.index, number))
        else:
            recorded.ask(quiet=True).when_done(_Forward(here, there, number))
        with here.lock:
            words = [AWAIT, number, timeout, text]
            if here.order is None:
                here.append(words, user_line())
            else:
                here.order.put(stream.number, words, user_line())

    def query(self) -> bool:
        """Return whether all before the event has run; True if it was never recorded. Asks the worker: one round trip."""
        recorded = self._recorded
        if recorded is None:
            return True
        node = recorded.stream._check()
        node.flush()
        return bool(node.session.value(node.session.ask(node, "passed", [recorded.stream.number, recorded.position])))

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all before the event has run; raise the node's first failure that nobody has read.

        Raises `WaitTimeout` after `timeout` seconds, naming the lines that recorded and that wait. Ctrl-C leaves the session usable.
        """
        recorded = self._recorded
        if recorded is None:
            return
        node = recorded.stream._check()
        started = time.perf_counter()
        request = recorded.ask()
        if not node.session.result(request, timeout):
            node.session.requests.forget(request)
            raise WaitTimeout(
                f"{recorded.stream!r} did not get to the event within {timeout:g} s\n  the event {recorded.text}\n"
                f"  waited for at {line_text(user_line())}\n  the stream goes on; wait again, or drop its work: stream.cancel()"
            )
        note_wait("explicit synchronize", started)
        node.session.raise_for(request)
        node.early(request.value)
        node.session.raise_unread(node)

    def when_done(self, then: Callable[[Request], None]) -> None:
        """Call `then` when all before the event has run, in whichever thread hears of it. Return at once."""
        recorded = self._recorded
        if recorded is None:
            raise UsageError("an event that was never recorded has nothing to wait for")
        recorded.stream._check()
        recorded.ask(quiet=True).when_done(then)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events of one node, by its own clock. Block until both have happened."""
        start, end = self._recorded, _expect(end_event, Event)._recorded
        if not (self.enable_timing and end_event.enable_timing):
            raise UsageError("elapsed_time needs events that note the time: distruntime.Event(enable_timing=True), both of them")
        if start is None or end is None or start.stamp is None or end.stamp is None:
            raise UsageError("elapsed_time needs both events recorded: start.record(), the work, end.record()")
        node = end.stream._check()
        if start.stream._check() is not node:
            raise UsageError(
                f"elapsed_time of events on {start.stream.place} and {end.stream.place}: two nodes have two clocks. Record both on one node"
            )
        stamps = [wrap(DistributedTensor, start.stamp), wrap(DistributedTensor, end.stamp)]
        with node.lock:
            number, words = template(None, DistributedTensor, stamps, {}, 1, node, name="distruntime::elapsed_time")
            home = end.stream.residence
            result = Handle(next_ref(), _TIME, home, Storage(_TIME))
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

    def ask(self, quiet: bool = False) -> Request:
        """Ask the worker to say when the event has happened, and what failed, unless `quiet`: nobody would raise it. Return at once."""
        node = self.stream.residence.node
        request: Request = node.session.fetch(node, 0, [self.stream.number, self.position], "passed", {"quiet": True} if quiet else {})
        return request


class _Forward:
    """Sends the signal of an event to the node that waits for it, in the first moments, before the workers have met."""

    def __init__(self, here: Node, there: Node, number: int) -> None:
        self.here, self.there, self.number = here, there, number

    def __call__(self, request: Request) -> None:
        if self.here.failed is None and self.here.session.closed is None:
            reason = "" if request.lost is None else f"the node of an event that was waited for is lost: {request.lost}"
            self.here.session.post(self.here, Signal(self.number, reason))


_TIME = spec((), (), 0, torch.float64)


def set_implicit_waits(enabled: bool) -> None:
    """Say whether instructions wait by themselves for other streams' writes and reads. True at first; False is CUDA's own rules.

    Counts for what is issued from now on, in the whole session. A value that is not made yet is waited for all the same.
    """
    for node in active_session().nodes:
        if node.failed is None:
            ordered(node).implicit = enabled


def synchronize(node: int | None = None, device: DeviceLike | None = None, timeout: float | None = None) -> None:
    """Block until a node, or every node, has run everything issued so far; raise the first failure that nobody has read.

    With `device`, only what was issued to this device's streams of the node (default: the current one). Raises `WaitTimeout` after
    `timeout` seconds. Ctrl-C leaves the session usable.
    """
    session = active_session()
    if device is not None:
        _synchronize_device(_residence(node, device), timeout)
        return
    if node is not None:
        session.devices(node)
    deadline = None if timeout is None else time.monotonic() + timeout
    for candidate in session.nodes:
        if node is None and candidate.failed is not None:
            continue
        if node is None or candidate.index == node:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not session.synchronize(candidate, left):
                raise WaitTimeout(
                    f"{candidate} has not run everything within {timeout:g} s\n  waited for at {line_text(user_line())}\n"
                    "  it goes on; wait again, or see what it does: dr.nodes()"
                )


def _synchronize_device(residence: Residence, timeout: float | None) -> None:
    node, deadline = residence.node, None if timeout is None else time.monotonic() + timeout
    numbers = [0]
    if node.order is not None:
        numbers += [number for (name, _), pool in node.order.pools.items() if name == residence.place.device for number in pool]
    for number in numbers:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        Stream._numbered(residence, number).synchronize(left)
