"""A training goes on after a load onto a mesh of another size and shape, as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distruntime as dr
from fewer import fewer
from meshes import make, two_workers

__all__ = ["two_workers"]

# 12 rows are cut evenly by 2, 3 and 4 members. The tests of other widths cut unevenly.
WIDTH = 12
Trained = tuple[nn.Module, torch.optim.Optimizer]


def three() -> dr.mesh.DeviceMesh:
    places = [dr.place(0, "cuda:0"), dr.place(0, "cuda:1"), dr.place(1, "cuda:0")]
    return dr.init_device_mesh(places, (3,), mesh_dim_names=("tp",))


def backwards() -> dr.mesh.DeviceMesh:
    """Return a mesh of the same devices in the other order, whose dimensions have changed places."""
    places = [dr.place(node, f"cuda:{k}") for node in (1, 0) for k in (1, 0)]
    return dr.init_device_mesh(places, (2, 2), mesh_dim_names=("tp", "dp"))


MESHES: dict[str, Callable[[], dr.mesh.DeviceMesh]] = {
    "2": lambda: make("2"),
    "3": three,
    "4": lambda: make("4"),
    "2x2": lambda: make("2x2"),
    "tp x dp": backwards,
}


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()) * self.scale


def fsdp(model: Net, mesh: dr.mesh.DeviceMesh) -> Trained:
    for part in (model.a, model.b, model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def tensor_parallel(model: Net, mesh: dr.mesh.DeviceMesh) -> Trained:
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def both(model: Net, mesh: dr.mesh.DeviceMesh) -> Trained:
    tensor_parallel(model, mesh)
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def replicas(model: Net, mesh: dr.mesh.DeviceMesh) -> Trained:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(trained: Trained, mesh: dr.mesh.DeviceMesh, number: int) -> None:
    model, optimizer = trained
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number), device="cpu")
    model(x.to(mesh.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(t: Any) -> torch.Tensor:
    found: torch.Tensor = (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu()
    return found


@pytest.mark.parametrize(
    ("before", "on", "after", "onto", "width"),
    fewer(
        [
            pytest.param(*case, WIDTH)
            for case in [
                (fsdp, "4", fsdp, "3"),
                (fsdp, "2", fsdp, "4"),
                (both, "2x2", fsdp, "4"),
                (fsdp, "4", both, "2x2"),
                (both, "2x2", both, "tp x dp"),
                (both, "2x2", tensor_parallel, "2"),
                (tensor_parallel, "4", fsdp, "3"),
            ]
        ]
        + [
            pytest.param(fsdp, "4", fsdp, "3", 5),
            pytest.param(fsdp, "3", fsdp, "2", 7),
        ],
        4,
        "other cuts, 2 s each",
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_next_step_is_that_of_the_training_that_went_on(
    before: Any, on: str, after: Any, onto: str, width: int, two_workers: None, tmp_path: Path
) -> None:
    mesh, other, serial = MESHES[on](), MESHES[onto](), Net(width)
    trained = before(copy.deepcopy(serial).to(mesh.device), mesh)
    plain = serial, torch.optim.AdamW(serial.parameters(), lr=1e-2)
    for number in range(2):
        step(trained, mesh, number)
        plain[1].zero_grad()
        serial(
            torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
        ).square().mean().backward()
        plain[1].step()
    dr.save({"model": trained[0], "optimizer": trained[1]}, tmp_path)
    again = after(Net(width).to(other.device), other)
    # Another learning rate shows whether the groups come from the checkpoint.
    again[1].param_groups[0]["lr"] = 1.0
    one = next(again[0].parameters())
    # FSDP2 has its own dimension first, wherever it stands in the mesh.
    state = dr.load(tmp_path, place=one.device_mesh if isinstance(one, DTensor) else other)
    again[0].load_state_dict(state["model"])
    again[1].load_state_dict(state["optimizer"])
    for number in range(2, 4):
        step(trained, mesh, number)
        step(again, other, number)
        plain[1].zero_grad()
        serial(
            torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
        ).square().mean().backward()
        plain[1].step()
    for p, q, r in zip(again[0].parameters(), trained[0].parameters(), serial.parameters()):
        torch.testing.assert_close(whole(p), whole(q), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(whole(p), r.detach(), atol=1e-5, rtol=1e-4)


def test_what_members_hold_alike_goes_anywhere(two_workers: None, tmp_path: Path) -> None:
    mesh, value = make("4"), torch.randn(3, 5)
    kept = value.t().to(mesh.device)
    dr.save({"x": kept, "tied": kept, "n": torch.nn.Parameter(value.to(mesh.device))}, tmp_path)
    found = dr.load(tmp_path, place=three())
    assert found["x"] is found["tied"] and isinstance(found["n"], torch.nn.Parameter)
    for shard in dr.shards(found["x"]):
        assert torch.equal(shard, value.t()) and shard.stride() == value.t().stride()
    # A write to one member's part leaves the others alone.
    found["x"].member(1).add_(1)
    assert torch.equal(dr.shards(found["x"])[0], value.t())
    here = dr.load(tmp_path, place="cpu")["x"]
    assert type(here) is torch.Tensor and torch.equal(here, value.t())
    there = dr.load(tmp_path, place=dr.place(1, "cpu"))["n"]
    assert there.place == dr.place(1, "cpu") and torch.equal(there.detach().cpu(), value)
    assert torch.equal(dr.load(tmp_path)["n"].detach().cpu(), value)


def test_what_differs_from_member_to_member_needs_as_many(two_workers: None, tmp_path: Path) -> None:
    mesh = make("4")
    dr.save({"alike": torch.ones(2, device=mesh.device), "k": mesh.coordinate("tp")}, tmp_path)
    assert [s.item() for s in dr.shards(dr.load(tmp_path, place=make("2x2"))["k"])] == [0, 1, 2, 3]
    with pytest.raises(
        dr.errors.UsageError,
        match=r"'k' was on a mesh of 4 members, .* got one of 3. Its members held different values",
    ):
        dr.load(tmp_path, place=three())
    with pytest.raises(
        dr.errors.UsageError, match=r"'k' was on a mesh of 4 members, and needs a mesh of as many"
    ):
        dr.load(tmp_path, place="cpu")
