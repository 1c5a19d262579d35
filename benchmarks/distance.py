"""A worker far away: a proxy on loopback holds every byte for 1, 10 and 50 ms each way."""

from __future__ import annotations

import time

import torch

import distruntime as dr

from .harness import Delay, Figure, daemon
from .training_step import stepper

DELAYS = (0.0, 0.001, 0.010, 0.050)


def _issue_rate(count: int) -> float:
    """Return operations issued per second, the wait for the worker not counted: an operator returns before it has run."""
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
    """Return the seconds of a training run whose losses are read asynchronously, each a hundred steps after it was issued."""
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
    rates: dict[float, float] = {}
    times: dict[float, float] = {}
    with daemon("--insecure") as address:
        for _ in range(1 if quick else 3):  # the best of three: what is compared is the distance, not the machine's mood
            for delay in DELAYS:
                proxy = Delay(address, delay)
                with dr.init_master_worker(workers=[proxy.address], insecure=True, quiet=True):
                    rates[delay] = max(rates.get(delay, 0.0), _issue_rate(count))
                    times[delay] = min(times.get(delay, 1e9), _training(steps))
                proxy.close()
    figures = []
    for delay in DELAYS[1:]:
        ms = f"{delay * 1e3:.0f} ms each way"
        note = f"{rates[delay]:,.0f} a second, undelayed {rates[0.0]:,.0f}"
        figures.append(Figure(f"operations issued a second / undelayed, {ms}", rates[delay] / rates[0.0], "x", 0.95, note, most=False))
        note = f"{times[delay]:.2f} s for {steps:,} steps, undelayed {times[0.0]:.2f} s"
        figures.append(Figure(f"training, loss read asynchronously / undelayed, {ms}", times[delay] / times[0.0], "x", 1.05, note))
    return figures
