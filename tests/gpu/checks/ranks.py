"""Check 27: functions that run as ranks, on shards that other processes share with the worker (CUDA IPC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distruntime as dr
from box import Box
from listing import check


def _double(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Write into the shard that the worker holds, and return a tensor of this process."""
    x.mul_(2)
    return x + 1, x.get_device()


def _trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        optimizer.step()
    return loss.detach()


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


@check(
    27,
    "ranks on GPUs",
    does=(
        "runs functions as ranks on the GPUs of one worker, lets them write into its shards, and trains with "
        "DistributedDataParallel there"
    ),
    failure=(
        "what a rank has written is not at the worker, or a rank cannot open its shard: the memory is handed "
        "over by CUDA IPC, which containers may forbid. Look at worker/distruntime_worker/python/handing.py. "
        "A wrong loss: each rank must have its own GPU, see children.py there."
    ),
    seconds=90,
)
def ranks(box: Box) -> None:
    with box.session() as places:
        count = min(2, len(places))
        mesh = dr.init_device_mesh(places[:count], (count,), mesh_dim_names=("data",))
        shards = [torch.full((4, 3), float(k + 1)) for k in range(count)]
        x = dr.from_shards([shard.to(place) for shard, place in zip(shards, places)], mesh)
        doubled, devices = dr.spmd(mesh, _double)(x)
        for k, shard in enumerate(shards):
            box.require(torch.equal(x.member(k).cpu(), shard * 2), f"rank {k} wrote elsewhere")
            box.require(
                torch.equal(doubled.member(k).cpu(), shard * 2 + 1), f"rank {k} returned another value"
            )
        box.saw(f"{count} ranks wrote into the worker's shards, on the devices {dr.fetch(devices)}")
        draw = torch.Generator().manual_seed(4)
        data = [(torch.randn(8, 16, generator=draw), torch.randn(8, 4, generator=draw)) for _ in range(count)]
        model: Any = _model().to(mesh.device)
        inputs, targets = (
            dr.from_shards([pair[k].to(place) for pair, place in zip(data, places)], mesh) for k in (0, 1)
        )
        losses = dr.spmd(mesh, _trained)(model, inputs, targets)
        here = _model()
        optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            parts = [nn.functional.mse_loss(here(a), b) for a, b in data]
            torch.stack(parts).mean().backward()
            optimizer.step()
        worst = max(abs(losses.member(k).item() - parts[k].item()) for k in range(count))
        weight = (model[0].weight.member(0).cpu() - here[0].weight).abs().max().item()
        box.saw(f"DistributedDataParallel: losses differ by {worst:.1e}, weights by {weight:.1e}")
        box.require(max(worst, weight) < 1e-3, "the ranks trained another model than this process")
