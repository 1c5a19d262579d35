"""Streams: two chains of products side by side, a download beside a chain, and what the rules cost the
master.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import distruntime as dr

from .harness import Figure, daemon, in_turn, seconds

SIZE, PRODUCTS = 384, 60
NBYTES = 64 << 20
CALLS = 2000


def _chain(stream: dr.Stream, a: torch.Tensor, products: int = PRODUCTS) -> torch.Tensor:
    with dr.stream(stream):
        x = a
        for _ in range(products):
            x = x @ a
    return x


def _chains(a: torch.Tensor, *streams: dr.Stream) -> None:
    kept = [_chain(stream, a) for stream in streams]
    dr.synchronize(1)
    del kept


def _overlap(rounds: int) -> list[Figure]:
    """On node 0, which has one stream, and node 1, which has three."""
    first, second = dr.Stream(1, "cpu"), dr.Stream(1, "cpu")
    matrices = []
    for node in (0, 1):
        with dr.on(node):
            matrices.append(torch.randn(SIZE, SIZE) / SIZE**0.5)
    plain, a = matrices

    def one() -> float:
        return seconds(lambda: _chains(a, first, first))

    def two() -> float:
        return seconds(lambda: _chains(a, first, second))

    def unstreamed() -> float:
        x = plain

        def run() -> None:
            nonlocal x
            x = plain
            for _ in range(2 * PRODUCTS):
                x = x @ plain
            dr.synchronize(0)

        return seconds(run)

    one(), two(), unstreamed()
    ratio, alone, both = in_turn(one, two, rounds)
    note = f"{alone * 1e3:.0f} ms on one stream, {both * 1e3:.0f} ms on two"
    figures = [
        Figure(
            f"two chains of products ({SIZE} x {SIZE}), on one stream / on two",
            ratio,
            "x",
            1.6,
            note,
            most=False,
        )
    ]
    ratio, mine, other = in_turn(one, unstreamed, rounds)
    note = f"{mine * 1e3:.0f} ms, {other * 1e3:.0f} ms"
    return [
        *figures,
        Figure("one stream on a node that has several / on a node that has one", ratio, "x", 1.1, note),
    ]


def _copy(rounds: int) -> Figure:
    side = dr.Stream(1, "cpu")
    with dr.on(1):
        a, large = torch.randn(SIZE, SIZE) / SIZE**0.5, torch.randn(NBYTES // 4)
    compute = dr.Stream(1, "cpu")

    def chain() -> float:
        return seconds(lambda: _chains(a, compute))

    def download() -> float:
        with dr.stream(side):
            return seconds(lambda: large.cpu())

    def both() -> float:
        def run() -> None:
            x = _chain(compute, a)
            with dr.stream(side):
                large.cpu()
            dr.synchronize(1)
            del x

        return seconds(run)

    def longer() -> float:
        return max(chain(), download())

    both(), longer()
    ratio, total, alone = in_turn(both, longer, rounds)
    note = (
        f"{total * 1e3:.0f} ms, the longer alone {alone * 1e3:.0f} ms, the download {download() * 1e3:.0f} ms"
    )
    return Figure(
        "a chain of products with a 64 MiB download beside it / the longer of the two", ratio, "x", 1.3, note
    )


def _cost(rounds: int) -> list[Figure]:
    here, there = dr.Stream(1, "cpu"), dr.Stream(1, "cpu")
    with dr.on(1):
        x, y = torch.ones(4), torch.ones(4)
    with dr.on(0):
        u, v = torch.ones(4), torch.ones(4)
    events = [dr.Event() for _ in range(CALLS)]

    def per_call(work: Callable[[], None]) -> float:
        dr.synchronize()
        return seconds(work) / CALLS

    def ordinary() -> float:
        def run() -> None:
            with dr.stream(here):
                for _ in range(CALLS):
                    x + y

        return per_call(run)

    def plain() -> float:
        def run() -> None:
            for _ in range(CALLS):
                u + v

        return per_call(run)

    def record() -> float:
        def run() -> None:
            for event in events:
                event.record(here)

        return per_call(run)

    def wait() -> float:
        # Each waits for another instruction, else it would be known already and cost nothing.
        dr.synchronize()
        total = 0.0
        for event in events:
            with dr.stream(here):
                x + y
            event.record(here)
            start = time.perf_counter()
            event.wait(there)
            total += time.perf_counter() - start
        return total / CALLS

    record(), wait(), ordinary(), plain()
    figures = []
    for name, cost in (("record an event", record), ("wait for an event", wait)):
        ratio, mine, other = in_turn(cost, ordinary, rounds)
        figures.append(
            Figure(
                f"{name} / an ordinary instruction",
                ratio,
                "x",
                2.0,
                f"{mine * 1e6:.1f} us, {other * 1e6:.1f} us",
            )
        )
    ratio, mine, other = in_turn(ordinary, plain, rounds)
    figures.append(
        Figure(
            "an instruction on a node with several streams / with one",
            ratio,
            "x",
            None,
            f"{mine * 1e6:.1f} us, {other * 1e6:.1f} us",
        )
    )
    return figures


def measure(quick: bool) -> list[Figure]:
    """Return the figures of streams, on two workers with one thread of torch's each."""
    rounds = 3 if quick else 9
    with daemon() as one, daemon() as two, dr.init_master_worker(workers=[one, two], quiet=True):
        return [*_overlap(rounds), _copy(rounds), *_cost(rounds)]
