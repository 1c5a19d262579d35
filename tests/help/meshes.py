"""Meshes for the tests of DTensor, tensor parallelism and FSDP2: one session, three shapes, and what is
compared with serial code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distruntime as dr

SHAPES = {"2": ("cpu", (2,), ("tp",)), "4": ("cuda", (4,), ("tp",)), "2x2": ("cuda", (2, 2), ("dp", "tp"))}


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    """Two workers, each with a CPU and two simulated GPUs: up to four members."""
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield
    dr.shutdown()


@pytest.fixture(params=SHAPES)
def mesh(request: pytest.FixtureRequest, two_workers: None) -> dr.mesh.DeviceMesh:
    return make(request.param)


def make(shape: str) -> dr.mesh.DeviceMesh:
    kind, sizes, names = SHAPES[shape]
    return dr.init_device_mesh(kind, sizes, mesh_dim_names=names)


def copied(module: nn.Module, mesh: dr.mesh.DeviceMesh) -> nn.Module:
    """Return a copy of a module on every member of a mesh."""
    return copy.deepcopy(module).to(mesh.device)


def whole(value: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's global value as every member has it."""
    value = value.detach()
    return dr.shards(value.full_tensor() if isinstance(value, DTensor) else value)  # type: ignore[arg-type]


def same(value: Any, wanted: torch.Tensor, atol: float = 1e-5) -> None:
    for found in whole(value):
        torch.testing.assert_close(found, wanted.detach(), atol=atol, rtol=1e-5)


def same_gradients(model: nn.Module, serial: nn.Module, atol: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), serial.parameters()):
        if not q.requires_grad:
            assert p.grad is None, name
            continue
        assert p.grad is not None and q.grad is not None, name
        same(p.grad, q.grad, atol)


def same_parameters(model: nn.Module, serial: nn.Module, atol: float = 1e-5) -> None:
    for p, q in zip(model.parameters(), serial.parameters()):
        same(p, q, atol)


class MLP(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
