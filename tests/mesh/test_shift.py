"""Tensors that move along a dimension of a mesh, with their gradients; and torch's permute_tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import _functional_collectives as functional

import distruntime as dr


@pytest.fixture(scope="module")
def mesh() -> Iterator[dr.mesh.DeviceMesh]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=3)
    yield dr.init_device_mesh("cuda", (2, 3), mesh_dim_names=("dp", "pipe"))
    dr.shutdown()


def numbered(mesh: dr.mesh.DeviceMesh) -> torch.Tensor:
    return dr.from_shards([torch.full((2,), float(k)) for k in range(6)], mesh)


def first(x: torch.Tensor) -> list[float]:
    return [shard.reshape(-1)[0].item() for shard in dr.shards(x)]


@pytest.mark.parametrize(
    ("by", "wrap", "wanted"),
    [
        (1, True, [2, 0, 1, 5, 3, 4]),
        (-1, True, [1, 2, 0, 4, 5, 3]),
        (4, True, [2, 0, 1, 5, 3, 4]),
        (0, False, [0, 1, 2, 3, 4, 5]),
        (1, False, [0, 0, 1, 0, 3, 4]),
        (-2, False, [2, 0, 0, 5, 0, 0]),
        (3, False, [0] * 6),
    ],
)
def test_tensors_move_along_every_line(
    mesh: dr.mesh.DeviceMesh, by: int, wrap: bool, wanted: list[int]
) -> None:
    lines = mesh.lines("pipe")
    assert first(dr.lines.shift(lines, numbered(mesh), by, wrap=wrap)) == wanted
    # It is the adjoint of itself the other way: <shift(x), y> is <x, shift back(y)>.
    x, y = numbered(mesh).requires_grad_(), numbered(mesh) + 10
    (dr.lines.shift(lines, x, by, wrap=wrap) * y).sum().backward()
    assert x.grad is not None
    back = first(dr.lines.shift(lines, y, -by, wrap=wrap))
    assert first(x.grad) == back


def test_any_shape_and_dtype_and_one_number(mesh: dr.mesh.DeviceMesh) -> None:
    lines = mesh.lines("dp")
    assert first(dr.lines.shift(lines, mesh.coordinate("dp"))) == [1, 1, 1, 0, 0, 0]
    x = dr.from_shards([torch.arange(6).view(2, 3).to(torch.int16) + k for k in range(6)], mesh)
    moved = dr.shards(dr.lines.shift(lines, x.t()))
    assert torch.equal(moved[4], (torch.arange(6).view(2, 3).to(torch.int16) + 1).t())


def test_it_is_one_instruction_in_the_order_of_the_program(mesh: dr.mesh.DeviceMesh) -> None:
    x = numbered(mesh)
    for _ in range(3):
        x = dr.lines.shift(mesh.lines("pipe"), x) + 1
    assert first(x) == [k + 3.0 for k in range(6)]


def test_permute_tensor_takes_any_permutation(mesh: dr.mesh.DeviceMesh) -> None:
    group = mesh.get_group("pipe")
    assert first(functional.permute_tensor(numbered(mesh), [1, 0, 2], group)) == [1, 0, 2, 4, 3, 5]
    assert first(functional.permute_tensor(numbered(mesh), [1, 2, 0], (mesh, 1))) == [2, 0, 1, 5, 3, 4]
    with pytest.raises(dr.errors.UsageError, match=r"a line of 3 members takes each rank once.*\[0, 0, 1\]"):
        functional.permute_tensor(numbered(mesh), [0, 0, 1], group)


def test_permute_tensor_of_shards_of_different_shapes(mesh: dr.mesh.DeviceMesh) -> None:
    x = dr.from_shards([torch.full((k + 1,), float(k)) for k in range(6)], mesh)
    with pytest.raises(dr.errors.UsageError, match=r"are a line: member 0: \(1,.*Pad them"):
        functional.permute_tensor(x, [1, 2, 0], mesh.get_group("pipe"))


def test_what_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    with pytest.raises(dr.errors.UsageError, match=r"whole number of ranks, got 0\.5"):
        dr.lines.shift(mesh.lines("pipe"), numbered(mesh), 0.5)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="runs along the lines of a mesh"):
        dr.lines.shift(mesh, numbered(mesh))  # type: ignore[arg-type]
    with pytest.raises(dr.errors.PlacementError, match="is a local tensor"):
        dr.lines.shift(mesh.lines("pipe"), torch.ones(2))
