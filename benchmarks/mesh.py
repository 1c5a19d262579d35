"""What operators on meshes and DTensors cost the master: by the number of members, against one place, and
against DTensor itself.

The figures of meshes are processor time of this process (the issuing thread, the session's pump and libzmq's
thread together), from the first operator issued until the last one is acknowledged. The workers are kept busy
meanwhile, so that the log leaves in full batches. Those of DTensors are what an operator takes the thread
that issues it, where nothing disturbs that, on both sides.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor

import distruntime as dr
from distruntime.session.session import Session, active_session

from . import floors
from .harness import ROOT, Figure
from .played import addresses

tensor: Any = torch.distributed.tensor
Work = Callable[[], Any]

_SIZES = (1, 2, 8, 64, 256, 1024)
# The product of matrices of this size keeps a worker's one thread busy for some 50 ms, in which full batches
# gather.
_BUSY = 1024
_BURST = 100
# What a member has of a DTensor of 20 x 20 that two members share.
SHAPES = {
    "Replicate": (20, 20),
    "Shard(0)": (10, 20),
}


def placed(name: str) -> list[Any]:
    """Return the placements of this name."""
    return [tensor.Replicate() if name == "Replicate" else tensor.Shard(0)]


def quickest(work: Work, bursts: int) -> float:
    """Return the seconds that one takes the thread that issues it, undisturbed: in the quickest twentieth of
    bursts of 100.
    """
    gc.collect()
    found = []
    for _ in range(bursts):
        start = time.perf_counter()
        for _ in range(_BURST):
            work()
        found.append((time.perf_counter() - start) / _BURST)
    return sorted(found)[bursts // 20]


def works(*operands: Any) -> dict[str, Work]:
    """Return the operators that are compared, the sum of two operands and the product of the first and a
    third, which is square.
    """
    x, y, square = operands
    return {"add": lambda: x + y, "mm": lambda: torch.mm(x, square)}


class _Cost:
    """What issuing so many operators has cost, in seconds for one."""

    def __init__(self, session: Session, work: Work, count: int, busy: Any = None) -> None:
        threads = [
            time.pthread_getcpuclockid(thread.ident)
            for thread in (threading.current_thread(), session.pump.thread)
            if thread.ident
        ]

        def clocks() -> list[float]:
            return [*map(time.clock_gettime, threads), time.process_time()]

        # 0.1 s or more, else at any moment: 7 us an operator for whichever measurement it strikes.
        gc.collect()
        for _ in range(0 if busy is None else 4):
            busy @ busy
        before, start = clocks(), time.perf_counter()
        for _ in range(count):
            work()
        self.wall = (time.perf_counter() - start) / count
        # Asleep, so that the pump takes what comes: `synchronize` looks for its reply without pause, which is
        # no cost of an operator's.
        for node in session.logs:
            node.flush()
        while any(node.flights for node in session.logs):
            time.sleep(0.005)
        self.issuing, self.pump, self.total = ((b - a) / count for a, b in zip(before, clocks()))


# -- by the number of members --------------------------------------------------------------------------------


@contextmanager
def played(count: int) -> Iterator[list[str]]:
    """Yield the addresses of so many workers, which one process plays."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.played", str(count)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            yield addresses(int(process.stdout.readline()), count)
    finally:
        process.kill()
        process.wait(10)


def _members(where: list[str], operators: int) -> _Cost:
    """Return what an operator costs in a session of these workers, on the mesh of all of them."""
    with dr.init_master_worker(workers=where, insecure=True, quiet=True, timeout=120):
        session = active_session()
        with dr.init_device_mesh("cpu", (len(where),)):
            work = works(*(torch.ones(20, 20, device="remote") for _ in range(3)))["add"]
        _Cost(session, work, 1000)
        return _Cost(session, work, operators)


def _by_members(quick: bool) -> list[Figure]:
    sizes, operators, rounds = (_SIZES[:4], 16_000, 1) if quick else (_SIZES, 16_000, 5)
    found: dict[int, list[_Cost]] = {size: [] for size in sizes}
    empty: list[float] = []
    with played(sizes[-1]) as where:
        for _ in range(rounds):
            empty.append(floors.operation(time.process_time))
            for size in sizes:
                found[size].append(_members(where[:size], operators))
    figures = []
    for size, costs in found.items():
        total, issuing, pump, wall = (
            1e6 * statistics.median(getattr(c, name) for c in costs)
            for name in ("total", "issuing", "pump", "wall")
        )
        parts = f"issuing {issuing:.1f}, acknowledgements {pump:.1f}, libzmq {total - issuing - pump:.1f} us"
        note = f"{parts}; passes in {wall:.0f} us"
        figures.append(
            Figure(
                f"operator, mesh of {size} played worker{'s' if size > 1 else ''}", total, "us", None, note
            )
        )
    for size in sizes[3:]:
        growth = [(many.total - one.total) / (size - 1) for many, one in zip(found[size], found[1])]
        share = [100 * more / floor for more, floor in zip(growth, empty)]
        least, most = (1e6 * pick(growth) for pick in (min, max))
        note = f"{least:.3f} to {most:.3f} us, floor {1e6 * statistics.median(empty):.1f} us"
        figures.append(
            Figure(
                f"operator, for each member more, up to {size} / empty dispatch",
                statistics.median(share),
                "%",
                2.5,
                note,
            )
        )
    return figures


# -- against one place, and against DTensor itself -----------------------------------------------------------


class _Plain:
    """The process of `benchmarks.plain_dtensor`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plain_dtensor"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def quickest(self, name: str, op: str, bursts: int) -> tuple[float, float]:
        """Return the seconds of one on local tensors, and on DTensors of them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {op} {bursts}\n")
        self._process.stdin.flush()
        local, distributed = map(float, self._process.stdout.readline().split())
        return local, distributed

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def _against_others(quick: bool) -> list[Figure]:
    operators, rounds = 10_000, 3 if quick else 11
    dtensor = _Plain()
    try:
        with dr.init_master_worker(quiet=True):
            figures = [_hot_path(operators, rounds)]
        # Played workers sleep. Busy real ones take both cores of a small machine from the master, whose
        # caches they cool the more, the longer it issues: 1.05 x undisturbed, 1.3 x beside them.
        with played(2) as where, dr.init_master_worker(workers=where, insecure=True, quiet=True):
            return figures + _dtensors(dtensor, 400, 1 if quick else 5)
    finally:
        dtensor.close()


def _cost(work: Work, count: int, busy: Any = None) -> float:
    """Return the master's seconds for one of these operators, behind products that keep real workers busy."""
    return _Cost(active_session(), work, count, busy).total


def _hot_path(operators: int, rounds: int) -> Figure:
    mesh = dr.init_device_mesh("cpu", (2,))
    sides = []
    for device in (mesh.device, dr.place(0).device):
        x, y, busy = (
            torch.ones(20, 20, device=device),
            torch.ones(20, 20, device=device),
            torch.ones(_BUSY, _BUSY, device=device),
        )
        sides.append((works(x, y, y)["add"], busy))
        _cost(sides[-1][0], 1000, busy)
    pairs = [[_cost(work, operators, busy) for work, busy in sides] for _ in range(rounds)]
    ours, theirs = (statistics.median(side) for side in zip(*pairs))
    note = f"{ours * 1e6:.1f} us, one place {theirs * 1e6:.1f} us"
    return Figure(
        "operator, mesh of 2 / one place", statistics.median(a / b for a, b in pairs), "x", 1.2, note
    )


def _dtensors(dtensor: _Plain, bursts: int, rounds: int) -> list[Figure]:
    mesh = dr.init_device_mesh("cpu", (2,))
    square = torch.ones(20, 20, device=mesh.device)
    whole_square = tensor.DTensor.from_local(square, mesh, [tensor.Replicate()])
    cases: dict[tuple[str, str], tuple[Work, Work]] = {}
    for name, shape in SHAPES.items():
        x, y = torch.ones(shape, device=mesh.device), torch.ones(shape, device=mesh.device)
        ours = works(*(tensor.DTensor.from_local(t, mesh, placed(name)) for t in (x, y)), whole_square)
        bare = works(x, y, square)
        cases.update({(name, op): (ours[op], bare[op]) for op in ours})
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {case: [] for case in cases}
    for k in range(rounds + 1):
        for case, (whole, part) in cases.items():
            local, distributed = dtensor.quickest(*case, bursts)
            row = (
                quickest(whole, bursts),
                distributed - local,
                quickest(part, bursts),
                _cost(whole, 5000),
                _cost(part, 5000),
            )
            if k:  # the first is to warm up
                rows[case].append(row)
    figures = []
    for (name, op), found in rows.items():
        ratio = statistics.median(whole / (own + part) for whole, own, part, _, _ in found)
        total, own, mesh_own, all_whole, all_part = (
            1e6 * statistics.median(column) for column in zip(*found)
        )
        note = (
            f"{total:.1f} us, DTensor itself {own:.1f}, mesh operator {mesh_own:.1f}; all threads, "
            f"disturbed: {all_whole:.1f} us, "
            f"mesh operator {all_part:.1f}"
        )
        figures.append(
            Figure(
                f"DTensor {op}, {name} on a mesh of 2 played workers / DTensor itself + mesh operator",
                ratio,
                "x",
                1.2,
                note,
            )
        )
    return figures


def measure(quick: bool) -> list[Figure]:
    """Return the figures; the workers are played, but those of the mesh against one place."""
    return [*_by_members(quick), *_against_others(quick)]
