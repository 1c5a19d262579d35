"""Random programs over 2 nodes and 3 streams each: every read sees what a serial run gives.

Integers, so that equal means equal. Products of random size on the same streams, of which nobody reads the
result, delay what follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import distruntime as dr
from fewer import fewer

NODES, STREAMS, SIZE = 2, 3, 6
INSTRUCTIONS = 40
PROGRAMS = 125  # for each seed; eight seeds make a thousand


@pytest.fixture(scope="module", autouse=True)
def _two_nodes() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=NODES)
    yield
    dr.shutdown()


class Program:
    """One random program, run on the workers and, step by step beside it, here."""

    def __init__(
        self, choose: random.Random, streams: list[list[dr.Stream]], stuff: list[torch.Tensor], draws: bool
    ) -> None:
        self.choose, self.streams, self.stuff, self.draws = choose, streams, stuff, draws
        self.remote: list[list[torch.Tensor]] = [[], []]
        self.local: list[list[torch.Tensor]] = [[], []]
        self.generators = [torch.Generator().manual_seed(7) for _ in range(NODES)]
        self.reads: list[tuple[dr.types.Fetched, torch.Tensor]] = []
        self.events: list[dr.Event] = []
        dr.manual_seed(7)

    def step(self) -> None:
        """Issue one instruction, on a random stream of a random node."""
        node = self.choose.randrange(NODES)
        stream = self.choose.choice(self.streams[node])
        mine, here = self.remote[node], self.local[node]
        with dr.stream(stream):
            if self.choose.random() < 0.3:
                rows = self.stuff[node][: len(self.stuff[node]) // self.choose.choice((32, 4, 1))]
                rows @ rows.T
            if len(mine) < 2:
                self.add(node, torch.arange(SIZE, device="remote"), torch.arange(SIZE))
                return
            k, j = self.choose.randrange(len(mine)), self.choose.randrange(len(mine))
            kind = self.choose.randrange(11)
            if kind == 0:
                self.add(node, mine[k] + mine[j], here[k] + here[j])
            elif kind == 1:
                self.add(node, mine[k] * 3 - 1, here[k] * 3 - 1)
            elif kind in (2, 3):
                mine[k].add_(mine[j]), here[k].add_(here[j])
            elif kind == 4:
                mine[k][1:4].mul_(-1), here[k][1:4].mul_(-1)
            elif kind == 5:
                mine[k].copy_(mine[j]), here[k].copy_(here[j])
            elif kind == 6:  # a view, which lives on when its base is gone
                self.add(node, mine[k].flip(0)[:].view(2, 3).view(-1), here[k].flip(0)[:].view(2, 3).view(-1))
                self.add(node, mine[k].view(-1), here[k].view(-1))
            elif kind == 7:
                self.drop(node, k)
            elif kind == 8 and not self.draws:
                here_now = torch.full((SIZE,), self.choose.randrange(99))
                self.add(node, here_now.to("remote"), here_now)
            elif kind == 8:
                self.add(
                    node,
                    torch.randint(0, 99, (SIZE,), device="remote"),
                    torch.randint(0, 99, (SIZE,), generator=self.generators[node]),
                )
            elif kind == 9:
                self.reads.append((dr.fetch_async(mine[k]), here[k].clone()))
            elif self.events and self.choose.random() < 0.5:
                self.choose.choice(self.events).wait()
            else:
                self.events.append(stream.record_event())

    def add(self, node: int, there: torch.Tensor, here: torch.Tensor) -> None:
        """Keep a value; past twelve an old one goes."""
        self.remote[node].append(there)
        self.local[node].append(here)
        if len(self.remote[node]) > 12:
            self.drop(node, self.choose.randrange(12))

    def drop(self, node: int, k: int) -> None:
        """Let go of a value, whatever stream still works with it."""
        del self.remote[node][k], self.local[node][k]

    def agrees(self) -> bool:
        """Read everything, and compare with what happened here."""
        reads = [(there.result(timeout=60), here) for there, here in self.reads]
        reads += list(
            zip(
                dr.fetch([t for values in self.remote for t in values]),
                [t for values in self.local for t in values],
            )
        )
        return all(torch.equal(there, here) for there, here in reads)


def run(seed: int, programs: int, *, draws: bool = True, delay: int = 1) -> int:
    """Return how many of so many programs agree with the serial run.

    Without `draws` they draw no random numbers, as a GPU draws others than a CPU. The products that delay are
    `delay` times as large each way.
    """
    choose = random.Random(seed)
    streams = [
        [dr.default_stream(node), *(dr.Stream(node) for _ in range(STREAMS - 1))] for node in range(NODES)
    ]
    stuff = []
    for node in range(NODES):
        with dr.on(node):
            stuff.append(torch.randn(256 * delay, 256 * delay))
    good = 0
    for _ in range(programs):
        program = Program(choose, streams, stuff, draws)
        for _ in range(INSTRUCTIONS):
            program.step()
        good += program.agrees()
    dr.synchronize()
    return good


@pytest.mark.parametrize("seed", fewer(range(8), 4, "another seed, 6 s"))
def test_every_read_sees_what_a_serial_run_gives(seed: int) -> None:
    assert run(seed, PROGRAMS) == PROGRAMS


def test_these_programs_race_without_the_rules() -> None:
    dr.set_implicit_waits(False)
    try:
        assert run(0, 20) < 20
    finally:
        dr.set_implicit_waits(True)
