"""A worker far away: a proxy on loopback holds every byte for 1, 10 and 50 ms each way."""

from __future__ import annotations

import statistics
import time

import torch

import distruntime as dr

from .harness import Figure, daemon, delayed
from .training_step import stepper

DELAYS = (0.0, 0.001, 0.010, 0.050)


def _issue_rate(count: int) -> float:
    """Return operations issued per second, the wait for the worker not counted: an operator returns before it
    has run.
    """
    x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")
    x + y
    dr.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        x + y
    rate = count / (time.perf_counter() - start)
    dr.synchronize()
    return rate


def _training(steps: int) -> float:
    """Return the seconds of a training run whose losses are read asynchronously, each a hundred steps after
    it was issued.
    """
    step = stepper("remote")
    step().item()
    start = time.perf_counter()
    losses, pending = [], []
    for k in range(steps):
        pending.append(dr.fetch_async(step()))
        if k >= 400:
            losses.append(pending[k - 400].result())
    losses += [future.result() for future in pending[len(losses) :]]
    assert len(losses) == steps
    return time.perf_counter() - start


def measure(quick: bool) -> list[Figure]:
    """Return, for each delay, both figures against the undelayed run through the same proxy."""
    count, steps = (5_000, 300) if quick else (40_000, 8_000)
    rates: dict[float, list[float]] = {delay: [] for delay in DELAYS}
    times: dict[float, list[float]] = {delay: [] for delay in DELAYS}
    with daemon("--insecure") as address:
        for _ in range(1 if quick else 3):
            for delay in DELAYS:
                with (
                    delayed(address, delay) as far,
                    dr.init_master_worker(workers=[far], insecure=True, quiet=True),
                ):
                    rates[delay].append(_issue_rate(count))
                    times[delay].append(_training(steps))
    rate, near = statistics.median(rates[0.0]), statistics.median(times[0.0])
    figures = []
    for delay in DELAYS[1:]:
        ms = f"{delay * 1e3:.0f} ms each way"
        ratio = statistics.median(far / here for far, here in zip(rates[delay], rates[0.0]))
        note = f"{statistics.median(rates[delay]):,.0f} a second, undelayed {rate:,.0f}"
        figures.append(
            Figure(f"operations issued a second / undelayed, {ms}", ratio, "x", 0.95, note, most=False)
        )
        ratio = statistics.median(far / here for far, here in zip(times[delay], times[0.0]))
        note = f"{statistics.median(times[delay]):.2f} s for {steps:,} steps, undelayed {near:.2f} s"
        figures.append(
            Figure(f"training, loss read asynchronously / undelayed, {ms}", ratio, "x", 1.05, note)
        )
    return figures
