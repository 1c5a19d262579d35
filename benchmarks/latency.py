"""Reading a ready value with `.item()`, against 16 bytes there and back over a bare pipe."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable

import torch

import distruntime as dr

from . import floors
from .harness import Figure, daemon, in_turn, seconds

READS = 300
BAR = 1.5


def _compare(
    name: str, session: dr.types.Session, pipe: floors.Pipe, rounds: int, bar: float | None
) -> Figure:
    with session:
        value = torch.ones(3, device="remote").sum()

        def median(work: Callable[[], object]) -> float:
            return statistics.median(seconds(work) for _ in range(READS))

        value.item(), pipe.ask()
        ratio, ours, theirs = in_turn(lambda: median(value.item), lambda: median(pipe.ask), rounds)
    note = f"{ours * 1e6:.0f} us, pipe {theirs * 1e6:.0f} us"
    return Figure(f".item() of a ready value, {name} / bare pipe", ratio, "x", bar, note)


def measure(quick: bool) -> list[Figure]:
    """Return the figures for ipc and for tcp with and without keys."""
    rounds = 3 if quick else 15
    with tempfile.TemporaryDirectory() as folder, floors.pipe() as pipe:
        figures = [_compare("ipc", dr.init_master_worker(world_size=1, quiet=True), pipe, rounds, BAR)]
        with daemon("--insecure") as address:
            session = dr.init_master_worker(workers=[address], insecure=True, quiet=True)
            figures.append(_compare("tcp", session, pipe, rounds, BAR))
        os.environ["DISTRUNTIME_KEY"] = f"{folder}/key"
        with daemon() as address:
            session = dr.init_master_worker(workers=[address], quiet=True)
            figures.append(_compare("tcp with keys", session, pipe, rounds, None))
        del os.environ["DISTRUNTIME_KEY"]
    return figures
