"""What a session costs by what it holds and has done: values, queued operations, events, names, groups.

One process holds a few pieces of a kind, and another one the most, and the same is measured in turn in both:
an operation whose result nobody keeps, and one piece more. All times are processor time, of the thread that
issues and of a whole worker. A growing session says what each piece took, and what memory it keeps.

Python's own collector looks at all objects of a process now and then while their number grows. That is off,
and a third process says what one piece more takes with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import distruntime as dr

from .harness import Beside, Figure, daemon

# It is the bar of an operation's cost, and of a piece's, with the most of a kind beside a few of it.
_BAR = 1.2
# So many operations are measured at a time, and so many pieces more.
_BURST, _MORE = 3000, 20
# A worker that does nothing for a piece spends less than so many seconds.
_NOTHING = 1e-6


class Cost(NamedTuple):
    """Seconds of processor time for one piece or operation: of the thread that issues, and of the worker."""

    master: float
    worker: float


class Row(NamedTuple):
    """What the pieces up to a number have cost, each, and what is kept of one: bytes on each side."""

    number: int
    one: Cost
    memory: tuple[float, float]
    operation: Cost


class Kind(NamedTuple):
    """Something that a session holds or has done."""

    name: str
    # It is measured at these numbers, and the third of them is compared with the last one.
    counts: tuple[int, int, int, int]
    workers: int = 1
    # Python's collector is measured beside it.
    collected: bool = False
    # What one more costs is held to the bar, and what an operation costs a worker.
    held: bool = True


KINDS = (
    Kind("live values", (1, 1000, 100_000, 1_000_000), collected=True),
    Kind("operations done", (1, 1000, 100_000, 1_000_000)),
    # Issuing waits behind some 60,000.
    Kind("operations queued", (1, 1000, 10_000, 40_000)),
    Kind("events", (1, 1000, 100_000, 1_000_000), collected=True),
    # Each keeps its answer.
    Kind("reads under way", (1, 1000, 5000, 20_000), collected=True),
    # Each is published by a call that waits.
    Kind("names", (1, 1000, 5000, 20_000)),
    # Each is a function that is called four times until it is recorded.
    Kind("programs", (1, 100, 1000, 5000)),
    # gloo has three threads and five descriptors of a worker for each, and one of the threads wakes up a
    # hundred times a second.
    Kind("groups of gloo", (1, 10, 100, 400), 2, held=False),
    Kind("groups of tcp", (1, 10, 100, 400), 2),
    Kind("sessions ended", (1, 10, 100, 400)),
)
# With --quick nothing grows further than this.
_MOST_QUICK = 1000


def _clock(pid: int) -> float:
    # This is Linux's number of the clock of another process.
    return time.clock_gettime((~pid << 3) | 2)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")


def _add_number(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * 2 + number


class Holder:
    """A session in a process of its own, and the pieces that it holds."""

    def __init__(self, kind: Kind, address: str, collector: bool) -> None:
        torch.set_num_threads(1)
        self._kind, self._address, self._held = kind, address, list[object]()
        self._count = 0
        self._begin()
        self._pid = dr.nodes()[0].pid
        self._queue = kind.name == "operations queued"
        self._make: Callable[[], object] = {
            "live values": lambda: self._x + self._y,
            "operations done": self._operation,
            "operations queued": self._operation,
            "events": lambda: self._stream.record_event(),
            "reads under way": lambda: dr.fetch_async(self._x),
            "names": lambda: dr.publish(f"piece {self._count}", self._x),
            "programs": self._program,
            "groups of gloo": lambda: dr.distributed.new_group([0, 1]),
            "groups of tcp": lambda: dr.distributed.new_group([0, 1]),
            "sessions ended": self._again,
        }[kind.name]
        # A session that has ended is in cycles, which only the collector takes apart.
        if not collector and kind.name != "sessions ended":
            gc.disable()

    def _begin(self) -> None:
        if self._address:
            dr.init_master_worker(workers=[self._address], quiet=True)
        else:
            channel = {"data_channel": "tcp"} if self._kind.name == "groups of tcp" else {}
            dr.init_master_worker(world_size=self._kind.workers, quiet=True, **channel)  # type: ignore[arg-type]
        self._x, self._y = torch.ones(4, device="remote"), torch.ones(4, device="remote")
        self._stream = dr.default_stream(0, "cpu")

    def _operation(self) -> None:
        self._x + self._y

    def _program(self) -> object:
        program = dr.program(_add_number(self._count))
        for _ in range(4):
            program(self._x)
        assert program.replays, program.why
        return program

    def _again(self) -> None:
        dr.shutdown()
        self._begin()

    def _one(self) -> None:
        self._held.append(self._make())
        self._count += 1

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """Hold the worker still for the length of a `with` block, if it is operations that are queued."""
        if self._queue:
            dr.synchronize()
            os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self._queue:
                os.kill(self._pid, signal.SIGCONT)

    def pieces(self, count: int) -> Cost:
        """Make so many pieces more; return what one of them costs."""
        began, there = time.thread_time(), _clock(self._pid)
        with self._stopped():
            for _ in range(count):
                self._one()
            took = time.thread_time() - began
        dr.synchronize()
        return Cost(took / count, (_clock(self._pid) - there) / count)

    def operation(self, burst: int) -> Cost:
        """Return what an operation costs whose result nobody keeps."""
        dr.synchronize()
        began, there = time.thread_time(), _clock(self._pid)
        for _ in range(burst):
            self._operation()
        took = time.thread_time() - began
        dr.synchronize()
        return Cost(took / burst, (_clock(self._pid) - there) / burst)

    def grow(self, count: int, burst: int) -> Row:
        """Hold so many pieces; return what the new ones have cost."""
        new = count - self._count
        mine, theirs = _resident(os.getpid()), _resident(self._pid)
        cost = self.pieces(new)
        gc.collect()
        memory = (_resident(os.getpid()) - mine) / new, (_resident(self._pid) - theirs) / new
        return Row(count, cost, memory, self.operation(burst))


_holders: list[Holder] = []


def _open(kind: Kind, address: str, collector: bool) -> None:
    _holders.append(Holder(kind, address, collector))


def _grow(count: int, burst: int) -> Row:
    return _holders[-1].grow(count, burst)


def _pieces(count: int) -> Cost:
    return _holders[-1].pieces(count)


def _operations(burst: int) -> Cost:
    return _holders[-1].operation(burst)


def _close() -> None:
    _holders.clear()
    dr.shutdown()


@contextlib.contextmanager
def _holder(kind: Kind, address: str, collector: bool = False) -> Iterator[Beside]:
    with Beside() as beside:
        beside.call(_open, kind, address, collector)
        try:
            yield beside
        finally:
            beside.call(_close)


def _shown(kind: Kind, row: Row, collected: float | None) -> Figure:
    mine, theirs = row.memory
    note = f"worker {row.one.worker * 1e6:.1f} us; keeps {mine:,.0f} and {theirs:,.0f} B"
    note += "" if collected is None else f"; with the collector {collected * 1e6:.1f} us"
    note += f"; an operation {row.operation.master * 1e6:.2f} and {row.operation.worker * 1e6:.2f} us"
    return Figure(f"{kind.name}, one of {row.number:,}", row.one.master * 1e6, "us", None, note)


def _compared(
    kind: Kind, few: Beside, most: Beside, counts: tuple[int, int], quick: bool
) -> Iterator[Figure]:
    """Yield the ratios of what is measured in turn beside few pieces and beside the most."""
    rounds, burst = (3, _BURST // 10) if quick else (9, _BURST)
    more = max(_MORE, counts[0] // 5)
    what: list[tuple[str, Callable[[Beside], Cost]]] = [
        ("an operation", lambda where: where.call(_operations, burst)),
        ("one more", lambda where: where.call(_pieces, more)),
    ]
    for name, measured in what:
        pairs = [(measured(most), measured(few)) for _ in range(rounds)]
        for side, of in (("issuing", "master"), ("worker", "worker")):
            # What else the machine does only adds to processor time, by caches that are cold.
            many, fewer = (min(getattr(pair[k], of) for pair in pairs) for k in (0, 1))
            if fewer < _NOTHING:
                continue
            held = kind.held or (side == "issuing" and name == "an operation")
            yield Figure(
                f"{kind.name}: {name} at {counts[1]:,} / at {counts[0]:,}, {side}",
                many / fewer,
                "x",
                _BAR if held else None,
                f"{many * 1e6:.2f} us, {fewer * 1e6:.2f} us",
            )


def _kind(kind: Kind, quick: bool) -> Iterator[Figure]:
    counts = [count for count in kind.counts if not quick or count <= _MOST_QUICK]
    few = counts[1] if len(counts) > 2 else counts[0]
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(daemon()) if kind.name == "sessions ended" else ""
        small = stack.enter_context(_holder(kind, address))
        most = stack.enter_context(_holder(kind, address))
        collecting = (
            stack.enter_context(_holder(kind, address, True)) if kind.collected and not quick else None
        )
        small.call(_grow, few, _BURST)
        for count in counts:
            row = most.call(_grow, count, _BURST)
            collected = collecting.call(_grow, count, 1).one.master if collecting is not None else None
            yield _shown(kind, row, collected)
        yield from _compared(kind, small, most, (few, counts[-1]), quick)


def measure(quick: bool) -> list[Figure]:
    """Measure each kind, in sessions of its own."""
    return [figure for kind in KINDS for figure in _kind(kind, quick)]
