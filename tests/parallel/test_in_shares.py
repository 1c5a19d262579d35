"""What docs/meshes.md has as recipes: an optimizer's state in shares, and the moving average in shares."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distruntime as dr
from in_shares import InShares, Partial

Mesh = Any


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """Return a mesh of two replicas of two members, all on one worker."""
    dr.shutdown()
    with dr.init_master_worker(world_size=1, simulate_cuda=4):
        yield dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "node"))


class Scaled(nn.Module):
    """It ends with a factor that is one number. Neither 4 nor 2 members divide all of its sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.factor
        return found


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 5, dtype=torch.float64) for _ in range(count)]


def alike(found: nn.Module, expected: nn.Module) -> None:
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        for shard in dr.shards(p.detach()):
            torch.testing.assert_close(shard, q.detach(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "fused": True}),
    ],
)
@pytest.mark.parametrize("reduce", [None, "avg"])
def test_it_steps_as_the_whole_optimizer(
    mesh: Mesh, kind: type[torch.optim.Optimizer], options: dict[str, Any], reduce: str | None
) -> None:
    here, there = Scaled(), Scaled().to(mesh.device)
    whole = kind(here.parameters(), **options)
    own = InShares(there.parameters(), kind, mesh, Partial(reduce) if reduce else None, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (whole, own.optimizer)]
    for k, x in enumerate(batches(5)):
        # With `reduce` each member has a quarter of the batch, and else all of it.
        given = dr.from_shards(list(x.chunk(4)), mesh) if reduce else x.to(mesh.device)
        for model, optimizer, batch in ((here, whole, x), (there, own, given)):
            model.inner[2].requires_grad_(k != 1)
            model(batch).square().mean().backward()
            optimizer.step()  # type: ignore[attr-defined]
            model.zero_grad()
        for schedule in schedules:
            schedule.step()
    alike(there, here)


def test_each_member_keeps_its_share_of_the_state(mesh: Mesh) -> None:
    there = nn.Linear(400, 100).to(mesh.device)
    own = InShares(there.parameters(), torch.optim.AdamW, mesh)
    there(torch.ones(1, 400).to(mesh.device)).sum().backward()
    own.step()
    states = [s for p in own.shares for s in own.optimizer.state[p].values() if s.dim()]
    assert sum(s.to_local().numel() for s in states) == 2 * (400 * 100 + 100) / 2


def test_shares_in_float32_of_parameters_in_bfloat16(mesh: Mesh) -> None:
    here, there = Scaled(), Scaled().to(mesh.device, torch.bfloat16)
    own = InShares(there.parameters(), torch.optim.SGD, mesh, dtype=torch.float32, lr=1e-3)
    before = [p.detach().to(torch.bfloat16).float() for p in here.parameters()]
    # A step is too small for bfloat16 to see. The shares add them up.
    for _ in range(100):
        for q in there.parameters():
            q.grad = torch.full_like(q, 0.5)
        own.step()
    for p, q in zip(before, there.parameters()):
        torch.testing.assert_close(dr.fetch(q.detach()).float(), p - 0.05, atol=1e-2, rtol=1e-2)


def test_a_checkpoint_brings_the_state_onto_another_mesh(mesh: Mesh, tmp_path: Path) -> None:
    def train(model: nn.Module, own: InShares) -> None:
        for x in batches(3):
            model(x.to(own.mesh.device)).square().mean().backward()
            own.step()
            model.zero_grad()

    there = Scaled().to(mesh.device)
    first = InShares(there.parameters(), torch.optim.AdamW, mesh, lr=0.05)
    train(there, first)
    dr.save({"model": there, "optimizer": first.optimizer}, tmp_path)
    line = dr.init_device_mesh("cuda", (4,))
    saved, again = dr.load(tmp_path, place=line), Scaled().to(line.device)
    again.load_state_dict(saved["model"])
    second = InShares(again.parameters(), torch.optim.AdamW, line, lr=0.05)
    second.optimizer.load_state_dict(saved["optimizer"])
    assert all(isinstance(s, DTensor) for s in second.optimizer.state[second.shares[0]].values() if s.dim())
    train(there, first)
    train(again, second)
    for p, q in zip(there.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(dr.shards(p.detach())[0], dr.shards(q.detach())[0])


def test_the_average_in_shares_is_the_plain_one(mesh: Mesh) -> None:
    """The page on meshes has it as a recipe."""
    here = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    there = fully_shard(copy.deepcopy(here).to(mesh.device), mesh=mesh)
    plain = AveragedModel(here, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain.update_parameters(here)
    with torch.no_grad():
        average = [p.detach().clone() for p in there.parameters()]
        for k in range(5):
            for p in (*here.parameters(), *there.parameters()):
                p.add_(0.1 * k).mul_(1.1)
            plain.update_parameters(here)
            torch._foreach_lerp_(average, [p.detach() for p in there.parameters()], 1 - 0.9)
    for own, expected in zip(dr.fetch(average), plain.module.parameters(), strict=True):
        torch.testing.assert_close(own, expected.detach())
