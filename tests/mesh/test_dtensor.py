"""torch's DTensor over a mesh's tensors: every way from one layout to another, its operators, and what is
refused.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    ones,
    rand,
    zeros,
)
from torch.distributed.tensor import randn as drawn
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distruntime as dr
from distruntime.session.session import active_session
from meshes import MLP, copied, make, mesh, same, two_workers

__all__ = ["mesh", "two_workers"]

X = torch.arange(128.0).reshape(8, 16) / 9 - 3
LAYOUTS = [Replicate(), Shard(0), Shard(1)]


def laid_out(mesh: dr.mesh.DeviceMesh, layout: tuple[object, ...]) -> DTensor:
    """Return a DTensor whose whole is X; of a partial one each member has its share."""
    kept = [Replicate() if isinstance(p, Partial) else p for p in layout]
    local = distribute_tensor(X.to(mesh.device), mesh, kept).to_local()  # type: ignore[arg-type]
    for dim, p in enumerate(layout):
        if isinstance(p, Partial):
            local = local / mesh.size(dim)
    return DTensor.from_local(local, mesh, layout, run_check=False)  # type: ignore[arg-type]


def test_every_layout_and_back(mesh: dr.mesh.DeviceMesh) -> None:
    for layout in itertools.product(LAYOUTS, repeat=mesh.ndim):
        same(distribute_tensor(X.to(mesh.device), mesh, layout), X)
        same(distribute_tensor(X.to(mesh.device), mesh, layout, src_data_rank=None), X)
    same(distribute_tensor(X, mesh, [Shard(0)] * mesh.ndim), X)


def test_every_redistribution(mesh: dr.mesh.DeviceMesh) -> None:
    sources = itertools.product([*LAYOUTS, Partial()], repeat=mesh.ndim)
    for source in sources if mesh.ndim == 1 else itertools.islice(sources, 0, None, 2):
        given = laid_out(mesh, source)
        for target in itertools.product(LAYOUTS, repeat=mesh.ndim):
            found = given.redistribute(mesh, target)
            same(found, X)
            for dim, p in enumerate(target):
                if isinstance(p, Shard) and len({q for q in target if isinstance(q, Shard)}) == mesh.ndim:
                    assert found.to_local().shape[p.dim] == X.shape[p.dim] // mesh.size(dim)


def test_each_member_has_the_part_that_is_its_own(mesh: dr.mesh.DeviceMesh) -> None:
    parts = dr.shards(distribute_tensor(X.to(mesh.device), mesh, [Shard(0)] * mesh.ndim).to_local())  # type: ignore[arg-type]
    for part, wanted in zip(parts, X.chunk(mesh.size())):
        assert torch.equal(part, wanted)


def test_rows_by_a_lone_index(mesh: dr.mesh.DeviceMesh) -> None:
    """torch indexes by the mask of what is other members', and of one number it reads the mask here, for all
    members.
    """
    table = torch.arange(48.0).reshape(16, 3)
    weight = distribute_tensor(table.to(mesh.device), mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])
    for row in (0, 7, 8, 15):
        index = distribute_tensor(torch.tensor(row).to(mesh.device), mesh, [Replicate()] * mesh.ndim)
        same(F.embedding(index, weight), table[row])


def test_masks_that_differ_on_one_member_alone_are_no_shared_mask(two_workers: None) -> None:
    mesh = make("4")
    weight = distribute_tensor(torch.arange(16.0).reshape(8, 2), mesh, [Shard(0)])
    one, same_rows, other = (
        distribute_tensor(torch.tensor(rows), mesh, [Replicate()]) for rows in ([2, 3], [3, 2], [4, 5])
    )
    first, second = F.embedding(one, weight), F.embedding(same_rows, weight)
    same(first, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    same(second, torch.tensor([[6.0, 7.0], [4.0, 5.0]]))
    first = F.embedding(one, weight)  # waits for its sum, with a mask that member 0 has for `other`, too
    with pytest.raises(RuntimeError, match="conflicting data"):
        F.embedding(other, weight)
    same(first, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))


def test_equal_is_equal_on_all_members(mesh: dr.mesh.DeviceMesh) -> None:
    changed = X.clone()
    changed[-1, -1] = 0
    for layout in itertools.product([*LAYOUTS, Partial()], repeat=mesh.ndim):
        t = laid_out(mesh, layout)
        differs = distribute_tensor(changed.to(mesh.device), mesh, [Shard(0)] * mesh.ndim)
        assert torch.equal(t, laid_out(mesh, [Shard(1)] * mesh.ndim)) and torch.equal(t, t)  # type: ignore[arg-type]
        assert not torch.equal(t, differs) and not torch.equal(differs, t) and not torch.equal(t, t[:4])
    k = mesh.coordinate(mesh.mesh_dim_names[-1])  # type: ignore[index]
    assert (
        torch.equal(k, k.clone()) and not torch.equal(k, torch.zeros_like(k)) and not torch.equal(k, k[None])
    )


def test_where_the_largest_is(mesh: dr.mesh.DeviceMesh) -> None:
    mixed = torch.sin(X * 7)
    for layout in itertools.product(LAYOUTS, repeat=mesh.ndim):
        t = distribute_tensor(mixed.to(mesh.device), mesh, layout)
        same(t.argmax(), mixed.argmax())
        for dim in (0, 1, -1):
            same(t.argmax(dim), mixed.argmax(dim))
            same(t.argmin(dim, keepdim=True), mixed.argmin(dim, keepdim=True))


def test_gradients_of_redistributions(mesh: dr.mesh.DeviceMesh) -> None:
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


def test_factories_and_metadata(mesh: dr.mesh.DeviceMesh) -> None:
    shard = [Shard(0)] * mesh.ndim
    same(ones(8, 16, device_mesh=mesh, placements=shard), torch.ones(8, 16))
    same(zeros(8, 16, device_mesh=mesh, placements=shard), torch.zeros(8, 16))
    t = distribute_tensor(X.to(mesh.device), mesh, shard)
    assert t.device == mesh.device and t.shape == X.shape and t.to_local().device == mesh.device
    assert "DTensor" in repr(t) and f"member 0 of {mesh.size()}" in repr(t)
    same(DTensor.from_local(X.to(mesh.device), mesh, [Replicate()] * mesh.ndim, run_check=True), X)


def test_tensors_that_are_not_on_the_mesh_are_refused(two_workers: None) -> None:
    mesh = make("2")
    with pytest.raises(
        dr.errors.PlacementError,
        match=r"a DTensor on 2 members on nodes 0, 1 .* lives on node 0 .*dr.from_shards",
    ):
        DTensor.from_local(torch.ones(2, device="remote"), mesh, [Shard(0)], run_check=False)
    with pytest.raises(dr.errors.UsageError, match=r"lives on node 0 .*x.to\(mesh.device\)"):
        distribute_tensor(torch.ones(2, device="remote"), mesh, [Shard(0)])
    with pytest.raises(
        dr.errors.UsageError,
        match=r"of no mesh of distruntime's: make the mesh by distruntime.init_device_mesh",
    ):
        distribute_tensor(torch.ones(2), torch.distributed.init_device_mesh("remote", (2,)), [Shard(0)])


def test_a_local_tensor_is_each_members_own(two_workers: None) -> None:
    """It went to the current place, where nothing of the mesh could use it; torch sends it to the mesh's
    device.
    """
    mesh, local = make("2"), torch.ones(2, requires_grad=True)
    t = DTensor.from_local(local, mesh, [Shard(0)])
    same(t, torch.ones(4))
    t.full_tensor().sum().backward()
    assert local.grad is not None and local.grad.tolist() == [1.0, 1.0]
    with mesh:
        t = DTensor.from_local(torch.ones(2), placements=[Shard(0)])
    same(t, torch.ones(4))


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")  # and takes it for one
def test_a_dtensor_beside_what_is_none(two_workers: None) -> None:
    """In either order torch says what is mixed; a lone number counts as a replica, as torch has it."""
    mesh = make("2")
    t, plain = distribute_tensor(X.to(mesh.device), mesh, [Shard(0)]), X.to(mesh.device)
    for mix in (
        lambda: t + plain,
        lambda: plain + t,
        lambda: plain.clone().copy_(t),
        lambda: torch.where(plain > 0, t, t),
    ):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            mix()
    same(torch.ones(1, device=mesh.device) + t, 1 + X)
    t.requires_grad_()
    (torch.mvlgamma(t.abs() + 2, 1).sum()).backward()  # its formula makes a tensor of one number
    x = X.clone().requires_grad_()
    torch.mvlgamma(x.abs() + 2, 1).sum().backward()
    assert t.grad is not None and x.grad is not None
    same(t.grad, x.grad)


def test_the_first_members_shard_is_not_taken_for_all(two_workers: None) -> None:
    mesh = make("2")
    here = distribute_tensor(X.to(mesh.device), mesh, [Shard(0)]).cpu()
    with pytest.raises(dr.errors.UsageError, match="is a local tensor"):
        here.full_tensor()


def test_two_meshes_do_not_mix(two_workers: None) -> None:
    one, other = make("2"), dr.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    assert one != other and hash(one) == hash(make("2")) and one == make("2")
    a, b = (distribute_tensor(X.to(m.device), m, [Shard(0)]) for m in (one, other))
    with pytest.raises((RuntimeError, ValueError, dr.errors.PlacementError)):
        a + b


def test_what_is_drawn_behind_a_dtensor_is_something_else(mesh: dr.mesh.DeviceMesh) -> None:
    cut = drawn(8, 4, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim).to_local()
    plain = torch.randn(cut.shape, device=mesh.device)
    for before, after in itertools.product(dr.shards(cut), dr.shards(plain)):
        assert not torch.isin(before, after).any()


def test_flattened_dimensions(two_workers: None) -> None:
    mesh = make("2x2")
    for name in ("all", "again"):
        flat = mesh["dp", "tp"]._flatten(name)
        same(distribute_tensor(X.to(mesh.device), flat, [Shard(0)]), X)
        assert len(dr.shards(distribute_tensor(X.to(mesh.device), flat, [Shard(0)]).to_local())[3]) == 2  # type: ignore[arg-type]


def test_a_replica_is_cut_along_flattened_dimensions(two_workers: None) -> None:
    """Each member got the first member's part, and so did each member's part of a gradient."""
    mesh = make("2x2")
    flat, x = mesh["dp", "tp"]._flatten("both"), torch.arange(8.0)
    assert mesh["both"] is flat and [at for (at,) in flat.coordinates()] == list(range(4))
    cut = distribute_tensor(x.to(mesh.device), flat, [Replicate()]).redistribute(placements=[Shard(0)])
    same(cut, x)
    cut = cut.detach().requires_grad_()
    (cut.full_tensor() * x.to(mesh.device)).sum().backward()
    assert cut.grad is not None
    same(cut.grad, x)
    assert [s.item() for s in dr.shards(flat.coordinate("both"))] == list(range(4))
    assert [s.item() for s in dr.shards(dr.lines.all_reduce(flat.lines("both"), flat.coordinate()))] == [
        6
    ] * 4


def test_a_rank_is_no_one_number(two_workers: None) -> None:
    """It equalled nothing, so `if rank == 0:` was nobody's; and what was written to a member's own columns
    went to a copy of them.
    """
    mesh = make("2x2")
    rank = mesh.get_local_rank("tp")
    for ask in (lambda: bool(rank == 0), lambda: bool(rank < 1), lambda: int(rank), lambda: bool(rank)):
        with pytest.raises(
            dr.errors.UsageError,
            match=r"differs from member to member \(member 0: 0, member 1: 1, .*mesh.coordinate\(dim\)",
        ):
            ask()
    assert rank < 2 and rank - rank == 0 and "differs" in repr(rank == 0)
    x = torch.zeros(2, 4, device=mesh.device)
    x[:, rank * 2 : rank * 2 + 2] = 5.0
    x.narrow(1, rank, 1).add_(1)
    moved = torch.roll(x, [rank], [1])
    for k, (shard, roll) in enumerate(zip(dr.shards(x), dr.shards(moved))):
        wanted = torch.tensor([[0.0, 1.0, 5.0, 5.0]] * 2 if k % 2 else [[6.0, 5.0, 0.0, 0.0]] * 2)
        assert torch.equal(shard, wanted) and torch.equal(roll, wanted.roll(k % 2, 1))


def test_wherever_new_tensors_would_go(two_workers: None) -> None:
    """torch's fake tensors, of which DTensor learns what an operator returns, remember where that was."""
    mesh = make("2")
    x, w, b = (
        torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in ((3, 5), (4, 5), (4,))
    )
    for within in (lambda: dr.node(1), lambda: mesh, lambda: dr.node(0)):
        for rows in (3, 2):
            with within():  # type: ignore[attr-defined]
                operands = [
                    distribute_tensor(t.to(mesh.device), mesh, [Replicate()]) for t in (x[:rows], w, b)
                ]
            same(F.linear(*operands), F.linear(x[:rows], w, b))
            with within():  # type: ignore[attr-defined]
                same(F.linear(*operands), F.linear(x[:rows], w, b))


def test_models_of_dtensors_are_copied_on_their_mesh(two_workers: None) -> None:
    mesh = make("2")
    model = parallelize_module(copied(MLP(), mesh), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    again = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    same(again(X.to(mesh.device)), MLP()(X))
    assert again[0].weight.device_mesh is mesh and copy.deepcopy(mesh) is mesh
    with pytest.raises(dr.errors.NotSupportedError, match=r"cannot be pickled.*dr.fetch"):
        pickle.dumps(mesh)


def test_what_depends_on_the_rank_is_one_instruction_for_all(two_workers: None) -> None:
    """Each member's own log once had some for each of these: 0.1 ms a member and operator."""
    mesh = make("2x2")
    lines = mesh["tp"]
    whole, cut = (distribute_tensor(X, lines, [p]) for p in (Replicate(), Shard(0)))
    table, ids = distribute_tensor(X, lines, [Shard(0)]), torch.tensor([7, 0, 3, 4, 5])
    asked = distribute_tensor(ids, lines, [Replicate()])
    masks, session = [], active_session()
    own: list[list[int]] = []
    for _ in range(2):
        same(whole.redistribute(lines, [Shard(1)]), X)
        same(cut.redistribute(lines, [Shard(1)]), X)
        same(F.embedding(asked, table), X[ids])
        dr.synchronize()
        own.append([node.base + len(node.words) for node in session.nodes])
        again = (
            whole.redistribute(lines, [Shard(0)]),
            cut.redistribute(lines, [Shard(1)]),
            F.embedding(asked, table).full_tensor(),
        )
        masks.append(F.dropout(cut, 0.5))
        mesh.manual_seed(3, distinct=True)
        own[-1] = [node.base + len(node.words) - before for node, before in zip(session.nodes, own[-1])]
        del again
    assert own[1] == [0, 0]


def test_random_operators_draw_distinct_shards_and_equal_replicas(two_workers: None) -> None:
    mesh = make("2x2")
    torch.manual_seed(3)
    drawn = rand(8, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])
    first, replica, second, _ = dr.shards(drawn.to_local())  # type: ignore[arg-type]
    assert torch.equal(first, replica) and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(
        dr.fetch(rand(8, 16, device_mesh=mesh, placements=[Shard(0), Replicate()])), dr.fetch(drawn)
    )
    kept = (
        dr.fetch(
            F.dropout(distribute_tensor(torch.ones(64, 16).to(mesh.device), mesh, [Shard(0), Shard(0)]), 0.5)
        )
        != 0
    )
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(kept.chunk(4), 2))
    alike = dr.shards(torch.rand(3, device=mesh.device))
    assert all(torch.equal(shard, alike[0]) for shard in alike)


# Cases of torch's own tests


def test_dimensions_from_behind_gradients_of_parts_and_copies(two_workers: None) -> None:
    mesh = make("2")
    t = DTensor.from_local(X[:, :8].to(mesh.device), mesh, [Shard(-1)], run_check=False)
    assert t.placements == (Shard(1),) and t.shape == X.shape
    w = distribute_tensor(X.to(mesh.device), mesh, [Replicate()]).requires_grad_()
    k = mesh.coordinate("tp") + 1
    (
        w.to_local(grad_placements=[Partial()]) * k
    ).sum().backward()  # each member its own share of the gradient
    assert w.grad is not None and w.grad.placements == (Partial(),)
    same(w.grad, torch.full_like(X, 3.0))
    twin = copy.deepcopy(w.detach())
    twin.add_(1)
    same(twin, X + 1)
    same(w, X)
    with implicit_replication():
        same(w + X.to(mesh.device), X + X)


def test_functions_of_local_shards(two_workers: None) -> None:
    mesh = make("2")

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(a @ b, "sum", mesh))  # type: ignore[no-any-return]

    summed = local_map(
        product,
        out_placements=[Replicate()],
        in_placements=([Shard(1)], [Shard(0)]),
        device_mesh=mesh,
        redistribute_inputs=True,
    )
    for dim in (0, 1):
        same(
            summed(
                *(distribute_tensor(x.to(mesh.device), mesh, [Shard(dim)]) for x in (X, X.t().contiguous()))
            ),
            X @ X.t(),
        )
    rows = local_map(
        torch.mm,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)], [Replicate()]),
        in_grad_placements=([Shard(0)], [Partial()]),
        device_mesh=mesh,
    )
    a, b = X.clone().requires_grad_(), X.t().clone().requires_grad_()
    da, db = (
        distribute_tensor(t.detach().to(mesh.device), mesh, [p]).requires_grad_()
        for t, p in ((a, Shard(0)), (b, Replicate()))
    )
    out, wanted = rows(da, db), a @ b
    same(out, wanted, atol=1e-4)
    (out.to_local() ** 2).sum().backward()
    (wanted**2).sum().backward()
    for t, plain in ((da, a), (db, b)):
        assert t.grad is not None and plain.grad is not None
        torch.testing.assert_close(dr.fetch(t.grad), plain.grad, rtol=1e-5, atol=1e-3)


def test_modules_laid_out_by_a_function(two_workers: None) -> None:
    mesh = make("2")

    def cut(name: str, module: nn.Module, mesh: dr.mesh.DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            for key, p in module.named_parameters():
                module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

    def take(module: nn.Module, inputs: tuple[torch.Tensor], mesh: dr.mesh.DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    def give(module: nn.Module, output: DTensor, mesh: dr.mesh.DeviceMesh) -> torch.Tensor:
        return output.full_tensor()

    serial = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    model = distribute_module(copy.deepcopy(serial).to(mesh.device), mesh, cut, take, give)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    model(X.to(mesh.device)).sum().backward()
    serial(X).sum().backward()
    for p, q in zip(model.parameters(), serial.parameters()):
        assert p.grad is not None and q.grad is not None
        same(p.grad, q.grad, atol=1e-4)


def test_convolutions_of_replicas_and_of_images_apart(two_workers: None) -> None:
    mesh = make("2")
    image = torch.arange(384.0).reshape(2, 3, 8, 8) / 100 - 2
    serial = nn.Conv2d(3, 4, 3, padding=1)
    # Its rule calls the gradients of replicas Partial.
    old = torch.__version__ < "2.12"
    for layout in [Shard(0)] if old else [Replicate(), Shard(0)]:
        weight, bias, x = (
            distribute_tensor(t.detach().to(mesh.device), mesh, [p]).requires_grad_()
            for t, p in ((serial.weight, Replicate()), (serial.bias, Replicate()), (image, layout))
        )
        serial.zero_grad()
        out, wanted = F.conv2d(x, weight, bias, padding=1), serial(image)
        same(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        assert weight.grad is not None and serial.weight.grad is not None
        same(weight.grad, serial.weight.grad, atol=1e-4)
