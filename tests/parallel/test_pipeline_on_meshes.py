"""Pipelines over meshes: scalers, and streams of the caller's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distruntime as dr
from fewer import fewer
from stages import four_gpus, same_gradients

__all__ = ["four_gpus"]

WIDTH = 6


def layers(stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(stages)]


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


@pytest.mark.parametrize("cut", ["tensor", "fsdp", "ddp"])
def test_a_scaler_over_stages_on_meshes(cut: str, four_gpus: None) -> None:
    """What overflows on one member of one stage skips the step of all members and stages."""
    shape = (2, 1, 2) if cut == "tensor" else (2, 2, 1)
    mesh = dr.init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
    parts = [mesh.select(pp=k) for k in (0, 1)]
    serial = layers(2)
    stages = [copy.deepcopy(own).to(part.device) for own, part in zip(serial, parts)]
    first: Any = stages[0][0].weight  # type: ignore[index]
    if cut == "tensor":
        for stage, part in zip(stages, parts):
            parallelize_module(stage, part["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif cut == "fsdp":
        for stage, part in zip(stages, parts):
            fully_shard(stage, mesh=part["dp"])
    else:
        stages = [
            nn.parallel.DistributedDataParallel(stage, process_group=part.get_group("dp"))  # type: ignore[misc]
            for stage, part in zip(stages, parts)
        ]
    scaler = torch.amp.GradScaler("remote", init_scale=1024.0)
    pipe = dr.parallel.pipeline(
        stages, 4, loss_fn=lambda out, target: scaler.scale(nn.functional.mse_loss(out, target))
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    plain = torch.optim.SGD(nn.Sequential(*serial).parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(8)
        optimizer.zero_grad()
        pipe.step(x.to(parts[0].device), target=y.to(parts[1].device))
        if step == 1:
            gradient = first.grad if cut == "ddp" else stages[0][0].weight.grad  # type: ignore[index]
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.member(1).view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.zero_grad()
            nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
            wanted = nn.utils.clip_grad_norm_([p for own in serial for p in own.parameters()], 0.1)
            torch.testing.assert_close(norm.cpu(), wanted, atol=1e-6, rtol=1e-5)
            plain.step()
    assert scaler.get_scale() == 512.0
    for stage, own in zip(stages, serial):
        for p, q in zip(stage.parameters(), own.parameters()):
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            torch.testing.assert_close(whole.detach().cpu(), q.detach(), atol=1e-6, rtol=1e-5)


# -- streams -------------------------------------------------------------------------------------------------


def late(x: torch.Tensor) -> torch.Tensor:
    import time

    time.sleep(0.02)
    return x + 0


class _Late(torch.autograd.Function):
    """Takes its time on the worker, forward and backward: nothing is there before it is waited for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return _there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _there(gradients[0])


_there: Any = dr.remote(late)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _Late.apply(x)  # type: ignore[no-untyped-call]


def homes(kind: str) -> list[Any]:
    """Return where the stages are, and their devices."""
    if kind == "places":
        return [torch.device(dr.place(k // 2, f"cuda:{k % 2}").device) for k in (0, 2, 3)]
    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    first, second = mesh.select(pp=0), mesh.select(pp=1)
    return [first, second, first]


@contextlib.contextmanager
def streams(at: list[Any], which: str) -> Iterator[None]:
    """Enter streams of the caller's own for all stages' places, or for that of one stage."""
    with contextlib.ExitStack() as stack:
        for k, home in enumerate(at):
            if which in ("all", str(k)):
                stack.enter_context(dr.Stream(getattr(home, "device", home)))
        yield


@pytest.mark.parametrize("which", fewer(["all", "0", "1", "in turn"], 4, "another schedule, 1 s"))
@pytest.mark.parametrize("kind", ["meshes", "places"])
def test_streams_of_the_callers_own(kind: str, which: str, four_gpus: None) -> None:
    """A step's gradients are read on the default streams, and the weights are written on yet others."""
    at, serial = homes(kind), layers(3)
    devices = [getattr(home, "device", home) for home in at]
    stages = [nn.Sequential(Slow(), copy.deepcopy(own)).to(device) for own, device in zip(serial, devices)]
    pipe = dr.parallel.pipeline(stages, 4, "GPipe", nn.functional.mse_loss)
    for step in range(2):
        x, y = batch(8)
        nn.functional.mse_loss(nn.Sequential(*serial)(x), y).backward()
        now = ("all", "none")[step] if which == "in turn" else which
        losses: list[torch.Tensor] = []
        with streams(at, now):
            output = pipe.step(x.to(devices[0]), target=y.to(devices[-1]), losses=losses)
        same_gradients(stages, serial)
        torch.testing.assert_close(output.cpu(), nn.Sequential(*serial)(x).detach(), atol=1e-6, rtol=1e-5)
        with torch.no_grad(), streams(at, "all"):
            for module in (*serial, *stages):
                for p in module.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
