"""A convolution that is cut over four workers: does the exchange of borders run beside the interior?

Four workers on two cores cannot show it by computing. So in the first figures workers sleep in proportion
to the outputs that they compute, on a network that is slow in proportion to the bytes. The last one computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import distruntime as dr
from distruntime.layers.exchange import windowed
from distruntime.layers.halos import HaloPlan, Slab, plan_halos, volume
from distruntime.layers.windows import Same, Window
from distruntime_worker.collectives.data_channel.gloo import Gloo

from .harness import Figure, in_turn, seconds

_SIZE = (1, 4, 64, 64)
_PARTS = (1, 1, 2, 2)
# The serial work takes so many seconds, and so many bytes travel in a second.
_WORK, _RATE = 8.0, 4_000


class Slow(dr.distributed.DataChannel):
    """gloo, on which a received tensor takes its bytes' time: a slow network that needs no processor."""

    capabilities = Gloo.capabilities

    def __init__(self, membership: dr.distributed.Membership) -> None:
        super().__init__(membership)
        self._gloo = Gloo(membership)

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        """Send at once."""
        self._gloo.send(data, to, tag)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        """Receive slowly."""
        self._gloo.receive(data, source, tag)
        time.sleep(data.numel() * data.element_size() / _RATE)

    def abort(self) -> None:
        """End what runs."""
        self._gloo.abort()

    def close(self) -> None:
        """End the channel."""
        self._gloo.close()


def _nap(x: torch.Tensor, size: list[int], long: float) -> torch.Tensor:
    time.sleep(long)
    return x.new_zeros(size)


def _plan(split: bool) -> HaloPlan:
    window = Window(3, before=1, after=1)
    cuts = tuple(tuple(n // parts for _ in range(parts)) for n, parts in zip(_SIZE, _PARTS))
    return plan_halos(cuts, _PARTS, (Same(), Same(), window, window), split)


def _asleep(rounds: int) -> list[Figure]:
    on = dr.mesh.Partition([0, 1, 2, 3], _PARTS)
    window = Window(3, before=1, after=1)
    xs = on.scatter(torch.ones(_SIZE))
    each = _WORK / volume(tuple((0, n) for n in _SIZE))
    sleep = dr.remote(_nap, returns=lambda x, size, long: x.new_empty(size))

    def compute(k: int, x: torch.Tensor, slab: Slab) -> torch.Tensor:
        size = [b - a for a, b in slab.outputs]
        # A function may write its arguments, so it would wait for whoever else reads the shard.
        slept: torch.Tensor = sleep(x.sum(), size, volume(slab.outputs) * each)
        return slept

    def run(overlap: bool) -> Callable[[], float]:
        def once() -> float:
            def step() -> None:
                ys = windowed(xs, on, (Same(), Same(), window, window), compute, overlap=overlap)
                dr.synchronize()
                del ys

            return seconds(step)

        once()
        return once

    plan = _plan(True)
    # Each place receives a row, a column and a corner of float32, and it sends as much. Its stream does
    # them one after the other.
    exchange = 2 * plan.moved // 4 * 4 / _RATE
    work = _WORK / 4
    beside, after = run(True), run(False)
    ratio, quick, slow = in_turn(beside, after, rounds)
    note = (
        f"{plan.moved * 4:,} bytes move, as the arithmetic of halos says; a quarter of the work is "
        f"{work * 1e3:.0f} ms, a place's borders take, both ways, {exchange * 1e3:.0f} ms"
    )
    return [
        Figure("sleeping: a cut convolution / a quarter of the serial work", quick / work, "x", 1.15, note),
        Figure(
            "sleeping: the same, after the exchange instead of beside it / work and borders",
            slow / (work + exchange),
            "x",
            1.15,
            f"{slow * 1e3:.0f} ms, beside it {quick * 1e3:.0f} ms",
        ),
        Figure("sleeping: beside the interior / after the exchange", ratio, "x", None),
    ]


def _computing(rounds: int) -> list[Figure]:
    """The work of a layer, forward and backward, on four workers that share this machine's cores."""
    torch.manual_seed(0)
    on, x = dr.mesh.Partition([0, 1, 2, 3], _PARTS), torch.randn(8, 32, 128, 128)
    serial, cut = nn.Conv2d(32, 32, 3, padding=1), dr.nn.Conv2d(on, 32, 32, 3, padding=1)
    one = dr.place(0)
    whole, shards = x.to(one), [t.requires_grad_() for t in on.scatter(x)]
    there = serial.to(one)

    def step(call: Callable[[], list[Any]]) -> Callable[[], float]:
        def run() -> None:
            torch.autograd.backward([y.square().sum() for y in call()])
            dr.synchronize()

        return lambda: seconds(run)

    @dr.program
    def recorded(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in xs]
        losses = [y.square().sum() for y in cut(leaves)]
        return list(torch.autograd.grad(losses, [*leaves, *cut.parameters()]))

    def replayed() -> None:
        recorded(shards)
        dr.synchronize()

    def issued() -> None:
        torch.autograd.backward([y.square().sum() for y in cut(shards)])

    alone, parted = step(lambda: [there(whole)]), step(lambda: cut(shards))
    alone(), parted()
    ratio, ours, theirs = in_turn(parted, alone, rounds)
    for _ in range(4):
        replayed()
    again, played, _ = in_turn(lambda: seconds(replayed), alone, rounds)
    times = []
    for _ in range(rounds):
        times.append(seconds(issued))
        dr.synchronize()
    what = f"of the {ours * 1e3:.0f} ms, the master issues for {min(times) * 1e3:.0f}"
    note = f"{ours * 1e3:.0f} ms, {theirs * 1e3:.0f} ms; forward and backward; {what}"
    name = "on four workers of this machine / on one of them"
    return [
        Figure(f"computing: {name}", ratio, "x", None, note),
        Figure(
            f"computing: recorded as a program, {name}",
            again,
            "x",
            None,
            f"{played * 1e3:.0f} ms; {recorded.replays} replays",
        ),
    ]


def measure(quick: bool) -> list[Figure]:
    """Return the figures."""
    dr.distributed.register_data_channel("slow", Slow)
    with dr.init_master_worker(world_size=4, data_channel="slow", quiet=True):
        figures = _asleep(1 if quick else 3)
    with dr.init_master_worker(world_size=4, quiet=True):
        return [*figures, *_computing(1 if quick else 5)]
