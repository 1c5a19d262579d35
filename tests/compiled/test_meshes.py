"""A compiled module on a mesh: one instruction for all members between collectives, and the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import distruntime as dr
from dynamo import DYNAMO_WARNS, TORCH
from meshes import make, two_workers

__all__ = ["two_workers"]
pytestmark = DYNAMO_WARNS


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))  # type: ignore[no-any-return]


def _tensor_parallel(block: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    return parallelize_module(block, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})


def _sequence_parallel(block: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block, mesh["tp"], plan)


def _fully_sharded(block: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    return fully_shard(block, mesh=mesh)


def _in_two_ways(block: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    return fully_shard(_tensor_parallel(block, mesh), mesh=mesh["dp"])


def _replicated(block: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    return block


WAYS = {
    "plain": (_replicated, "2"),
    "tensor parallel": (_tensor_parallel, "2"),
    "tensor parallel of two dimensions": (_tensor_parallel, "2x2"),
    "sequence parallel": (_sequence_parallel, "2"),
    "fully_shard": (_fully_sharded, "4"),
    "both": (_in_two_ways, "2x2"),
}


def _values(tensor: Any) -> list[torch.Tensor]:
    tensor = tensor.detach()
    return dr.shards(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _trained(compiler: Callable[[Any], Any], way: str, lower: torch.dtype | None) -> list[torch.Tensor]:
    prepare, shape = WAYS[way]
    mesh = make(shape)
    model = prepare(copy.deepcopy(Block()).to(mesh.device), mesh)
    step, found = compiler(model), []
    # Tensor parallelism leaves the norm a plain tensor, and foreach refuses both in one call.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    for k in range(5):
        x: torch.Tensor = torch.linspace(-1, 1 + k, 2 * 8 * 16).view(2, 8, 16).to(mesh.device)
        if way == "sequence parallel":
            x = distribute_tensor(x, mesh["tp"], [Shard(1)]).to_local()
        with torch.autocast("remote", dtype=lower, enabled=lower is not None):
            out = step(x)
        loss = out.float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += _values(out)
    for parameter in model.parameters():
        found += _values(parameter)
    return found


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="distruntime")


@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_on_a_mesh(two_workers: None, way: str, lower: torch.dtype | None) -> None:
    if TORCH < (2, 13) and way not in ("plain", "fully_shard"):
        pytest.skip("Dynamo of torch 2.11 cannot trace how a tensor becomes a DTensor of a mesh's class")
    found, expected = _trained(_compiled, way, lower), _trained(lambda f: f, way, lower)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert [k for k, (a, b) in enumerate(zip(found, expected)) if not torch.equal(a, b)] == []
    assert any(graph.replays for graph in dr.profiler.compiled_graphs()), dr.profiler.compiled_graphs()


@pytest.mark.usefixtures("two_workers")
def test_a_gradient_of_two_parameters_is_one_for_each() -> None:
    """torch's own `aot_eager` gives local DTensors one for both."""
    mesh = dr.init_device_mesh("cpu", (2,))
    local = torch.ones(2, 4).to(mesh.device)
    x, *values = (distribute_tensor(local, mesh, [Replicate()]) for _ in range(3))
    one, other = map(nn.Parameter, values)
    step = torch.compile(lambda: (x + one + other).sin().sum(), backend="distruntime")
    for _ in range(5):
        one.grad = other.grad = None
        step().backward()
        assert isinstance(one.grad, DTensor) and isinstance(other.grad, DTensor)
        before = other.grad.full_tensor().tolist()
        one.grad.mul_(2)
        assert other.grad.full_tensor().tolist() == before
