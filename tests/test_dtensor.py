"""torch's DTensor over a mesh's tensors: every way from one layout to another, its operators, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, ones, rand, zeros

import distruntime as dr
from meshes import make, mesh, same, two_workers

__all__ = ["mesh", "two_workers"]

X = torch.arange(128.0).reshape(8, 16) / 9 - 3
LAYOUTS = [Replicate(), Shard(0), Shard(1)]


def laid_out(mesh: dr.DeviceMesh, layout: tuple[object, ...]) -> DTensor:
    """Return a DTensor whose whole is X; of a partial one each member has its share."""
    kept = [Replicate() if isinstance(p, Partial) else p for p in layout]
    local = distribute_tensor(X.to(mesh.device), mesh, kept).to_local()  # type: ignore[arg-type]
    for dim, p in enumerate(layout):
        if isinstance(p, Partial):
            local = local / mesh.size(dim)
    return DTensor.from_local(local, mesh, layout, run_check=False)  # type: ignore[arg-type]


def test_every_layout_and_back(mesh: dr.DeviceMesh) -> None:
    for layout in itertools.product(LAYOUTS, repeat=mesh.ndim):
        same(distribute_tensor(X.to(mesh.device), mesh, layout), X)
        same(distribute_tensor(X.to(mesh.device), mesh, layout, src_data_rank=None), X)
    same(distribute_tensor(X, mesh, [Shard(0)] * mesh.ndim), X)


def test_every_redistribution(mesh: dr.DeviceMesh) -> None:
    sources = itertools.product([*LAYOUTS, Partial()], repeat=mesh.ndim)
    for source in sources if mesh.ndim == 1 else itertools.islice(sources, 0, None, 2):
        given = laid_out(mesh, source)
        for target in itertools.product(LAYOUTS, repeat=mesh.ndim):
            found = given.redistribute(mesh, target)
            same(found, X)
            for dim, p in enumerate(target):
                if isinstance(p, Shard) and len({q for q in target if isinstance(q, Shard)}) == mesh.ndim:
                    assert found.to_local().shape[p.dim] == X.shape[p.dim] // mesh.size(dim)


def test_each_member_has_the_part_that_is_its_own(mesh: dr.DeviceMesh) -> None:
    parts = dr.shards(distribute_tensor(X.to(mesh.device), mesh, [Shard(0)] * mesh.ndim).to_local())  # type: ignore[arg-type]
    for part, wanted in zip(parts, X.chunk(mesh.size())):
        assert torch.equal(part, wanted)


def test_gradients_of_redistributions(mesh: dr.DeviceMesh) -> None:
    for source, target in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1))):
        t = distribute_tensor(X.to(mesh.device), mesh, [source] * mesh.ndim).requires_grad_()
        (t.redistribute(mesh, [target] * mesh.ndim) ** 2).sum().backward()
        assert t.grad is not None
        same(t.grad, 2 * X)


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(0),
    "amax": lambda t: t.amax(0),
    "var": lambda t: t.var(0),
    "norm": lambda t: t.norm(),
    "softmax over shards": lambda t: t.softmax(0),
    "softmax": lambda t: t.softmax(1),
    "sort": lambda t: t.sort(0)[0],
    "cumsum": lambda t: t.cumsum(0),
    "mm": lambda t: t @ t.t(),
    "slice": lambda t: t[2:4],
    "select": lambda t: t[3],
    "reshape": lambda t: t.reshape(4, 2, 16),
    "cat": lambda t: torch.cat([t, t]),
    "topk": lambda t: t.topk(2, 0)[0],
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "layer_norm": lambda t: F.layer_norm(t, (16,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_shards(two_workers: None, name: str) -> None:
    mesh, operator = make("2"), OPERATORS[name]
    same(operator(distribute_tensor(X.to(mesh.device), mesh, [Shard(0)])), operator(X))


def test_factories_and_metadata(mesh: dr.DeviceMesh) -> None:
    shard = [Shard(0)] * mesh.ndim
    same(ones(8, 16, device_mesh=mesh, placements=shard), torch.ones(8, 16))
    same(zeros(8, 16, device_mesh=mesh, placements=shard), torch.zeros(8, 16))
    t = distribute_tensor(X.to(mesh.device), mesh, shard)
    assert t.device == mesh.device and t.shape == X.shape and t.to_local().device == mesh.device
    assert "DTensor" in repr(t) and f"member 0 of {mesh.size()}" in repr(t)
    same(DTensor.from_local(X.to(mesh.device), mesh, [Replicate()] * mesh.ndim, run_check=True), X)


def test_uneven_shards_are_refused_and_say_where_they_are_not(two_workers: None) -> None:
    mesh = make("2")
    with pytest.raises(dr.NotSupportedError, match=r"member 0: \(4, 3\), member 1: \(3, 3\).*multiple.*distruntime.primitives"):
        distribute_tensor(torch.ones(7, 3), mesh, [Shard(0)])
    with pytest.raises(dr.NotSupportedError, match="different shapes"):
        DTensor.from_local(torch.ones(7, 3, device=mesh.device), mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)])
    for factory in (ones, zeros, rand):
        with pytest.raises(dr.NotSupportedError, match=r"dimension 0 of \(7, 3\) .* by 2 members.*distruntime.primitives"):
            factory(7, 3, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(dr.NotSupportedError, match=r"dimension 0 of \(6,\)"):
        ones(6, device_mesh=make("2x2"), placements=[Shard(0), Shard(0)])


def test_tensors_that_are_not_on_the_mesh_are_refused(two_workers: None) -> None:
    mesh = make("2")
    with pytest.raises(dr.PlacementError, match=r"a DTensor on 2 members on nodes 0, 1 .* lives on node 0 .*dr.from_shards"):
        DTensor.from_local(torch.ones(2, device="remote"), mesh, [Shard(0)], run_check=False)
    with pytest.raises(dr.UsageError, match=r"lives on node 0 .*x.to\(mesh.device\)"):
        distribute_tensor(torch.ones(2, device="remote"), mesh, [Shard(0)])
    with pytest.raises(dr.UsageError, match=r"of no mesh of distruntime's: make the mesh by distruntime.init_device_mesh"):
        distribute_tensor(torch.ones(2), torch.distributed.init_device_mesh("remote", (2,)), [Shard(0)])


def test_dtensors_beside_plain_tensors_say_what_they_are(two_workers: None) -> None:
    """As an optimizer has them whose state was loaded by its own `load_state_dict`; "a local tensor on remote:7" was said of it."""
    mesh = make("2")
    t = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(dr.PlacementError, match=r"`other\[0\]` \(4,\) is a DTensor.*plain tensors on 2 members.*\n.*foreach=False"):
        torch._foreach_add_([torch.ones(2, device=mesh.device)], [t])


def test_a_local_tensor_is_each_members_own(two_workers: None) -> None:
    """It went to the current place, where nothing of the mesh could use it; torch sends it to the mesh's device."""
    mesh, local = make("2"), torch.ones(2, requires_grad=True)
    t = DTensor.from_local(local, mesh, [Shard(0)])
    same(t, torch.ones(4))
    t.full_tensor().sum().backward()
    assert local.grad is not None and local.grad.tolist() == [1.0, 1.0]
    with mesh:
        t = DTensor.from_local(torch.ones(2), placements=[Shard(0)])
    same(t, torch.ones(4))


def test_two_meshes_do_not_mix(two_workers: None) -> None:
    one, other = make("2"), dr.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    assert one != other and hash(one) == hash(make("2")) and one == make("2")
    a, b = (distribute_tensor(X.to(m.device), m, [Shard(0)]) for m in (one, other))
    with pytest.raises((RuntimeError, ValueError, dr.PlacementError)):
        a + b


def test_flattened_dimensions(two_workers: None) -> None:
    mesh = make("2x2")
    for name in ("all", "again"):
        flat = mesh["dp", "tp"]._flatten(name)
        same(distribute_tensor(X.to(mesh.device), flat, [Shard(0)]), X)
        assert len(dr.shards(distribute_tensor(X.to(mesh.device), flat, [Shard(0)]).to_local())[3]) == 2  # type: ignore[arg-type]


def test_random_operators_draw_distinct_shards_and_equal_replicas(two_workers: None) -> None:
    mesh = make("2x2")
    torch.manual_seed(3)
    drawn = rand(8, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])
    first, replica, second, _ = dr.shards(drawn.to_local())  # type: ignore[arg-type]
    assert torch.equal(first, replica) and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(dr.fetch(rand(8, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])), dr.fetch(drawn))
    kept = dr.fetch(F.dropout(distribute_tensor(torch.ones(64, 16).to(mesh.device), mesh, [Shard(0), Shard(0)]), 0.5)) != 0
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(kept.chunk(4), 2))
    alike = dr.shards(torch.rand(3, device=mesh.device))
    assert all(torch.equal(shard, alike[0]) for shard in alike)
