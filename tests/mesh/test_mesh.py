"""Tensors on meshes: one instruction that every member runs, on one member a worker and on two."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

import distruntime as dr
from distruntime.mesh.each_member import run_for_each
from distruntime.wire.messages import AskStatus
from processes import blocked, slots, stop, until

Mesh = dr.mesh.DeviceMesh


@pytest.fixture(scope="module", params=["a member a worker", "two a worker"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    dr.shutdown()
    two = request.param == "two a worker"
    dr.init_master_worker(world_size=2, simulate_cuda=2 if two else 0)
    yield dr.init_device_mesh(
        "cuda" if two else "cpu", (2, 2) if two else (2, 1), mesh_dim_names=("dp", "tp")
    )
    dr.shutdown()


def ranks(mesh: Mesh) -> torch.Tensor:
    """A tensor that is each member's number."""
    return mesh.coordinate("dp") * mesh.size("tp") + mesh.coordinate("tp")


def same(t: torch.Tensor, wanted: torch.Tensor) -> None:
    for shard in dr.shards(t):
        assert shard.dtype == wanted.dtype and torch.equal(shard, wanted)


def program(x: torch.Tensor) -> torch.Tensor:
    """Views, writes, several results, reductions."""
    y = (x @ x.T).relu() + 1
    y[1:].add_(2.5)
    top, where = y.max(0)
    z = torch.cat([y, top[None]]).t().contiguous()
    z += where[:, None]
    z.view(-1)[::3] *= 3
    return z.softmax(0).cumsum(1) - torch.arange(z.shape[1], device=x.device)


def test_every_member_runs_the_program(mesh: Mesh) -> None:
    local = torch.arange(12.0).reshape(4, 3) / 7
    same(program(local.to(mesh.device)), program(local))
    with mesh:
        whole = program(torch.arange(12.0).reshape(4, 3) / 7)
    assert whole.place.members == mesh.places
    same(whole, program(local))


def test_each_member_has_its_own_shard(mesh: Mesh) -> None:
    parts = [torch.full((2, 3), float(k)) for k in range(mesh.size())]
    t = dr.from_shards(parts, mesh)
    found = dr.shards(program(t))
    for part, shard in zip(parts, found):
        assert torch.equal(shard, program(part))
    assert [s.item() for s in dr.shards(ranks(mesh))] == list(range(mesh.size()))


def test_a_member_is_the_same_memory(mesh: Mesh) -> None:
    t = dr.from_shards([torch.full((3,), float(k)) for k in range(mesh.size())], mesh)
    last = t.member(-1)
    assert last.place == mesh.places[-1]
    t.add_(1)
    assert last.tolist() == [mesh.size()] * 3
    last.mul_(10)
    t.sub_(1)
    assert [s.tolist() for s in dr.shards(t)] == [
        *([k] * 3 for k in range(mesh.size() - 1)),
        [10.0 * mesh.size() - 1] * 3,
    ]
    proxies = [t.member(k) + 0 for k in range(mesh.size())]
    again = dr.from_shards(proxies, mesh)
    again.zero_()
    assert proxies[0].tolist() == [0.0] * 3


def test_a_large_tensor_goes_to_all_and_comes_back(mesh: Mesh) -> None:
    local = torch.randn(300, 301)
    t = local.to(mesh.device)
    same(t, local)
    t.copy_(local * 2)
    same(t, local * 2)
    assert torch.equal(t.cpu(), local * 2) and torch.equal(t.member(1).cpu(), local * 2)
    here = torch.empty(300, 301)
    here.copy_(t)
    assert torch.equal(here, local * 2)
    with dr.on(mesh.places[-1]):
        one = torch.arange(5.0)
    same(one.to(mesh.device), torch.arange(5.0))


def test_a_step_of_training_is_the_serial_one(mesh: Mesh) -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )
    there = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )
    there.load_state_dict(here.state_dict())
    there.to(mesh.device)
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    for model, device in ((here, "cpu"), (there, mesh.device)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    for p, q in zip(here.parameters(), there.parameters()):
        for shard in dr.shards(q.detach()):
            torch.testing.assert_close(shard, p.detach())


def test_results_whose_size_depends_on_data(mesh: Mesh) -> None:
    t = torch.tensor([0, 1, 0, 2]).to(mesh.device)
    same(t.nonzero(), torch.tensor([[1], [3]]))
    same(t[t > 0], torch.tensor([1, 2]))
    if mesh.size() > 1:
        found = dr.shards(ranks(mesh)[None].nonzero())
        assert [t.tolist() for t in found] == [[]] + [[[0]]] * (mesh.size() - 1)


def test_what_fails_on_one_member_is_that_members(mesh: Mesh) -> None:
    index = dr.from_shards([torch.tensor([0 if k != 1 else 7]) for k in range(mesh.size())], mesh)
    t = torch.arange(3.0, device=mesh.device)
    bad = t.index_select(0, index)
    after = bad * 2
    t.add_(1)
    with pytest.raises(IndexError) as caught:
        after.member(1).tolist()
    assert "t.index_select(0, index)" in str(caught.value)
    for k in range(mesh.size()):
        assert t.member(k).tolist() == [1.0, 2.0, 3.0]
        if k != 1:
            assert after.member(k).tolist() == [0.0]
    assert "member 0 of" in repr(after)
    first = t.index_select(
        0, dr.from_shards([torch.tensor([0 if k else 7]) for k in range(mesh.size())], mesh)
    )
    assert re.match(r"<remote 1 float32, 4 B, member 0 of \d, node 0 \S+: poisoned: index out", repr(first))
    written = torch.zeros(1, device=mesh.device)
    view = written.view(1, 1)
    written.add_(bad)
    with pytest.raises(IndexError):
        view.member(1).tolist()
    assert view.member(0).tolist() == [[0.0]]


def test_slices_have_the_members_and_combine(mesh: Mesh) -> None:
    rows = mesh["tp"]
    with rows:
        x = torch.ones(2)
    same(x + torch.ones(2, device=mesh.device), torch.full((2,), 2.0))
    assert rows.size() == mesh.size("tp") and rows != mesh and mesh["dp", "tp"] == mesh
    assert rows.coordinates() == [at[1:] for at in mesh.coordinates()]
    again = dr.init_device_mesh("cuda" if "cuda" in mesh.places[0].local_device else "cpu", (mesh.size(),))
    same(x + torch.ones(2, device=again.device), torch.full((2,), 2.0))
    part = mesh.select(dp=1)
    assert part.places == mesh.places[mesh.size("tp") :]
    taken = dr.from_shards([x.member(mesh.size("tp") + k) for k in range(part.size())], part)
    same(taken * 3, torch.full((2,), 3.0))


def test_operands_of_other_members_are_refused(mesh: Mesh) -> None:
    x, part = torch.ones(2, device=mesh.device), mesh.select(dp=0)
    with pytest.raises(dr.errors.PlacementError) as caught:
        x + torch.ones(2, device=part.device)
    assert "`self`" in str(caught.value) and f"only `self` is on {mesh.places[mesh.size('tp')]}" in str(
        caught.value
    )
    with (
        dr.on(mesh.places[0]),
        pytest.raises(dr.errors.PlacementError, match=r"other.to\(self.device\).*self.member\(k\)"),
    ):
        x + torch.ones(2)
    with pytest.raises(dr.errors.PlacementError, match=r"x.member\(k\)"):
        x.to(dr.place(0))
    with pytest.raises(
        dr.errors.PlacementError, match=r"does not fit 1 member on|does not fit 2 members on"
    ) as caught:
        x.to(part.device)
    assert "dr.from_shards([x.member(k), ...], mesh)" in str(caught.value)
    with pytest.raises(
        dr.errors.PlacementError,
        match=r"`other` \(2,\) is a local tensor on cpu, "
        r"the other operands live on \d members on nodes 0, 1\n",
    ):
        x + torch.ones(2)
    same(x + torch.tensor(1.0), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda mesh: mesh["ep"],
        lambda mesh: mesh.select(dp=9),
        lambda mesh: mesh.lines("ep"),
        lambda mesh: mesh.coordinate("ep"),
        lambda mesh: dr.lines.broadcast(mesh.lines(), torch.ones(2, device=mesh.device), 9),
        lambda mesh: dr.lines.all_reduce(mesh.lines(), torch.ones(2)),
    ],
)
def test_a_mistake_shows_the_callers_lines_alone(mesh: Mesh, mistake: Callable[[Mesh], Any]) -> None:
    with pytest.raises(dr.DistruntimeError) as caught:
        mistake(mesh)
    assert str(caught.traceback[-1].path) == __file__


def test_bad_meshes_and_shards(mesh: Mesh) -> None:
    with pytest.raises(
        dr.errors.PlacementError,
        match=r"has 64 members, and this session has 2 cpu devices on 2 nodes: make it smaller, or",
    ):
        dr.init_device_mesh("cpu", (64,))
    assert dr.init_device_mesh("cpu", [("a", 4 / 2)]).shape == (2,)
    with pytest.raises(dr.errors.UsageError, match=r"sizes above 0.*1\.5"):
        dr.init_device_mesh("cpu", (1.5, 2))
    with pytest.raises(dr.errors.UsageError, match="sizes above 0"):
        dr.init_device_mesh("cpu", (0,))
    with pytest.raises(dr.errors.UsageError, match=r"sizes above 0.*got 2"):
        dr.init_device_mesh("cpu", 2)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="as many names"):
        dr.init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b"))
    with pytest.raises(dr.errors.UsageError, match="no dimension 'ep': it has dp, tp"):
        mesh["ep"]
    with pytest.raises(dr.errors.UsageError, match=r"names of dimensions, got 0; .* mesh.places"):
        mesh[0]  # type: ignore[index]
    with pytest.raises(dr.errors.UsageError, match="dimension 'dp' has coordinates 0 to 1, got 2"):
        mesh.select(dp=2)
    with pytest.raises(
        dr.errors.UsageError, match=r"a group is made of a list.*those of a mesh are mesh.places"
    ):
        dr.distributed.new_group(mesh)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match=r"takes the mesh itself.*got device"):
        dr.from_shards([torch.ones(1)] * mesh.size(), mesh.device)  # type: ignore[arg-type]
    x = torch.ones(1, device=mesh.device)
    with pytest.raises(
        dr.errors.PlacementError, match=r"shard 0 lives on \d members on nodes 0, 1, .*t.member\(0\)"
    ):
        dr.from_shards([x] * mesh.size(), mesh)
    with pytest.raises(dr.errors.UsageError, match=r"got a local Tensor: x.to\(mesh.device\)"):
        dr.shards(torch.ones(1))
    with pytest.raises(IndexError, match=rf"members 0 to {mesh.size() - 1}, got {mesh.size()}"):
        x.member(mesh.size())  # type: ignore[attr-defined]
    with pytest.raises(dr.errors.UsageError, match=f"one tensor for each of the {mesh.size()} members"):
        dr.from_shards([torch.ones(1)], mesh)
    uneven = [torch.ones(2) if k else torch.ones(3, 1) for k in range(mesh.size())]
    with pytest.raises(dr.errors.UsageError, match=r"shard 0 is \(3, 1\) torch.float32, shard 1 is \(2,\)"):
        dr.from_shards(uneven, mesh)
    mixed = [torch.ones(2, dtype=torch.float64 if k else torch.float32) for k in range(mesh.size())]
    with pytest.raises(
        dr.errors.UsageError, match=r"shard 0 is \(2,\) torch.float32, shard 1 is \(2,\) torch.float64"
    ):
        dr.from_shards(mixed, mesh)
    with (
        dr.on(mesh.places[0]),
        pytest.raises(dr.errors.PlacementError, match=r"shard 1 lives on .*t.to\(dr.place\(\d, 'c"),
    ):
        dr.from_shards([torch.ones(1) for _ in range(mesh.size())], mesh)
    with pytest.raises(dr.errors.UsageError, match="tensors on a mesh"):
        torch.ones(1, device="remote").member(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dim", ["dp", "tp", None])
def test_collectives_along_a_dimension(mesh: Mesh, dim: str | None) -> None:
    lines = mesh.lines(dim)
    x = ranks(mesh).float() + torch.arange(4.0, device=mesh.device)
    shards = dr.shards(x)
    total, gathered = dr.shards(dr.lines.all_reduce(lines, x)), dr.shards(dr.lines.all_gather(lines, x))
    spread, sent = (
        dr.shards(dr.lines.reduce_scatter(lines, dr.lines.all_gather(lines, x))),
        dr.shards(dr.lines.broadcast(lines, x, 0)),
    )
    for row in lines.rows:
        for rank, k in enumerate(row):
            assert torch.equal(total[k], sum(shards[m] for m in row))
            assert torch.equal(gathered[k], torch.cat([shards[m] for m in row]))
            assert torch.equal(spread[k], shards[row[rank]] * len(row))
            assert torch.equal(sent[k], shards[row[0]])


@pytest.mark.parametrize("dim", ["dp", "tp", None])
def test_adjoints_of_collectives(mesh: Mesh, dim: str | None) -> None:
    """<F x, y> = <x, F* y>, summed over the members; and where a member is the least or the greatest, its
    gradient is the sum.
    """
    lines, n = mesh.lines(dim), mesh.lines(dim).size
    operations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: dr.lines.all_reduce(lines, x),
        lambda x: dr.lines.all_reduce(lines, x, "AVG"),
        lambda x: dr.lines.all_gather(lines, x),
        lambda x: dr.lines.reduce_scatter(lines, x),
        lambda x: dr.lines.reduce_scatter(lines, x, "avg"),
        lambda x: dr.lines.broadcast(lines, x, n - 1),
        lambda x: dr.lines.all_to_all(lines, x, [4 // n] * n, [4 // n] * n),
    ]
    for k, operation in enumerate(operations):
        parts = [torch.randn(4, 3, dtype=torch.float64) for _ in range(mesh.size())]
        x = dr.from_shards(parts, mesh).requires_grad_()
        out = operation(x)
        weights = [torch.randn(out.shape, dtype=torch.float64) for _ in parts]
        out.backward(dr.from_shards(weights, mesh))
        forward = sum(float((o * w).sum()) for o, w in zip(dr.shards(out.detach()), weights))
        back = sum(float((p * g).sum()) for p, g in zip(parts, dr.shards(x.grad)))  # type: ignore[arg-type]
        assert abs(forward - back) <= 1e-12 * max(1.0, abs(forward)), k
    x = ranks(mesh).double().requires_grad_()
    dr.lines.all_reduce(lines, x, "MAX").backward(torch.ones((), dtype=torch.float64, device=mesh.device))
    highest = {row[-1] for row in lines.rows}
    assert [s.item() for s in dr.shards(x.grad)] == [n if k in highest else 0 for k in range(mesh.size())]  # type: ignore[arg-type]


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.mean(0),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
}


@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("dim", ["dp", None])
def test_an_all_reduce_along_lines_has_the_formulas_gradients(mesh: Mesh, dim: str | None, op: str) -> None:
    """Of the first and the second order. A factor is zero, and two members are equal."""
    lines = mesh.lines(dim)
    here = [
        torch.tensor([0.0 if k == 1 else 2.0, 3.0, 0.5 + k]).double().requires_grad_()
        for k in range(mesh.size())
    ]
    x = dr.from_shards([t.detach() for t in here], mesh).requires_grad_()
    out = dr.lines.all_reduce(lines, x, op)
    first = torch.autograd.grad((out**3).sum(), x, create_graph=True)[0]
    (second,) = torch.autograd.grad((first**2).sum(), x)
    totals = {k: REDUCED[op](torch.stack([here[m] for m in row])) for row in lines.rows for k in row}
    expected = torch.autograd.grad(sum((t**3).sum() for t in totals.values()), here, create_graph=True)
    again = torch.autograd.grad(sum((g**2).sum() for g in expected), here, allow_unused=True)
    for k, found in enumerate(zip(dr.shards(first.detach()), dr.shards(second))):
        torch.testing.assert_close(found[0].cpu(), expected[k].detach())
        torch.testing.assert_close(found[1].cpu(), again[k])


@pytest.mark.parametrize("operation", [dr.lines.all_gather, lambda lines, x: dr.lines.broadcast(lines, x, 0)])
def test_gradients_of_a_scalar_along_lines_are_scalars(
    mesh: Mesh, operation: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    x = ranks(mesh).double().requires_grad_()
    operation(mesh.lines(), x).sum().backward()
    assert x.grad is not None and x.grad.shape == ()
    assert sum(s.item() for s in dr.shards(x.grad)) == mesh.size() ** (
        2 if operation is dr.lines.all_gather else 1
    )


def test_gradients_through_members_and_shards(mesh: Mesh) -> None:
    x = torch.arange(3.0, device=mesh.device, requires_grad=True)
    (x.member(1) * 5).sum().backward()  # type: ignore[attr-defined]
    assert [s.tolist() for s in dr.shards(x.grad)] == [
        [5.0 if k == 1 else 0.0] * 3 for k in range(mesh.size())
    ]  # type: ignore[arg-type]
    parts = []
    for k, place in enumerate(mesh.places):
        with dr.on(place):
            parts.append(torch.full((2,), float(k), requires_grad=True))
    (dr.from_shards(parts, mesh) ** 2).sum().backward()
    assert [dr.fetch(p.grad).tolist() for p in parts] == [[2.0 * k] * 2 for k in range(mesh.size())]
    local = [torch.ones(2, requires_grad=True) for _ in parts]
    (dr.from_shards(local, mesh) * (ranks(mesh) + 1)).sum().backward()
    assert [p.grad.tolist() for p in local] == [[k + 1.0] * 2 for k in range(mesh.size())]  # type: ignore[union-attr]


def test_gradients_of_what_is_sent_to_all_are_the_first_members(mesh: Mesh) -> None:
    local = torch.ones(2, requires_grad=True)
    (local.to(mesh.device) * (ranks(mesh) + 3)).sum().backward()
    assert local.grad is not None and local.grad.tolist() == [3.0, 3.0]
    sent = torch.ones(2, device=mesh.device, requires_grad=True)
    (sent.cpu() * 5).sum().backward()
    assert sent.grad is not None
    same(sent.grad, torch.full((2,), 5.0))
    with dr.on(mesh.places[0]):
        single = torch.ones(2, requires_grad=True)
    with pytest.raises(dr.errors.PlacementError, match="have a shard each"):
        single.to(mesh.device).sum().backward()


def test_streams_of_a_mesh(mesh: Mesh) -> None:
    one, two = dr.Stream(mesh.device), dr.Stream(mesh.device)
    size = 64
    for k in range(30):
        with dr.stream(one):
            x = torch.full((size, size), float(k), device="remote")
            y = x @ x
        with dr.stream(two):
            z = y + 1
            event = two.record_event()
        member = z.member(0)
        x.add_(1)
        w = z.sum() + x.sum()
    event.synchronize()
    assert event.query()
    local = torch.full((size, size), 29.0)
    wanted = (local @ local + 1).sum() + (local + 1).sum()
    same(w, wanted)
    assert member[0, 0].item() == (local @ local + 1)[0, 0].item()
    with dr.node(1):
        plain = dr.Stream(1, "cpu")
    plain.wait_event(event)
    with dr.stream(plain):
        there = torch.ones(2, device="remote")
    one.wait_stream(plain)
    with dr.stream(one):
        same(x * 2, (local + 1) * 2)
    assert there.tolist() == [1.0, 1.0]


def test_a_cancelled_stream_of_a_mesh_names_its_operands_and_does_not_print_them(mesh: Mesh) -> None:
    s = dr.Stream(mesh.device)
    x = torch.ones(200, 200, device=mesh.device)
    dr.synchronize()
    with blocked(s):
        with dr.stream(s):
            y = x @ x
        s.cancel()
    with pytest.raises(dr.errors.StreamCancelled) as caught:
        y.tolist()
    said = str(caught.value)
    del caught
    assert (
        re.search(r"on node 0 \(.*\), operands: (2 x )?\(200, 200\) float32", said) and "tensor(" not in said
    )
    same(x[:1, :1] + 1, torch.full((1, 1), 2.0))
    for node in (0, 1):
        with contextlib.suppress(dr.errors.StreamCancelled):
            dr.synchronize(node)


def test_logs_keep_the_order_of_the_program(mesh: Mesh) -> None:
    """A mesh, a part of it and single members, in turns, on the same memory."""
    part = mesh.select(dp=0)
    t = torch.zeros(3, device=mesh.device)
    wanted = [0.0] * mesh.size()
    for k in range(60):
        t.mul_(2).add_(1)
        wanted = [w * 2 + 1 for w in wanted]
        if k % 2:
            member = t.member(k % mesh.size())
            member.sub_(k)
            wanted[k % mesh.size()] -= k
        if k % 3 == 0:
            few = dr.from_shards([t.member(m) for m in range(part.size())], part)
            few.div_(2)
            wanted = [w / 2 if m < part.size() else w for m, w in enumerate(wanted)]
        t.fmod_(1024)
        wanted = [float(torch.tensor(w).fmod(1024)) for w in wanted]
    assert [s.tolist() for s in dr.shards(t)] == [[w] * 3 for w in wanted]


def test_nothing_stays_behind(mesh: Mesh) -> None:
    mesh.coordinate("dp")
    mesh.coordinate("tp")
    gc.collect()
    before = [slots(0), slots(1)]
    t = dr.from_shards([torch.ones(40, 40) for _ in range(mesh.size())], mesh)
    for _ in range(20):
        t = program(t)[:, :40]
        few = t.member(1) * 2
    dr.shards(t)
    del t, few
    gc.collect()
    until(lambda: [slots(0), slots(1)] == before)


def test_a_lost_member(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session(world_size=2)
    mesh = dr.init_device_mesh("cpu", (2,))
    dr.synchronize()
    before = slots(0)
    x, unsent = torch.ones(2, device=mesh.device), torch.ones(3, device=mesh.device)
    dr.synchronize()
    session.workers[1].terminate()
    until(lambda: session.nodes[1].failed)
    with pytest.raises(
        dr.errors.NodeFailed,
        match=r"the mesh of 2 members on nodes 0, 1 has lost a member: node 1.*dr.init_device_mesh",
    ) as caught:
        x + 1
    del caught
    with pytest.raises(dr.errors.PlacementError, match=r"1 cpu device on 1 node \(1 lost\)"):
        dr.init_device_mesh("cpu", (2,))
    assert x.member(0).tolist() == [1.0, 1.0]
    with pytest.raises(dr.errors.NodeFailed, match="node 1"):
        x.member(1)
    del x, unsent
    until(lambda: slots(0) == before)  # what is left is freed, too


def test_a_poisoned_shard_poisons_its_line_and_no_other(mesh: Mesh) -> None:
    index = dr.from_shards([torch.tensor([7 if k == 0 else 0]) for k in range(mesh.size())], mesh)
    bad = torch.arange(3.0, device=mesh.device).index_select(0, index)
    total = dr.lines.all_reduce(mesh.lines("dp"), bad)
    [mine] = [row for row in mesh.lines("dp").rows if 0 in row]
    for k in range(mesh.size()):
        if k in mine:
            with pytest.raises(IndexError, match="index out of range") as caught:
                total.member(k).tolist()
            assert "torch.arange(3.0, device=mesh.device).index_select(0, index)" in str(caught.value)
            del caught
        else:
            assert total.member(k).tolist() == [0.0]
    x = torch.ones(2, device=mesh.device)
    same(dr.lines.all_reduce(mesh.lines("dp"), x), torch.full((2,), 2.0))


def test_a_member_lost_in_the_middle_of_a_step(fresh_session: Callable[..., Any]) -> None:
    """Its fellow waits for it in a collective, and stops waiting; what is left can be taken to a mesh of
    those who are.
    """
    session = fresh_session(world_size=2)
    mesh = dr.init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(4, 4).to(mesh.device)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4, device=mesh.device)
    model(x).sum().backward()
    dr.synchronize()
    stop(session.workers[1].pid)
    loss = model(x).sum()
    loss.backward()
    until(lambda: session.value(session.ask(session.nodes[0], AskStatus))[1] is not None)  # it has begun
    os.kill(session.workers[1].pid, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed, match=r"node 1 .*killed by signal 9"):
        loss.item()
    until(lambda: session.nodes[1].failed)
    with pytest.raises(dr.errors.NodeFailed, match="the mesh of 2 members on nodes 0, 1 has lost a member"):
        model(x)
    part: Any = model.weight._local_tensor  # `to_local` would be an operation of all members
    left = dr.init_device_mesh("cpu", (1,))
    again = dr.from_shards([part.member(0)], left)
    assert dr.shards(dr.lines.all_reduce(left.lines(), again))[0].shape == (2, 4)


def test_seeds_that_differ_along_some_dimensions(fresh_session: Any) -> None:
    fresh_session(world_size=1, simulate_cuda=4)
    mesh = dr.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    for distinct, seeds in (
        ("dp", [7, 7, 8, 8]),
        (["tp"], [7, 8, 7, 8]),
        (("tp", "dp"), [7, 9, 8, 10]),
        ((), [7] * 4),
    ):
        mesh.manual_seed(7, distinct=distinct)
        expected = [torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        assert all(map(torch.equal, dr.shards(torch.rand(3, device=mesh.device)), expected))
    with pytest.raises(dr.errors.UsageError, match=r"no dimension .pp"):
        mesh.manual_seed(7, distinct="pp")


def test_random_numbers_alike_or_distinct(mesh: Mesh) -> None:
    torch.manual_seed(7)
    first = dr.shards(torch.rand(3, device=mesh.device))
    assert all(torch.equal(shard, first[0]) for shard in first)
    x = torch.ones(50, device=mesh.device)
    masks = dr.shards(torch.nn.functional.dropout(x, 0.5))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    mesh.manual_seed(7)
    for shard in dr.shards(torch.rand(3, device=mesh.device)):
        assert torch.equal(shard, first[0])
    mesh.manual_seed(7, distinct=True)
    drawn, then = dr.shards(torch.rand(3, device=mesh.device)), dr.shards(torch.rand(3, device=mesh.device))
    assert torch.equal(drawn[0], first[0])
    for k, (one, two) in enumerate(zip(drawn, then)):
        generator = torch.Generator().manual_seed(7 + k)
        assert torch.equal(one, torch.rand(3, generator=generator)) and torch.equal(
            two, torch.rand(3, generator=generator)
        )
    torch.manual_seed(7)
    for shard in dr.shards(torch.rand(3, device=mesh.device)):
        assert torch.equal(shard, first[0])


def test_groups_by_modes_are_dimensions(fresh_session: Callable[..., Any]) -> None:
    """The groups are those that TorchDistPackage makes of [("data", 2), ("pipe", 2), ("tensor", 2)]."""
    fresh_session(world_size=2, simulate_cuda=4)
    mesh = dr.init_device_mesh("cuda", [("data", 16 / 8), ("pipe", 2), ("tensor", 2)])
    assert mesh.shape == (2, 2, 2) and mesh.mesh_dim_names == ("data", "pipe", "tensor")
    groups = {mode: [list(row) for row in mesh.lines(mode).rows] for mode in ("data", "pipe", "tensor")}
    assert groups == {
        "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "pipe": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    ranks = dr.from_shards([torch.tensor([float(k)]) for k in range(8)], mesh)
    model = dr.lines.all_reduce(mesh.lines(("pipe", "tensor")), ranks)
    assert [s.item() for s in dr.shards(model)] == [6.0] * 4 + [22.0] * 4
    experts = dr.init_device_mesh(mesh.places, [("moe_dp", 1), ("moe_ep", 2), ("pipe", 2), ("tensor", 2)])
    assert experts.lines("moe_ep").rows == experts.lines(("moe_dp", "moe_ep")).rows == mesh.lines("data").rows
    nodes = dr.init_device_mesh(mesh.places, [("nodes", 4), ("node", 2)])
    assert [list(row) for row in nodes.lines("node").rows] == groups["tensor"]


def test_a_mesh_of_places(mesh: Mesh) -> None:
    last_first = dr.init_device_mesh([mesh.places[-1], mesh.places[0]], (2,))
    assert last_first.places == (mesh.places[-1], mesh.places[0])
    with last_first:
        assert [s.item() for s in dr.shards(last_first.coordinate() + torch.zeros(()))] == [0.0, 1.0]
    with pytest.raises(dr.errors.UsageError, match="given twice: each member of a mesh is another place"):
        dr.init_device_mesh([0, 0], (2,))
    with pytest.raises(dr.errors.UsageError, match="has 2 members, got 1 places"):
        dr.init_device_mesh([0], (2,))


def test_more_members_than_there_are_place_numbers(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2, simulate_cuda=100)
    mesh = dr.init_device_mesh("cuda", (2, 100))
    ranks = dr.from_shards([torch.tensor(float(k)) for k in range(200)], mesh)
    held = [ranks.member(k) for k in range(200)]  # type: ignore[attr-defined]
    doubled = [member * 2 for member in held]
    assert [t.item() for t in doubled[::37]] == [2.0 * k for k in range(200)[::37]]
    assert [s.item() for s in dr.shards(ranks + 1)] == [k + 1.0 for k in range(200)]
    assert torch.zeros_like(held[150]).place == mesh.places[150]  # type: ignore[attr-defined]
    rank = mesh.get_local_rank(
        1
    )  # torch's own code, run for each, names the device that a member's tensor shows
    ones = run_for_each(lambda t, n: torch.full((2,), n, device=t.device), [ranks, rank], {})
    assert [s.tolist() for s in dr.shards(ones)[::37]] == [[k % 100] * 2 for k in range(200)[::37]]


def test_a_write_through_a_member_is_in_the_graph(mesh: Mesh) -> None:
    """The mesh's tensor and its members have one history, as a tensor and its rows have."""

    def program(x: torch.Tensor, row: Callable[[torch.Tensor, int], torch.Tensor], w: torch.Tensor) -> Any:
        row(x, 1).mul_(w * 3)
        kept = row(x, 1)
        kept[1:].add_(w[1:])
        x.mul_(2)
        return (x * x).sum() if x.dim() == 1 else (x * x).sum(1)

    leaf = torch.arange(4.0 * mesh.size()).reshape(mesh.size(), 4)
    local, w = leaf.clone().requires_grad_(), torch.arange(1.0, 5.0, requires_grad=True)
    program(local * 1, lambda x, k: x[k], w).sum().backward()
    remote = dr.from_shards(list(leaf), mesh).requires_grad_()
    v = torch.arange(1.0, 5.0).to(mesh.places[1]).requires_grad_()
    program(remote * 1, lambda x, k: x.member(k), v).backward()  # type: ignore[attr-defined]
    assert torch.equal(torch.stack(dr.shards(remote.grad)), local.grad)  # type: ignore[arg-type]
    assert torch.equal(dr.fetch(v.grad), w.grad)


def test_a_member_is_a_view_to_autograd(mesh: Mesh) -> None:
    x = torch.ones(3, device=mesh.device)
    member = x.member(0)  # type: ignore[attr-defined]
    assert member._base is x
    # What needs a gradient comes in through the member alone.
    v = torch.full((3,), 2.0).to(member.place).requires_grad_()
    member.copy_(v * v)
    (x * ranks(mesh).add(1)).sum().backward()
    assert dr.fetch(v.grad).tolist() == [4.0] * 3
    leaf = torch.ones(3, device=mesh.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad is being used in"):
        leaf.member(0).add_(1)  # type: ignore[attr-defined]
    y = leaf * 1
    z = y.exp()
    z.member(1).zero_()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with torch.no_grad():
        leaf.member(1).zero_()  # type: ignore[attr-defined]
    assert [s.tolist() for s in dr.shards(leaf)][:2] == [[1.0] * 3, [0.0] * 3]
    # The second derivative goes the same way back.
    (grad,) = torch.autograd.grad((leaf.member(0) ** 3).sum(), leaf, create_graph=True)  # type: ignore[attr-defined]
    (grad.member(0) * 2).sum().backward()  # type: ignore[attr-defined]
    assert [s.tolist() for s in dr.shards(leaf.grad)][:2] == [[12.0] * 3, [0.0] * 3]  # type: ignore[arg-type]


def test_a_member_has_sizes_and_strides_of_its_own(mesh: Mesh) -> None:
    parts = [torch.arange(6.0).reshape(2, 3) + k for k in range(mesh.size())]
    w = dr.from_shards(parts, mesh)
    other = torch.arange(2.0).to(mesh.places[0])
    first = w.member(0)  # type: ignore[attr-defined]
    for turn in (
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(20),
        lambda t: t.set_(other),
        lambda t: t.as_strided_((2,), (1,)),
        lambda t: setattr(t, "data", other),
    ):
        turn(w.member(0))  # type: ignore[attr-defined]
        assert all(torch.equal(s + 1, part + 1) for s, part in zip(dr.shards(w + 0), parts))
        assert torch.equal(dr.fetch(first + 0), parts[0])
    w.t_()
    assert torch.equal(dr.fetch(first + 0), parts[0]) and torch.equal(dr.fetch(w.member(0) + 0), parts[0].T)  # type: ignore[attr-defined]


def test_out_takes_the_sizes_that_only_the_members_know(mesh: Mesh) -> None:
    x, out = torch.tensor([0.0, 1.0, 2.0]).to(mesh.device), torch.empty(0, device=mesh.device)
    view = out.view(-1)
    assert torch.masked_select(x, x > 0, out=out) is out
    same(out + 1, torch.tensor([2.0, 3.0]))
    same(out, torch.tensor([1.0, 2.0]))
    assert view.shape == (0,)


def test_a_member_is_not_recorded(mesh: Mesh) -> None:
    x = torch.ones(3, device=mesh.device)
    with pytest.raises(dr.errors.NotSupportedError, match="take the member outside"):
        make_fx(lambda t: t.member(0) * 2)(x)
