"""The script of torchrun's in the box: DistributedDataParallel on four ranks of two hosts. Its rank 0 says
whether the parameters are those that one process computes alone.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 4, 32


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 16)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), x, x.sin().sum(1, keepdim=True)


def trained(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def say(**words: object) -> None:
    if dist.get_rank() == 0:
        # One write: lines of other ranks come between otherwise.
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, x, y = made()
    rank, world = dist.get_rank(), dist.get_world_size()
    say(at="round 1", world=world)
    if options.get("waits"):
        signal.pause()
    found = trained(DistributedDataParallel(model), x.chunk(world)[rank], y.chunk(world)[rank])
    wanted = trained(*made())
    near = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted))
    say(result="right" if near and world == 4 else f"{world} ranks, and parameters near: {near}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
