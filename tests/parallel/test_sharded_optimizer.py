"""`dr.parallel.ShardedOptimizer`: equal to what one process does with the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distruntime as dr
from fewer import fewer

Mesh = Any


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """Return a mesh of two replicas of two members, all on one worker."""
    dr.shutdown()
    with dr.init_master_worker(world_size=1, simulate_cuda=4):
        yield dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "node"))


def model() -> nn.Module:
    torch.manual_seed(0)
    # Neither 4 nor 2 members divide all of these.
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3)).double()


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 5, dtype=torch.float64) for _ in range(count)]


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True, "fused": True}),
]


def trained_here(make: Callable[[nn.Module], Any], steps: int) -> tuple[nn.Module, Any]:
    here = model()
    optimizer = make(here)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x in batches(steps):
        here(x).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return here, optimizer


def alike(found: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        for shard in dr.shards(p.detach()):
            torch.testing.assert_close(shard, q.detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("reduce", fewer([None, "avg", "sum"], 3, "another reduction"))
@pytest.mark.parametrize("over", ["node", None])
def test_as_the_whole_optimizer(
    mesh: Mesh, kind: type[torch.optim.Optimizer], options: dict[str, Any], reduce: Any, over: str | None
) -> None:
    here, _ = trained_here(lambda m: kind(m.parameters(), **options), 5)
    there = model().to(mesh.device)
    optimizer = dr.parallel.ShardedOptimizer(
        there.parameters(), kind, mesh[over] if over else mesh, reduce=reduce, **options
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x in batches(5):
        # With `reduce` each member has a quarter of the batch, and else all of it.
        given = x.to(mesh.device) if reduce is None else dr.from_shards(list(x.chunk(4)), mesh)
        loss = there(given).square().mean()
        (loss / 4 if reduce == "sum" else loss).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    alike(there, here)
    assert there[0].weight.grad is None


def test_each_member_keeps_its_share_of_the_state(mesh: Mesh) -> None:
    there = nn.Linear(400, 100).to(mesh.device)
    optimizer = dr.parallel.ShardedOptimizer(there.parameters(), torch.optim.AdamW, mesh)
    there(torch.ones(1, 400).to(mesh.device)).sum().backward()
    optimizer.step()
    states = [s for p in optimizer._shares for s in optimizer._inner.state[p].values() if s.dim()]
    assert sum(s.numel() for s in states) == 2 * (400 * 100 + 100) / 4


def test_the_state_dict_is_that_of_the_whole_optimizer(mesh: Mesh) -> None:
    make = lambda m: torch.optim.AdamW(m.parameters(), lr=0.05)  # noqa: E731
    here, whole = trained_here(make, 3)
    there = model().to(mesh.device)
    optimizer = dr.parallel.ShardedOptimizer(there.parameters(), torch.optim.AdamW, mesh["node"], lr=0.05)
    there.load_state_dict(here.state_dict())
    optimizer.load_state_dict(whole.state_dict())
    again, expected = optimizer.state_dict(), whole.state_dict()
    for k, values in expected["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(dr.fetch(again["state"][k][name]), value)
    assert optimizer.param_groups[0]["lr"] == whole.param_groups[0]["lr"] != 0.05
    for x in batches(2):
        for m, o, given in ((here, whole, x), (there, optimizer, x.to(mesh.device))):
            m(given).square().mean().backward()
            o.step()
            o.zero_grad()
    alike(there, here)


def test_groups_and_parameters_without_a_gradient(mesh: Mesh) -> None:
    here, there = model(), model().to(mesh.device)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        return [{"params": m[0].parameters(), "lr": 0.3}, {"params": m[2].parameters()}]

    a = torch.optim.AdamW(groups(here), lr=0.01)
    b = dr.parallel.ShardedOptimizer(groups(there), torch.optim.AdamW, mesh, lr=0.01)
    for k, x in enumerate(batches(4)):
        for m, o, given in ((here, a, x), (there, b, x.to(mesh.device))):
            m[2].requires_grad_(k != 1)
            m(given).square().mean().backward()
            o.step()
            o.zero_grad()
    alike(there, here)


class Scaled(nn.Module):
    """It ends with a factor that is one number, as the temperature of CLIP is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = model(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.factor
        return found


@pytest.mark.parametrize("reduce", [None, "avg"])
def test_a_parameter_without_dimensions(mesh: Mesh, reduce: Any) -> None:
    here, there = Scaled(), Scaled().to(mesh.device)
    a = torch.optim.AdamW(here.parameters(), lr=0.05)
    b = dr.parallel.ShardedOptimizer(
        there.parameters(), torch.optim.AdamW, mesh["node"], reduce=reduce, lr=0.05
    )
    for k, x in enumerate(batches(4)):
        if k == 2:
            # The state goes there and back.
            state = b.state_dict()
            for name, value in a.state_dict()["state"][0].items():
                assert state["state"][0][name].shape == value.shape
                torch.testing.assert_close(dr.fetch(state["state"][0][name]), value)
            b = dr.parallel.ShardedOptimizer(
                there.parameters(), torch.optim.AdamW, mesh, reduce=reduce, lr=0.01
            )
            b.load_state_dict(a.state_dict())
        own = x.to(mesh.device) if reduce is None else dr.from_shards(list(x.chunk(4)), mesh)
        for m, o, given in ((here, a, x), (there, b, own)):
            m(given).square().mean().backward()
            o.step()
            o.zero_grad()
    alike(there, here)


def test_parameters_in_bfloat16_with_masters_in_float32(mesh: Mesh) -> None:
    here, there = model(), model().to(mesh.device, torch.bfloat16)
    whole = torch.optim.SGD(here.parameters(), lr=1e-3)
    optimizer = dr.parallel.ShardedOptimizer(
        there.parameters(), torch.optim.SGD, mesh, master_dtype=torch.float32, lr=1e-3
    )
    with torch.no_grad():
        for p, q in zip(here.parameters(), there.parameters()):
            p.copy_(dr.fetch(q).float())
    # A step is too small for bfloat16 to see. The masters add them up.
    for _ in range(100):
        for p, q in zip(here.parameters(), there.parameters()):
            p.grad, q.grad = torch.full_like(p, 0.5), torch.full_like(q, 0.5)
        whole.step()
        optimizer.step()
    for p, q in zip(here.parameters(), there.parameters()):
        assert q.dtype == torch.bfloat16
        torch.testing.assert_close(dr.fetch(q.detach()), p.detach().to(torch.bfloat16), atol=1e-2, rtol=1e-2)
    assert all(share.dtype == torch.float32 for share in optimizer._shares)


def test_masters_go_on_where_they_were(mesh: Mesh, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, dr.parallel.ShardedOptimizer]:
        m = model().to(mesh.device, torch.bfloat16)
        return m, dr.parallel.ShardedOptimizer(
            m.parameters(), torch.optim.AdamW, mesh, master_dtype=torch.float32, lr=1e-4
        )

    def train(m: nn.Module, o: dr.parallel.ShardedOptimizer) -> None:
        for x in batches(5):
            m(x.to(mesh.device, torch.bfloat16)).square().mean().backward()
            o.step()
            o.zero_grad()

    first, second = make(), make()
    train(*first)
    dr.save({"model": first[0], "optimizer": first[1]}, tmp_path)
    saved = dr.load(tmp_path, place=mesh)
    second[1].load_state_dict(saved["optimizer"])
    second[0].load_state_dict(saved["model"])
    train(*first)
    train(*second)
    for p, q in zip(first[1]._shares, second[1]._shares, strict=True):
        for a, b in zip(dr.shards(p.detach()), dr.shards(q.detach())):
            assert torch.equal(a, b)
    # The optimizer without shares takes the state, too.
    plain = torch.optim.AdamW(model().parameters())
    plain.load_state_dict(dr.load(tmp_path, place="cpu")["optimizer"])
    assert plain.param_groups[0]["lr"] == 1e-4


def test_groups_that_are_added(mesh: Mesh) -> None:
    here, there = model(), model().to(mesh.device)
    a = torch.optim.AdamW(here[0].parameters(), lr=0.01)
    b = dr.parallel.ShardedOptimizer(there[0].parameters(), torch.optim.AdamW, mesh["node"], lr=0.01)
    for k, x in enumerate(batches(4)):
        if k == 2:
            a.add_param_group({"params": here[2].parameters(), "lr": 0.3})
            b.add_param_group({"params": there[2].parameters(), "lr": 0.3})
            assert b.param_groups[1]["betas"] == (0.9, 0.999)
        for m, o, given in ((here, a, x), (there, b, x.to(mesh.device))):
            m(given).square().mean().backward()
            o.step()
            m.zero_grad()
    alike(there, here)
    with pytest.raises(dr.errors.UsageError, match="got one on cpu"):
        b.add_param_group({"params": here[3].parameters()})
    assert len(b.param_groups) == 2
    b.load_state_dict(a.state_dict())
    a.add_param_group({"params": here[3].parameters()})
    here(x).square().mean().backward()
    a.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        b.load_state_dict(a.state_dict())


def test_what_cannot_be_sharded(mesh: Mesh) -> None:
    there = model().to(mesh.device)
    with pytest.raises(dr.errors.NotSupportedError, match="LBFGS needs whole parameters"):
        dr.parallel.ShardedOptimizer(there.parameters(), torch.optim.LBFGS, mesh)
    with pytest.raises(dr.errors.UsageError, match=r"got one on cpu: model\.to\(mesh\.device\)"):
        dr.parallel.ShardedOptimizer(model().parameters(), torch.optim.SGD, mesh, lr=1.0)
    with pytest.raises(dr.errors.UsageError, match=r'reduce is None, "avg" or "sum", got .mean.'):
        mean: Any = "mean"
        dr.parallel.ShardedOptimizer(there.parameters(), torch.optim.SGD, mesh, reduce=mean, lr=1.0)
    sgd = torch.optim.SGD(there.parameters(), lr=1.0)
    for kind in (sgd, "SGD", nn.Linear):
        with pytest.raises(
            dr.errors.UsageError, match=r"takes its class and the arguments, .*AdamW, mesh, lr=1e-3"
        ):
            dr.parallel.ShardedOptimizer(there.parameters(), kind, mesh)  # type: ignore[arg-type]
    there = fully_shard(nn.Linear(4, 4).to(mesh.device), mesh=mesh)
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"got a DTensor: fully_shard and parallelize_module shard"
    ):
        dr.parallel.ShardedOptimizer(there.parameters(), torch.optim.SGD, mesh, lr=1.0)


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
