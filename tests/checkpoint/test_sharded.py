"""DTensors in checkpoints: saved by their members, loaded onto the same mesh, another one, or as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distruntime as dr

WHOLE = torch.arange(64.0).reshape(8, 8)


def same(x: torch.Tensor, placements: list[Any]) -> bool:
    assert isinstance(x, DTensor) and list(x.placements) == placements
    return torch.equal(x.full_tensor().cpu(), WHOLE)


def test_dtensors_go_onto_other_meshes(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    fresh_session(world_size=2, simulate_cuda=2)
    mesh = dr.init_device_mesh("cuda", (2, 2))
    both = distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)])
    rows = torch.nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()]))
    plain = torch.ones(3, device=mesh.device)
    dr.save({"both": both, "rows": rows, "again": rows, "plain": plain}, tmp_path)
    index = json.loads((tmp_path / "distruntime.json").read_text(encoding="utf-8"))
    # One of several replicas is written.
    assert sum(name.startswith("rows") for name in index["tensors"]) == 2

    found = dr.load(tmp_path, place=mesh)
    assert same(found["both"], [Shard(0), Shard(1)]) and same(found["rows"], [Shard(0), Replicate()])
    assert isinstance(found["rows"], torch.nn.Parameter) and found["again"] is found["rows"]
    assert found["both"].to_local().member(1).place == mesh.places[1]

    dr.save({"both": both, "rows": rows}, tmp_path)
    other = dr.init_device_mesh("cpu", (1, 2))
    found = dr.load(tmp_path, place=other)
    assert same(found["both"], [Shard(0), Shard(1)]) and same(found["rows"], [Shard(0), Replicate()])
    line = dr.init_device_mesh("cuda", (4,))
    found = dr.load(tmp_path, place=line)
    assert same(found["both"], [Shard(0)]) and same(found["rows"], [Shard(0)])
    dr.save(found["rows"], tmp_path)
    assert same(dr.load(tmp_path, place=mesh), [Shard(0), Shard(0)])


def test_a_dtensor_comes_whole_to_a_place(session: object, tmp_path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = distribute_tensor(WHOLE, mesh, [Shard(1)]).requires_grad_()
    dr.save({"x": x}, tmp_path)
    here = dr.load(tmp_path, place="cpu")["x"]
    assert type(here) is torch.Tensor and torch.equal(here, WHOLE) and here.requires_grad
    there = dr.load(tmp_path, place=dr.place(1, "cpu"))["x"]
    assert there.place == dr.place(1, "cpu") and torch.equal(there.detach().cpu(), WHOLE)
    assert dr.load(tmp_path)["x"].place == dr.place(0, "cpu")


def test_a_model_of_fsdp_goes_on_with_other_members(session: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    expected = model(torch.ones(2, 4)).detach()
    mesh = dr.init_device_mesh("cpu", (2,))
    fully_shard(model.to(mesh.device), mesh=mesh)
    dr.save({"model": model}, tmp_path)
    again = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    again.load_state_dict(dr.load(tmp_path, place="cpu")["model"])
    torch.testing.assert_close(again(torch.ones(2, 4)).detach(), expected)
    one = dr.init_device_mesh("cpu", (1,))
    fully_shard(again.to(one.device), mesh=one)
    again.load_state_dict(dr.load(tmp_path, place=one)["model"])
    found = again(torch.ones(2, 4, device=one.device)).detach()
    torch.testing.assert_close(found.cpu(), expected)
