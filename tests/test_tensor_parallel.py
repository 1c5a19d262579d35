"""torch's own tensor parallelism on a mesh: forward, gradients and steps as in serial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

import distruntime as dr
from meshes import MLP, copied, make, mesh, same, same_gradients, same_parameters, two_workers

__all__ = ["mesh", "two_workers"]

X = torch.arange(128.0).reshape(8, 16) / 50 - 1
IDS = torch.tensor([[0, 7, 8, 15, 16, 23, 24, 31], [31, 1, 2, 3, 30, 9, 17, 25]])  # the borders of the shards among them
Model = tuple[nn.Module, nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.a, self.b, self.drop = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.b(F.gelu(self.a(self.norm(x)))))
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.e, self.o = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o(self.e(x))
        return out


def parallel(mesh: dr.DeviceMesh, make: Callable[[], nn.Module], plan: Any) -> Model:
    serial = make()
    model = copied(serial, mesh)
    parallelize_module(model, mesh["tp"], plan)
    return model, serial


def check(mesh: dr.DeviceMesh, models: Model, x: torch.Tensor) -> None:
    model, serial = models
    out, wanted = model(x.to(mesh.device)), serial(x)
    same(out, wanted)
    (out**2).mean().backward()
    (wanted**2).mean().backward()
    same_gradients(model, serial)


PLANS: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor]] = {
    "columns, rows": (MLP, {"0": ColwiseParallel(), "2": RowwiseParallel()}, X),
    "columns, gathered": (MLP, {"0": ColwiseParallel(output_layouts=Replicate())}, X),
    "rows, of what all have": (MLP, {"0": RowwiseParallel(input_layouts=Replicate())}, X),
    "vocabulary": (Words, {"e": RowwiseParallel(input_layouts=Replicate())}, IDS),
    "vocabulary, sharded on": (
        Words,
        {
            "e": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "o": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        IDS,
    ),
    "embedding's columns": (Words, {"e": ColwiseParallel(output_layouts=Replicate())}, IDS),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(mesh: dr.DeviceMesh, name: str) -> None:
    build, plan, x = PLANS[name]
    check(mesh, parallel(mesh, build, plan), x)


def test_sequence_parallel_and_prepared_inputs(mesh: dr.DeviceMesh) -> None:
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(output_layouts=Shard(1)),
        "drop": SequenceParallel(use_local_output=False),
    }
    model, serial = parallel(mesh, Block, plan)
    parallelize_module(model, mesh["tp"], PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()))
    check(mesh, (model, serial), torch.arange(256.0).reshape(2, 8, 16) / 100 - 1)


def test_loss_parallel(mesh: dr.DeviceMesh) -> None:
    head = {"e": RowwiseParallel(input_layouts=Replicate()), "o": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    model, serial = parallel(mesh, Words, head)
    target = IDS.flip(0)
    with loss_parallel():
        loss = F.cross_entropy(model(IDS.to(mesh.device)).flatten(0, 1), target.to(mesh.device).flatten(0, 1))
        loss.backward()
    wanted = F.cross_entropy(serial(IDS).flatten(0, 1), target.flatten(0, 1))
    wanted.backward()
    same(loss, wanted)
    same_gradients(model, serial)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(two_workers: None, name: str) -> None:
    mesh = make("2")
    model, serial = parallel(mesh, MLP, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](serial.parameters())
    for _ in range(3):
        (model(X.to(mesh.device)) ** 2).mean().backward()
        (serial(X) ** 2).mean().backward()
        same(clip_grad_norm_(model.parameters(), 0.05), clip_grad_norm_(serial.parameters(), 0.05))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, serial)
