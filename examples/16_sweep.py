"""A sweep: eight trainings over three workers, each worker with the next one as soon as it is done.

    $ python examples/16_sweep.py
    learning rate 0.001  width 16  accuracy 22.0 %
    learning rate 0.001  width 64  accuracy 31.0 %
    learning rate 0.010  width 16  accuracy 68.0 %
    learning rate 0.010  width 64  accuracy 83.0 %
    learning rate 0.100  width 16  accuracy 87.0 %
    learning rate 0.100  width 64  accuracy 89.0 %
    learning rate 1.000  width 16  accuracy 87.0 %
    learning rate 1.000  width 64  accuracy 86.0 %
    the best: learning rate 0.1, width 64
    8 trainings on 3 nodes

A training is a function. It runs on its worker from its first line to its last, and only its accuracy comes
back. `await` waits for one of them while the others go on.
"""

import asyncio
import itertools

import torch
from torch.nn.functional import cross_entropy

import distruntime as dr

NODES = 3
SWEEP = [*itertools.product((0.001, 0.01, 0.1, 1.0), (16, 64))]


def train(rate: float, width: int) -> float:
    """Train a small model; return its accuracy on rows that it has not seen."""
    torch.manual_seed(0)
    x = torch.randn(600, 16)
    y = x[:, :8].argmax(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(net(x[:500]), y[:500]).backward()
        optimizer.step()
    return float((net(x[500:]).argmax(1) == y[500:]).float().mean())


async def worker(node: int, tasks: list[tuple[float, int]], found: dict[tuple[float, int], float]) -> int:
    """Have a node run trainings until there are none left; return how many it has run."""
    run = dr.remote(train, node=node, returns=object)
    count = 0
    while tasks:
        task = tasks.pop()
        found[task] = await run(*task)
        count += 1
    return count


async def main() -> None:
    found: dict[tuple[float, int], float] = {}
    tasks = SWEEP[::-1]
    counts = await asyncio.gather(*(worker(node, tasks, found) for node in range(NODES)))
    for rate, width in SWEEP:
        print(
            f"learning rate {rate:.3f}  width {width}  accuracy {found[rate, width]:.1%}".replace("%", " %")
        )
    rate, width = max(SWEEP, key=lambda task: found[task])
    print(f"the best: learning rate {rate:g}, width {width}")
    print(f"{sum(counts)} trainings on {NODES} nodes")


if __name__ == "__main__":
    with dr.init_master_worker(world_size=NODES, quiet=True):
        asyncio.run(main())
