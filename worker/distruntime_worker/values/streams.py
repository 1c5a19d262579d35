"""Streams of a worker: in-order queues, each run by a thread of its own, so that two of them run side by
side.

On a GPU a stream is a CUDA stream too: its thread issues to it, and `marks` hold the events that other
streams wait for.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from distruntime.wire.codec import Buffer
from distruntime.wire.messages import Failure, Plain, Segment

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


# A stretch is the words from one index to another of a segment.
Stretch = tuple[Work, int, int]


class Stream:
    """One stream. `reached` and `position` are log positions up to which it has run.

    Invariant: what waits for `reached` (fetches, in `waiting`) is served before `position` moves, and other
    streams look at `position`: so a fetch has read its value before another stream may go on and write it.
    """

    def __init__(self, number: int, device: torch.device, priority: int = 0) -> None:
        self.number, self.device = number, device
        self.queue: queue.SimpleQueue[Stretch | None] = queue.SimpleQueue()
        self.reached = self.position = 0
        # What ends at or before this position and has not begun is dropped.
        self.cancelled = 0
        # It began what it runs at this time.monotonic().
        self.started = 0.0
        self.waiting: list[tuple[int, Action]] = []
        # A thread holds it while it answers what has waited.
        self.serving = threading.RLock()
        # These streams wait for `position`.
        self.blocked: list[tuple[int, threading.Event]] = []
        # Each entry has the position of a wait, the other stream, and a position there. This stream has not
        # waited for that, because it was cancelled. The tuple is never changed in place.
        self.owed: tuple[tuple[int, Stream, int], ...] = ()
        self.cuda = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._marks: deque[tuple[int, list[torch.cuda.Event]]] = deque(maxlen=_MARKS)

    def entered(self) -> AbstractContextManager[object]:
        """Return the context in which kernels of this thread go to this stream."""
        return nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)

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

    # -- on a GPU, where to have run only means to be issued ---------------------------------------

    def _currents(self) -> list[torch.cuda.Stream]:
        """The CUDA streams behind this one: stream 0 is the default stream of every GPU."""
        if self.cuda is not None:
            return [self.cuda]
        return (
            [torch.cuda.default_stream(k) for k in range(torch.cuda.device_count())]
            if self.number == 0
            else []
        )

    def mark(self, position: int) -> None:
        """Note that everything up to `position` has been issued."""
        events = [current.record_event() for current in self._currents()]
        if events:
            self._marks.append((position, events))

    def events(self, position: int) -> list[torch.cuda.Event]:
        """Return events that come after what was issued up to `position`.

        The first mark behind it, else one made now.
        """
        for marked, events in list(self._marks):
            if marked >= position:
                return events
        return [current.record_event() for current in self._currents()]

    def wait_for(self, events: list[torch.cuda.Event]) -> None:
        """Make the kernels that follow wait for `events`, without blocking this thread, unless it is a CPU's.

        Its copies are no kernels.
        """
        if self.cuda is None and self.number:
            for event in events:
                event.synchronize()
        for current in self._currents():
            for event in events:
                current.wait_event(event)


class Happening(Protocol):
    """What a copy waits for: an event of a GPU, or a file that is written."""

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...


class HostCopy:
    """What `HOST` puts into a slot.

    A copy in memory of the host, pinned where it comes from a GPU, whose copying may be under way.
    """

    __slots__ = ("event", "tensor")

    def __init__(self, value: torch.Tensor) -> None:
        self.event: Happening | None = None
        if not value.is_cuda:
            self.tensor = value.clone(memory_format=torch.contiguous_format)
            return
        # torch's allocator of pinned memory keeps blocks and uses them again when the copies into them are
        # done.
        self.tensor = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self.tensor.copy_(value, non_blocking=True)
        self.event = torch.cuda.current_stream(value.device).record_event()

    def ready(self) -> bool:
        """Return whether the copy is done."""
        return self.event is None or self.event.query()


class Stamp:
    """What `STAMP` puts into a slot: when a stream got there."""

    __slots__ = ("event", "nanoseconds")

    def __init__(self, nanoseconds: int, event: torch.cuda.Event | None) -> None:
        self.nanoseconds, self.event = nanoseconds, event


def elapsed_time(start: Stamp, end: Stamp) -> torch.Tensor:
    """Return the milliseconds from one stamp to another. Blocks until a GPU has passed both."""
    if start.event is not None and end.event is not None:
        end.event.synchronize()
        start.event.synchronize()
        return torch.tensor(start.event.elapsed_time(end.event), dtype=torch.float64)
    return torch.tensor((end.nanoseconds - start.nanoseconds) / 1e6, dtype=torch.float64)
