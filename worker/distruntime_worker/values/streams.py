"""Streams of a worker: in-order queues, each run by a thread of its own, so that two of them run side by
side.

On an accelerator a stream is one of the device's too: its thread issues to it, and `marks` hold the events
that other streams wait for.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, final

import torch

from distruntime.errors import UsageError
from distruntime.wire.codec import Buffer
from distruntime.wire.messages import Failure, Plain, Segment
from distruntime.wire.shield import RLock

from ..machine import accelerator, hardware, lost
from .staging import downloads
from .step import Run, Step

# So many events are kept. An older position waits for the oldest of them.
_MARKS = 256

Action = Callable[[], None]


class Mesh(Protocol):
    """A mesh's log, to those who run its segments: see `MeshState`."""

    number: int
    devices: list[str]
    templates: dict[Plain, Run]
    info: dict[Plain, Step]
    streams: dict[int, Stream]
    default: Stream


@dataclass(eq=False, slots=True)
class Work:
    """A segment that is being run, by as many threads as it has stretches for."""

    segment: Segment
    payloads: list[Buffer]
    # So many stretches have not run.
    left: int
    failures: list[Failure] = field(default_factory=list)
    corrections: list[Plain] = field(default_factory=list)
    # The segment is this mesh's, if it is a mesh's.
    mesh: Mesh | None = None
    # It is set when everything before the segment has run, where the streams must wait for that.
    before: threading.Event | None = None
    # A program runs by its instructions, and this is the number of the one that runs.
    part: int = -1
    # These stretches, by the index where they begin, are of streams without a thread.
    borrowed: dict[int, Stream] = field(default_factory=dict)


# A stretch is the words from one index to another of a segment.
Stretch = tuple[Work, int, int]


class Queue(Protocol):
    """What a stream has still to run."""

    def put(self, item: Stretch | None) -> None:
        """Add a stretch. None ends the thread behind those that are there."""

    def get(self) -> Stretch | None:
        """Return the next one. Block until there is one."""

    def empty(self) -> bool:
        """Whether there is none."""


@final
class Borrowed:
    """The queue of a stream that has no thread: another stream's thread takes from it."""

    def __init__(self, to: Queue, stream: Stream) -> None:
        self._to, self._stream = to, stream

    def put(self, item: Stretch | None) -> None:
        """Add a stretch; the other stream ends by itself."""
        if item is not None:
            work, first, _ = item
            work.borrowed[first] = self._stream
            self._to.put(item)

    def get(self) -> Stretch | None:
        """Return nothing: nobody takes from here."""
        return None

    def empty(self) -> bool:
        """Whether there is nothing here: what there is, is the other stream's."""
        return True


class Stream:
    """One stream. `reached` and `position` are log positions up to which it has run.

    Invariant: what waits for `reached` (fetches, in `waiting`) is served before `position` moves, and other
    streams look at `position`: so a fetch has read its value before another stream may go on and write it.
    """

    def __init__(self, number: int, device: torch.device, priority: int = 0) -> None:
        self.number, self.device = number, device
        self.queue: Queue = queue.SimpleQueue()
        self.reached = self.position = 0
        # What ends at or before this position and has not begun is dropped.
        self.cancelled = 0
        # It began what it runs at this time.monotonic().
        self.started = 0.0
        self.waiting: list[tuple[int, Action]] = []
        # A thread holds it while it answers what has waited.
        self.serving = RLock()
        # These streams wait for `position`.
        self.blocked: list[tuple[int, threading.Event]] = []
        # Each entry has the position of a wait, the other stream, and a position there. This stream has not
        # waited for that, because it was cancelled. The tuple is never changed in place.
        self.owed: tuple[tuple[int, Stream, int], ...] = ()
        # The device's own stream behind this one. None where kernels run at once, and for stream 0, which
        # issues to the default stream of every device.
        self.native = None
        # This is why it could not be opened. What is issued to it fails for that reason.
        self.refused: Exception | None = None
        try:
            self.native = accelerator.stream(device, priority)
        except RuntimeError as error:
            self.refused = error
        self._marks: deque[tuple[int, list[accelerator.Moment]]] = deque(maxlen=_MARKS)

    def entered(self) -> AbstractContextManager[None]:
        """Return the context in which kernels of this thread go to this stream."""
        return accelerator.entered(self.native)

    def owe(self, at: int, other: Stream, position: int) -> None:
        """Note a wait that was dropped at log position `at`.

        Forget those that are over, but not what those streams owe themselves.
        """
        debts = [*self.owed, (at, other, position)]
        kept: list[tuple[int, Stream, int]] = []
        # The list grows meanwhile. It ends, as each wait is for a position before its own.
        for since, stream, until in debts:
            if stream.position < until:
                kept.append((since, stream, until))
            else:
                new = [(since, third, where) for own, third, where in stream.owed if own <= until]
                debts += [debt for debt in new if debt not in debts]
        self.owed = tuple(kept)

    def advance(self, position: int) -> None:
        """Let other streams see that this one has got to `position`."""
        self.position = position
        if self.blocked:
            for entry in list(self.blocked):
                if entry[0] <= position:
                    entry[1].set()

    # -- on an accelerator, where to have run only means to be issued ---------------------------------------

    def _moments(self, device: torch.device | None = None) -> list[accelerator.Moment]:
        """Return events at the end of what the devices' streams behind this one were given so far.

        With `device` they are those that come after what was issued to it.
        """
        found: list[accelerator.Moment] = []
        for stream in self._natives():
            if self._tells(stream, device):
                with lost.tolerated("an event"):
                    found.append(accelerator.moment(stream))
        return found

    def _natives(self) -> list[torch.Stream]:
        """Return the devices' streams behind this one."""
        if not self.number:
            return accelerator.default_streams()
        return [] if self.native is None or self.native.device in accelerator.lost else [self.native]

    def on(self, device: torch.device) -> torch.Stream:
        """Return the device's stream to which this one issues kernels of a device."""
        return self.native or accelerator.default_stream(device)

    def mark(self, position: int) -> None:
        """Note that everything up to `position` has been issued."""
        events = self._moments()
        if events:
            self._marks.append((position, events))

    def marked(self, position: int, device: torch.device | None = None) -> list[accelerator.Moment] | None:
        """Return the events of the first mark at or behind `position`, if there is one.

        With `device` they are those that come after what was issued to it.
        """
        marks = list(self._marks)
        k = bisect_left(marks, position, key=lambda mark: mark[0])
        if k == len(marks):
            return None
        # Nobody waits for a device that is lost.
        return [
            event
            for event in marks[k][1]
            if self._tells(event.stream, device) and event.stream.device not in accelerator.lost
        ]

    def _tells(self, stream: torch.Stream, device: torch.device | None) -> bool:
        """Whether an event of a stream behind this one comes after what this one has issued to a device."""
        # Stream 0 is a stream on each device. Another one is on one device, and it goes on after what
        # an operation of a group that it runs does on others.
        return self.number != 0 or device is None or stream.device == device

    def events(self, position: int, device: torch.device | None = None) -> list[accelerator.Moment]:
        """Return events that come after what was issued up to `position`, to one device or to all.

        The first mark behind it, else one made now.
        """
        found = self.marked(position, device)
        return self._moments(device) if found is None else found

    def has_run(self, position: int) -> bool:
        """Whether the devices have run what was issued up to `position`."""
        events = self.marked(position)
        # An event that is made now would not have happened yet on a stream at rest.
        return all(one.query() for one in (self._natives() if events is None else events))

    def await_devices(self) -> None:
        """Block until the devices have run what was issued."""
        for event in self._moments():
            with lost.tolerated("a wait for a device"):
                event.synchronize()

    def wait_for(self, events: Sequence[torch.Event]) -> None:
        """Make the kernels that follow wait for `events`, without blocking this thread, unless it is a CPU's.

        Its copies are no kernels.
        """
        if self.native is None and not self.number:
            for error in accelerator.wait_on_defaults(events):
                with lost.tolerated("a wait for an event"):
                    raise error
            return
        for event in events:
            with lost.tolerated("a wait for an event"):
                if self.native is None:
                    event.synchronize()
                else:
                    self.native.wait_event(event)


class Happening(Protocol):
    """What a copy waits for: an event of a device, or a file that is written."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> object:
        """Block until it has."""


class HostCopy:
    """What `HOST` puts into a slot: a copy in memory of the host, whose copying may be under way.

    From an accelerator it goes into one of the worker's pinned buffers, as long as there is room. A larger
    one blocks the stream's thread until it is here.
    """

    __slots__ = ("_buffer", "_staging", "device", "event", "tensor")

    def __init__(self, value: torch.Tensor) -> None:
        self.event: Happening | None = None
        self._buffer: torch.Tensor | None = None
        # The copy comes from there.
        self.device: torch.device | None = value.device
        if not accelerator.asynchronous(value.device):
            self.tensor = value.clone(memory_format=torch.contiguous_format)
            return
        # Torch copies the bytes of a conjugate, and conjugates them here before they have come.
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        self._staging = downloads()
        if value.numel() and hardware.has_pinned_memory(value.device):
            self._buffer = self._staging.take(value.nbytes)
        if self._buffer is None:
            self.tensor = value.cpu().contiguous()
            return
        value = value.contiguous()
        # Two views take a third of the time of three.
        self.tensor = self._buffer.view(value.dtype).as_strided(value.shape, value.stride())
        self.tensor.copy_(value, non_blocking=True)
        self.event = accelerator.moment(accelerator.current_stream(value.device))

    def __del__(self) -> None:
        if self._buffer is None:
            return
        if isinstance(self.event, accelerator.Moment):
            self._staging.give(self.event, self._buffer)
        elif self.device in accelerator.lost:
            # Torch's allocator would note an event on each stream that has used the buffer. That fails now,
            # in a destructor, which ends the process.
            lost.keep_for_ever(self._buffer)
        else:
            # The copy was refused, for example as the device had no memory for it. An event that was not
            # recorded counts as one that has happened.
            self._staging.give(torch.Event(self.device), self._buffer)


class Stamp:
    """What `STAMP` puts into a slot: when a stream got there."""

    __slots__ = ("event", "nanoseconds")

    def __init__(self, nanoseconds: int, event: torch.Event | None) -> None:
        self.nanoseconds, self.event = nanoseconds, event


def elapsed_time(start: Stamp, end: Stamp) -> torch.Tensor:
    """Return the milliseconds from one stamp to another. Blocks until a device has passed both."""
    if start.event is not None and end.event is not None:
        if start.event.device != end.event.device:
            raise UsageError(
                f"the events are of streams of {start.event.device} and {end.event.device}, which have two "
                "clocks: record both on streams of one device"
            )
        end.event.synchronize()
        start.event.synchronize()
        return torch.tensor(start.event.elapsed_time(end.event), dtype=torch.float64)
    return torch.tensor((end.nanoseconds - start.nanoseconds) / 1e6, dtype=torch.float64)
