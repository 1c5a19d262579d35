"""How far one master reaches: what it spends, by the number of members of one mesh, which one process plays.

Each figure of a session has its own process, so that memory and start-up are those of that session alone. A
burst's figures are processor time, as in `benchmarks.mesh`: of the thread that issues, and of the whole
process until every member has acknowledged. A program of 1,000 operators is measured where meshes have
programs.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import distruntime as dr
from distruntime.session.session import active_session

from . import floors
from .harness import ROOT, Figure
from .mesh import played

_SIZES = (1, 2, 8, 64, 256, 1024)
_LARGEST, _WIDE = 1024, 256
# One program has so many operators, and one burst so many operators or replays.
_OPERATORS, _BURST = 1000, 16_000
# A loop has so many steps.
_STEPS = 100


class _Row(NamedTuple):
    """What one session has cost: seconds, and bytes for each member."""

    start: float
    memory: float
    issuing: float
    process: float
    replay_issuing: float
    replay_process: float
    steady_issuing: float
    steady_process: float
    # An empty dispatch, in the same process.
    floor: float


def _resident() -> int:
    words = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(words[1]) * 4096


def _cost(work: Callable[[], object], count: int) -> tuple[float, float]:
    """Return what one of so many calls costs: on the issuing thread, and in the whole process."""
    session = active_session()
    mine = time.pthread_getcpuclockid(threading.get_ident())
    gc.collect()
    began, total = time.clock_gettime(mine), time.process_time()
    for _ in range(count):
        work()
    # A step that stands alone is sent at once, and what it lets go of with the next one.
    for mesh in session.meshes if count > 1 else ():
        mesh.flush()
    issued = time.clock_gettime(mine)
    # A mesh's segments have run when all of its members have run them.
    while any(mesh.flights for mesh in session.meshes):
        time.sleep(0.002)
    return (issued - began) / count, (time.process_time() - total) / count


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(_OPERATORS):
        x = x + y
    return x


def session(where: list[str]) -> _Row:
    """Measure one session of these workers, in this process."""
    torch.set_num_threads(1)
    gc.collect()
    before, began = _resident(), time.perf_counter()
    with dr.init_master_worker(workers=where, insecure=True, quiet=True, timeout=120):
        with dr.init_device_mesh("cpu", (len(where),)):
            x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")
        start = time.perf_counter() - began
        memory = (_resident() - before) / len(where)
        add: Callable[[], object] = lambda: x + y  # noqa: E731
        _cost(add, 1000)
        issuing, process = min(_cost(add, _BURST) for _ in range(3))
        program = dr.program(_chain)
        for _ in range(4):
            program(x, y)
        assert program.replays, program.why
        # One replay at a time: what a step costs that waits for nothing but its own acknowledgements. It lets
        # go of the result before it.
        kept = [program(x, y)]

        def step() -> None:
            kept[0] = program(x, y)

        alone = [_cost(step, 1) for _ in range(15)]
        # Steps of a loop follow each other, and a worker acknowledges several at once.
        steady = min(_cost(step, _STEPS) for _ in range(3))
        floor = floors.operation(time.thread_time)
    replay = [statistics.median(column) for column in zip(*alone)]
    return _Row(start, memory, issuing, process, replay[0], replay[1], *steady, floor)


def _measured(where: list[str]) -> _Row:
    command = [sys.executable, "-c", "from benchmarks.scale import child; child()"]
    done = subprocess.run(
        command, cwd=ROOT, input="\n".join(where), stdout=subprocess.PIPE, text=True, check=True
    )
    return _Row(*json.loads(done.stdout.splitlines()[-1]))


def child() -> None:
    """Print a session's row, of the workers whose addresses stand on standard input."""
    print(json.dumps(session(sys.stdin.read().split())))


def _replays(members: str, row: _Row, held: bool) -> Iterator[Figure]:
    """Yield what a replay costs beside as many empty dispatches as it has operators."""
    floor = row.floor * _OPERATORS
    for what, steady, alone, bar in (
        ("issuing", row.steady_issuing, row.replay_issuing, 1.0),
        ("whole process", row.steady_process, row.replay_process, 5.0),
    ):
        name = f"one of {_STEPS} replays, {members}: {what} / {_OPERATORS:,} empty dispatches"
        note = f"{steady * 1e3:.2f} ms, {alone * 1e3:.2f} ms alone, floor {floor * 1e3:.2f} ms"
        yield Figure(name, steady / floor, "x", bar if held else None, note)


def measure(quick: bool) -> list[Figure]:
    """Measure sessions of 1 to 1,024 members."""
    sizes, rounds = (_SIZES[:4], 1) if quick else (_SIZES, 3)
    rows: dict[int, list[_Row]] = {size: [] for size in sizes}
    with played(sizes[-1]) as where:
        for _ in range(rounds):
            for size in sizes:
                rows[size].append(_measured(where[:size]))
    middle = {
        size: _Row(*(statistics.median(column) for column in zip(*found))) for size, found in rows.items()
    }
    figures = []
    for size, row in middle.items():
        members = f"{size:,} member{'s' if size > 1 else ''}"
        wide, large = size == _WIDE, size == _LARGEST
        figures += [
            Figure(f"start of a session, {members}", row.start, "s", None),
            Figure(f"memory for a member, {members}", row.memory / 1024, "KiB", None),
            Figure(
                f"operator, {members}",
                row.process * 1e6,
                "us",
                None,
                f"of the whole process; issuing {row.issuing * 1e6:.1f} us",
            ),
            *_replays(members, row, large),
        ]
        if wide:
            ratio = statistics.median(a.process / b.process for a, b in zip(rows[size], rows[1]))
            figures.append(Figure(f"operator, {members} / one", ratio, "x", 2))
    return figures
