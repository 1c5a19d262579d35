"""Pipelines on workers that sleep instead of computing: a step against its schedule's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import distruntime as dr
from distruntime.parallel.orders import merged, orders_of

from . import floors
from .harness import Figure, seconds
from .sleeping import Sleeper

WORKERS, MICRO = 4, 8
# A forward pass over a quarter of the model takes so many seconds on the quick machine. A backward pass has
# two halves, which take as many each. On a slower machine all passes are longer, as issuing is.
PASS = 0.1
SCHEDULES = {
    "1F1B": 4,
    "GPipe": 4,
    "Interleaved1F1B": 8,
    "LoopedBFS": 8,
    "InterleavedZeroBubble": 8,
    "ZBVZeroBubble": 8,
    "DualPipeV": 8,
}


def time_of(orders: Mapping[int, Sequence[Any]], last: int, cost: Callable[[int, str], float]) -> float:
    """Return how long these orders take, in seconds, where nothing but their passes takes time.

    `cost` is called with a stage and a kind, "F", "B", "I" or "W", and returns the seconds of such a pass.
    """
    ends: dict[tuple[int, str, int], float] = {}
    free = dict.fromkeys(orders, 0.0)
    for action in merged(orders, last):
        rank = next(rank for rank, order in orders.items() if action in order)
        for part in action.sub_actions or (action,):
            stage, kind, k = part.stage_index, part.computation_type.value, part.microbatch_index
            if not part.is_compute_op:
                continue
            needs = {
                "F": [(stage - 1, "F", k)],
                "B": [(stage + 1, "I", k)],
                "I": [(stage + 1, "I", k)],
                "W": [],
            }[kind]
            begin = max([free[rank], *(ends[one] for one in needs if one in ends)])
            free[rank] = ends[stage, "I" if kind == "B" else kind, k] = begin + cost(stage, kind)
    return max(free.values())


def _nodes(schedule: str, stages: int) -> list[int]:
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [*range(WORKERS), *reversed(range(WORKERS))]
    return [k % WORKERS for k in range(stages)]


def measure(quick: bool) -> list[Figure]:
    """Return, for each schedule, how much longer a step takes than the schedule's arithmetic."""
    found, a_pass = [], PASS * floors.slowness()
    with dr.init_master_worker(world_size=WORKERS, quiet=True):
        for schedule, stages in SCHEDULES.items():
            pause = a_pass * WORKERS / stages

            def cost(stage: int, kind: str, pause: float = pause) -> float:
                # The first stage hands nothing back, so torch has it do all of a split backward pass at once.
                return pause * {"F": 1, "B": 2, "I": int(stage > 0), "W": 1 + int(stage == 0)}[kind]

            modules = [Sleeper(pause).to(dr.place(k, "cpu")) for k in _nodes(schedule, stages)]
            pipe = dr.parallel.pipeline(modules, MICRO, schedule, lambda output, target: output.sum())
            x = torch.ones(MICRO, 4, device=modules[0].weight.device, requires_grad=True)
            issued: list[float] = []

            def step(pipe: Any = pipe, x: torch.Tensor = x, issued: list[float] = issued) -> None:
                issued.append(seconds(lambda: pipe.step(x, return_outputs=False)))
                dr.synchronize()

            step()
            took = min(seconds(step) for _ in range(2 if quick else 4))
            wanted = time_of(orders_of(schedule, stages, WORKERS, MICRO), stages - 1, cost)
            work = MICRO * 3 * a_pass
            found.append(
                Figure(
                    f"pipeline, {schedule}, {stages} stages on {WORKERS} workers",
                    took / wanted,
                    "times its arithmetic",
                    1.1,
                    f"{took:.2f} s where the schedule says {wanted:.2f} s; bubble {1 - work / took:.0%}, "
                    f"by the schedule {1 - work / wanted:.0%}; issuing takes {min(issued):.2f} s",
                )
            )
    return found
