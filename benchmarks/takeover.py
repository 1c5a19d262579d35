"""What the take-over costs (`as_cuda`): the same operations with it and without it, in one session.

The take-over is switched on and off between the two sides. What counts is the issuing thread's own processor
time, since the machine's other programs would otherwise count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import distruntime as dr
from distruntime.cluster import as_cuda
from distruntime.cluster.cuda.replaced import give_back
from distruntime.session.session import active_session

from .harness import Figure

BURST = 400


def _microseconds(work: Callable[[str], object], there: str) -> float:
    """Return the processor time of one call, the least of some bursts, with nothing in flight before each."""
    found = []
    for _ in range(5):
        dr.synchronize()
        began = time.thread_time()
        for _ in range(BURST):
            work(there)
        found.append((time.thread_time() - began) / BURST)
    return min(found) * 1e6


def _on() -> None:
    session = active_session()
    as_cuda.take_over(session, True)
    # The end of the session would give back once for each time.
    session.ending.on_close.pop()


def measure(quick: bool) -> list[Figure]:
    """Return the ratios for an addition, a factory of a place and factories of this process."""
    rounds = 8 if quick else 40
    with dr.init_master_worker(world_size=1, quiet=True):
        x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")
        # Each looks its function up in torch, as a script does.
        works: dict[str, Callable[[str], object]] = {
            "addition": lambda there: x + y,
            "factory": lambda there: torch.zeros(20, 20, device=there),
            "local factory": lambda there: torch.zeros(20, 20),
            "local factory with a dtype": lambda there: torch.zeros(20, 20, dtype=torch.float64),
        }
        taken: dict[str, list[float]] = {name: [] for name in works}
        plain: dict[str, list[float]] = {name: [] for name in works}
        for k in range(2 * rounds):
            # The order of the two sides changes from round to round.
            on = k % 4 in (0, 3)
            if on:
                _on()
            for name, work in works.items():
                (taken if on else plain)[name].append(_microseconds(work, "cuda" if on else "remote"))
            if on:
                give_back()
    operation = statistics.median(plain["addition"])
    figures = []
    for name in works:
        with_it, without = statistics.median(taken[name]), statistics.median(plain[name])
        ratio = statistics.median(a / b for a, b in zip(taken[name], plain[name]))
        note = f"{with_it:.2f} us, {without:.2f} us without"
        if name.startswith("local"):
            more = statistics.median(a - b for a, b in zip(taken[name], plain[name]))
            figures.append(
                Figure(
                    f"{name}: what the take-over adds / a remote addition",
                    more / operation,
                    "x",
                    0.05,
                    f"{note}, {ratio:.2f} x itself; an addition {operation:.2f} us",
                )
            )
        else:
            spelled = ', "cuda" / "remote" without it' if name == "factory" else " / without it"
            figures.append(Figure(f"{name} under take-over{spelled}", ratio, "x", 1.05, note))
    return figures
