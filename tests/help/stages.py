"""Stages for the tests of pipelines: four places, where stages go, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distruntime as dr

# These schedules have two stages on each place, in the shape of a V.
IN_A_V = ("ZBVZeroBubble", "DualPipeV")


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    """Two workers with two simulated GPUs each: four places, and meshes of them."""
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield
    dr.shutdown()


def places(schedule: str, stages: int = 4) -> list[dr.types.Place]:
    gpus = [dr.place(node, f"cuda:{k}") for node in (0, 1) for k in (0, 1)]
    if schedule in IN_A_V:
        return [gpus[2 * k] for k in (0, 1, 1, 0)]
    return gpus[:stages]


def whole(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return dr.shards(t.full_tensor())[0] if isinstance(t, DTensor) else t.cpu()


def same_gradients(stages: Sequence[nn.Module], serial: Sequence[nn.Module], atol: float = 1e-6) -> None:
    for k, (stage, own) in enumerate(zip(stages, serial)):
        for (name, p), q in zip(stage.named_parameters(), own.parameters()):
            assert p.grad is not None and q.grad is not None, f"{k} {name}"
            torch.testing.assert_close(
                whole(p.grad), q.grad, atol=atol, rtol=1e-5, msg=lambda m, at=(k, name): f"{at}: {m}"
            )
