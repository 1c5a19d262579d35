"""What a trace costs while it is on: the same work with `dr.trace` around it and without, in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import distruntime as dr

from .harness import Figure, in_turn, seconds

OPERATIONS, STEPS, READS = 30_000, 60, 1500
# A trace that is on may cost so much.
BAR = 1.1


def _traced(work: Callable[[], None], folder: Path) -> float:
    """Return how long work takes while a trace is on. To begin and to write it is not counted."""
    trace = dr.trace(folder / "step.json", quiet=True)
    trace.start()
    took = seconds(work)
    trace.stop()
    return took


def measure(quick: bool) -> list[Figure]:
    """Return the figures; one worker, started here."""
    scale, rounds = (10, 3) if quick else (1, 9)
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory() as name,
        dr.init_master_worker(world_size=1, quiet=True),
    ):
        folder = Path(name)
        x: Any = torch.ones(20, 20, device="remote")
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        model = model.to("remote")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(64, 64, device="remote")

        def operators() -> None:
            for _ in range(OPERATIONS // scale):
                x + x
            dr.synchronize()

        def steps() -> None:
            for _ in range(STEPS * 10 // scale):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            dr.synchronize()

        def reads() -> None:
            for _ in range(READS // scale):
                (x + x).sum().item()

        for title, work in (
            ("operators of 20 x 20, drained", operators),
            ("training steps of an MLP, drained", steps),
            ("an addition, a sum, and a read", reads),
        ):
            work()
            ratio, on, off = in_turn(partial(_traced, work, folder), partial(seconds, work), rounds)
            note = f"{on * 1e3:.0f} ms traced, {off * 1e3:.0f} ms not"
            figures.append(Figure(f"traced / not: {title}", ratio, "x", BAR, note))
    return figures
