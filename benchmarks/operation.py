"""Op by op, drained, on one worker, against what torch itself charges."""

from __future__ import annotations

import torch

import distruntime as dr

from . import floors
from .harness import Figure, in_turn, seconds

OPERATIONS = 30_000


def measure(quick: bool) -> list[Figure]:
    """Return the figure; one worker, started here."""
    count, rounds = (OPERATIONS // 10, 3) if quick else (OPERATIONS, 9)
    with dr.init_master_worker(world_size=1, quiet=True):
        x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")

        def drained() -> float:
            def run() -> None:
                for _ in range(count):
                    x + y
                dr.synchronize()

            return seconds(run) / count

        drained()
        ratio, ours, theirs = in_turn(drained, floors.operation, rounds)
    note = f"{ours * 1e6:.1f} us an operation ({1 / ours:,.0f} a second), floor {theirs * 1e6:.1f} us"
    return [Figure("operation, drained / empty dispatch", ratio, "x", 2.5, note)]
