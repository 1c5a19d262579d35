"""Streams: torch.cuda's concurrency, on any device of any node.

A stream is an in-order queue of one device. Nothing here waits for a worker except what says so: `synchronize` and `query`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ..errors import NotSupportedError, PlacementError, UsageError, WaitTimeout
from ..log.current import DeviceLike
from ..log.handle import Handle, Place, Residence
from ..log.line import line_text, user_line
from ..session.session import active_session
from ..session.spelling import is_remote, named, on_node
from ..session.timeouts import checked
from ..wire.messages import Cancel, OpenStream
from .event import Event
from .queue import Queue, entered, expect, ordered

_MOST = 32  # streams for each device and priority, as on CUDA: more Stream objects share them

Where = int | Place | torch.device | None


def _residence(node: Where, device: DeviceLike | None) -> Residence:
    places = active_session().places
    if isinstance(node, torch.device) and not is_remote(node):
        raise PlacementError(
            f'a stream belongs to a device of a node: node=1, device="cuda:0", or x.device of a remote tensor; got {node}'
        )
    if isinstance(node, (Place, torch.device)):
        found = named(places, node)
        assert found is not None
        return found
    if node is None and device is None:
        return places.current()
    current = places.current().place
    index = current.node if node is None else node
    like = current.device if index == current.node else None
    return places.residence(on_node(places, index, device, like=like))


class Stream(Queue):
    """An in-order queue of instructions on one device of a node, which runs beside the others.

    Args:
        node: the node's number, a `Place`, or the `device` of a remote tensor; default: the current place.
        device: "cpu", "cuda:1" or a number (-1 is the CPU); default: the node's `cuda:0`, if it has one, else its CPU.
        priority: as in `torch.cuda.Stream`: lower numbers run first, on GPUs.

    Returns at once. Raises `PlacementError` where the node or device is not there.
    """

    def __init__(self, node: Where = None, device: DeviceLike | None = None, priority: int = 0) -> None:
        if type(priority) is not int or not -(1 << 31) <= priority < 1 << 31:
            raise UsageError(
                f"a stream's priority is a small whole number, as in torch.cuda.Stream; got {priority!r}"
            )
        residence, self.priority = _residence(node, device), priority
        node_, name = residence.node, residence.place.device
        team: Any = node_
        if node_.asynchronous and any(len(ranks) > 1 for ranks in getattr(node_, "ranks", {}).values()):
            raise NotSupportedError(
                f"a stream on {residence.place} would be of several GPUs of one node, which no stream is; use one member per node"
            )
        node_.session.require_open()
        node_.require_alive()
        order = ordered(node_)
        with node_.lock:
            pool, idle = (
                order.pools.setdefault((name, priority), []),
                order.idle.setdefault((name, priority), []),
            )
            if not idle and len(pool) < _MOST:
                number = order.open()
                pool.append(number)
                for worker, where, whose in team.openings() if node_.members else [(node_, name, -1)]:
                    node_.session.post(worker, OpenStream(number, where, priority, whose))
            elif idle:
                number = idle.pop()
            else:
                number = pool[0]
                pool.append(pool.pop(0))
        super().__init__(residence, number)
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

    def wait_event(self, event: Event, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for `event`. Return at once; see `Event.wait`."""
        expect(event, Event, "Event").wait(self, timeout)

    def wait_stream(self, stream: Stream, timeout: float | None = None) -> None:
        """Make what is issued to this stream from now on wait for all that `stream` has been given, on whatever node. Return at once."""
        self.wait_event(expect(stream, Stream, "Stream").record_event(), timeout)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, after all that this stream has been given. Return it at once."""
        event = Event() if event is None else expect(event, Event, "Event")
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
        node = self.check()
        if node is not handle.place.node:
            raise PlacementError(
                f"a tensor on {handle.place.place} is not used by {self!r}, which is another node's"
            )
        order = ordered(node)
        with node.lock:
            order.note_use(handle, self.number)

    def cancel(self) -> None:
        """Drop what this stream has been given and has not begun: reading its results raises `StreamCancelled`. Return at once.

        What runs, ends; what is issued afterwards runs. Waits that it stands in are dropped too.
        """
        node = self.check()
        with node.lock:
            node.flush()
            position = node.base if node.order is None else node.order.cancelled(self.number)
        for worker in node.workers():
            node.session.post(worker, Cancel(node.stream_on_wire(self.number), position))


def default_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to when no other is current."""
    return Stream._numbered(_residence(node, device), 0)


def current_stream(node: Where = None, device: DeviceLike | None = None) -> Stream:
    """Return the stream that a device's instructions go to now, in this thread or asyncio task."""
    residence = _residence(node, device)
    found = entered(residence)
    return found if isinstance(found, Stream) else Stream._numbered(residence, 0)


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


def stream(stream: Stream | None) -> StreamContext:
    """Return a context in which instructions on the stream's device go to it, and new tensors to its device. None changes nothing.

    As `torch.cuda.stream`; operations on other devices go to these devices' current streams, as always.
    """
    return StreamContext(None if stream is None else expect(stream, Stream, "Stream"))


def set_implicit_waits(enabled: bool) -> None:
    """Say whether instructions wait by themselves for other streams' writes and reads. True at first; False is CUDA's own rules.

    Counts for what is issued from now on, in the whole session. A value that is not made yet is waited for all the same.
    """
    for node in active_session().nodes:
        if node.failed is None:
            ordered(node).implicit = enabled


def synchronize(
    node: int | None = None, device: DeviceLike | None = None, timeout: float | None = None
) -> None:
    """Block until a node, or every node, has run everything issued so far; raise the first failure that nobody has read.

    With `device`, only what was issued to this device's streams of the node (default: the current one). Raises `WaitTimeout` after
    `timeout` seconds. Ctrl-C leaves the session usable.
    """
    session, timeout = active_session(), checked(timeout)
    if device is not None:
        synchronize_device(_residence(node, device), timeout)
        return
    if node is not None:
        session.places.devices(node)
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


def synchronize_device(residence: Residence, timeout: float | None) -> None:
    """Block until the streams of a device, or of a mesh, have run what was issued to them so far; see `synchronize`."""
    node, deadline = residence.node, None if timeout is None else time.monotonic() + timeout
    numbers = [0]
    if node.order is not None:
        numbers += [
            number
            for (name, _), pool in node.order.pools.items()
            if name == residence.place.device
            for number in pool
        ]
    for number in numbers:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        Stream._numbered(residence, number).synchronize(left)
