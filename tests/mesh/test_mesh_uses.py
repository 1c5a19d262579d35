"""What users meet on meshes beside the core: attention, autocast, checkpointing, memory, wrong operands, the
page of documentation.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from meshes import two_workers

__all__ = ["two_workers"]
Mesh = dr.mesh.DeviceMesh


@pytest.fixture(params=["cpu", "cuda"])
def mesh(request: pytest.FixtureRequest, two_workers: None) -> Mesh:
    """Two members, one a worker, and four, two a worker."""
    return dr.init_device_mesh(
        request.param, (2, 1 if request.param == "cpu" else 2), mesh_dim_names=("dp", "tp")
    )


def same(t: torch.Tensor, wanted: torch.Tensor) -> None:
    for shard in dr.shards(t):
        assert shard.dtype == wanted.dtype and torch.equal(shard, wanted)


def test_attention_and_autocast_know_what_the_members_are(mesh: Mesh) -> None:
    """A mesh of CPUs computes as a CPU does: its fused attention, its list of autocast; simulated GPUs have
    the GPU's list.
    """
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    found = []
    for device in ("cpu", mesh.device):
        leaves = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in leaves)])
    for here, there in zip(*found):
        same(there, here)
    x = torch.randn(3, 4).to(mesh.device)
    with torch.autocast("remote", dtype=torch.bfloat16):
        dtype = torch.nn.functional.layer_norm(x @ x.T, (3,)).dtype
    assert dtype == (torch.float32 if "cuda" in mesh.places[0].local_device else torch.bfloat16)


def test_what_runs_along_lines_takes_the_meshs_tensors_only(mesh: Mesh) -> None:
    """What lives elsewhere once went to the workers, which took it for a broken protocol and left."""
    lines, part = mesh.lines("dp"), mesh.select(dp=0)
    with dr.on(mesh.places[0]):
        one = torch.ones(2)
    for wrong, said in (
        (torch.ones(2), r"is a local tensor.*x.to\(mesh.device\)"),
        (one, r"lives on node 0 .*x.to\(mesh.device\)"),
        (torch.ones(2, device=part.device), r"lives on \d members? on node 0\. .*dr.from_shards\("),
    ):
        for call in (dr.lines.all_reduce, dr.lines.all_gather, dr.lines.reduce_scatter):
            with pytest.raises(dr.errors.PlacementError, match=f"takes tensors on it; this one {said}"):
                call(lines, wrong)
    with pytest.raises(dr.errors.UsageError, match=r"mesh.lines\('tp'\).*got <distruntime.mesh.DeviceMesh"):
        dr.lines.all_reduce(mesh, x := torch.ones(2, device=mesh.device))  # type: ignore[arg-type]
    with pytest.raises(
        dr.errors.NotSupportedError,
        match=r"2 equal parts, got \(3,\).*dr.primitives.reduce_scatter, which may be uneven",
    ):
        dr.lines.reduce_scatter(lines, torch.ones(3, device=mesh.device))
    with pytest.raises(dr.errors.NotSupportedError, match="the reduction 'median' does not exist"):
        dr.lines.all_reduce(lines, x, "median")
    with pytest.raises(dr.errors.NotSupportedError, match="by AVG, not int64"):
        dr.lines.all_reduce(lines, x.long(), "AVG")
    with pytest.raises(dr.errors.UsageError, match="root is a rank in a line of"):
        dr.lines.broadcast(lines, x, lines.size)
    for sent, got in (
        ([1, 1], [2, 0]),
        ([1], [1]),
        ([2, 2], [2, 2]),
    ):  # once these went to the workers, whose channel broke for good
        with pytest.raises(
            dr.errors.NotSupportedError,
            match=r"as many rows to each.*got \(2,\), sends .*dr.functional.all_to_all",
        ):
            dr.lines.all_to_all(lines, x, got, sent)
    for op in ("SUM", "sum", dr.distributed.ReduceOp.SUM):
        same(dr.lines.all_reduce(lines, x, op), torch.full((2,), float(lines.size)))


def test_lines_that_broke_are_opened_again(mesh: Mesh) -> None:
    """Where nobody was lost."""
    x, lines = torch.ones(2, device=mesh.device), mesh.lines("dp")
    lines.groups[0].close()
    with pytest.raises(
        dr.errors.NodeFailed, match=r"a group was closed.*mesh.lines\(...\) connects them anew"
    ):
        dr.lines.all_reduce(lines, x)
    same(dr.lines.all_reduce(mesh.lines("dp"), x), torch.full((2,), 2.0))
    dist.all_reduce(x, group=mesh.get_group("dp"))
    same(x, torch.full((2,), 2.0))


def test_the_first_mesh_leaves_the_excepthook_alone(mesh: Mesh) -> None:
    # It writes "[rank0]: " before every line.
    assert sys.excepthook.__module__ != "torch.distributed.distributed_c10d"


def test_what_is_of_one_place_says_so_of_a_mesh(mesh: Mesh) -> None:
    x = torch.ones(2, device=mesh.device)
    with pytest.raises(dr.errors.PlacementError, match=r"are a mesh.*`with mesh:`"):
        dr.on(x.place)
    with pytest.raises(dr.errors.PlacementError, match=r"are a mesh.*`with mesh:`"):
        torch.remote.set_device(mesh.device)  # type: ignore[attr-defined]
    with pytest.raises(
        dr.errors.PlacementError, match="a node is named by its number, 0 to 1, or by a place"
    ):
        dr.on(mesh)  # type: ignore[arg-type]
    for move in (lambda: x.cuda(), lambda: x.to("cuda:0"), lambda: x.to(0)):
        with pytest.raises(dr.errors.PlacementError, match=r"x.member\(k\)"):
            move()
    with pytest.raises(dr.errors.PlacementError, match=r"are a mesh, which is no member of a group"):
        dr.distributed.all_reduce([x])
    with pytest.raises(dr.errors.UsageError, match=r"got a DTensor: t.to_local\(\)"):
        dr.shards(DTensor.from_local(x, mesh["dp"], [Shard(0)], run_check=False))


def test_torchs_groups_are_of_all_members_or_of_a_dimension(mesh: Mesh) -> None:
    """One of some members was taken for one of all, and its sums were."""
    x = torch.ones(2, device=mesh.device)
    with pytest.raises(dr.errors.UsageError, match="is of no mesh of distruntime's"):
        dist.all_reduce(x, group=dist.new_group([0]))
    dist.all_reduce(x, group=mesh.get_group("dp"))
    same(x, torch.full((2,), float(mesh.size("dp"))))


def test_torchs_spelling_of_collectives(mesh: Mesh) -> None:
    """Some of these went to the workers as they are, who do not know them."""
    group, lines = mesh.get_group("dp"), mesh.lines("dp")
    n, parts = lines.size, [torch.arange(4.0) + 10 * k for k in range(mesh.size())]
    x = dr.from_shards(parts, mesh)
    reduced, exchanged, cut = x.clone(), torch.zeros_like(x), torch.zeros(4, device=mesh.device)
    dist.reduce(reduced, dst=0, group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.reduce_scatter(cut, [x] * n, group=group)
    found = [dr.shards(t) for t in (reduced, exchanged, cut)]
    for row in lines.rows:
        total = torch.stack([parts[k] for k in row]).sum(0)
        for rank, k in enumerate(row):
            assert torch.equal(found[0][k], parts[k] if rank else total)
            assert torch.equal(found[1][k], torch.cat([parts[m].chunk(n)[rank] for m in row]))
            assert torch.equal(found[2][k], total)
    with pytest.raises(dr.errors.NotSupportedError, match=r"all members do the same.*x.member\(k\)"):
        dist.gather(x, [torch.zeros_like(x) for _ in range(n)], dst=0, group=group)


@pytest.mark.filterwarnings(
    "ignore:.* is deprecated:FutureWarning"
)  # newer names, which torch 2.11 does not have
def test_wrong_calls_of_torchs_collectives_leave_the_group_whole(mesh: Mesh) -> None:
    """The members' channel found out, and broke the group; DistributedDataParallel over the default group
    does so.
    """
    group, x = mesh.get_group("dp"), torch.ones(2, device=mesh.device)

    def empty(count: int, size: int) -> list[torch.Tensor]:
        return [torch.zeros(size, device=mesh.device) for _ in range(count)]

    for call, said in (
        (lambda: dist.all_gather(empty(3, 2), x, group=group), r"list has 2 tensors.*got 3$"),
        (lambda: dist.all_gather(empty(2, 3), x, group=group), r"output has 2 elements.*got 3$"),
        (
            lambda: dist.all_gather_into_tensor(empty(1, 5)[0], x, group=group),
            r"output has 4 elements.*got 5$",
        ),
        (
            lambda: dist.reduce_scatter_tensor(empty(1, 5)[0], x, group=group),
            r"input has 10 elements.*got 2$",
        ),
        (lambda: dist.all_to_all([x], [x], group), r"input has 2 tensors.*got 1$"),
        (
            lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).to(mesh.device)),
            r"every device.*mesh.get_group\(dim\)",
        ),
    ):
        with pytest.raises(dr.errors.UsageError, match=said):
            call()
    with pytest.raises(dr.errors.NotSupportedError, match="takes tensors of one shape"):
        dist.all_to_all(empty(2, 2), [*empty(1, 2), *empty(1, 3)], group)
    with pytest.raises(dr.errors.NotSupportedError, match=r"all members do the same.*x.member\(k\)"):
        dist.send(x, dist.get_global_rank(group, 1), group=group)
    dist.all_reduce(x, group=group)
    same(x, torch.full((2,), float(mesh.size("dp"))))


def test_checkpointing_replays_dropout(mesh: Mesh) -> None:
    torch.remote.synchronize(mesh.device)  # type: ignore[attr-defined]
    for distinct in (False, True):
        found = []
        for again in (False, True):
            mesh.manual_seed(3, distinct=distinct)
            x = torch.ones(4, 8, device=mesh.device, requires_grad=True)

            def drop(t: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.dropout(t * 2) ** 2

            out = checkpoint(drop, x, use_reentrant=False) if again else drop(x)
            out.sum().backward()
            assert x.grad is not None
            found.append(dr.shards(out.detach()) + dr.shards(x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found))
        assert torch.equal(found[0][0], found[0][1]) != distinct


def test_threads_enter_and_leave_a_mesh_in_any_order(mesh: Mesh) -> None:
    """Each took the other's way out."""
    inside, outside = threading.Barrier(2, timeout=30), threading.Event()

    def other() -> torch.Tensor:
        with mesh:
            inside.wait()
            outside.wait(30)
            return torch.zeros(2)

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other)
        with mesh:
            inside.wait()
        outside.set()
        assert torch.zeros(2).device.type == "cpu" and later.result(30).device == mesh.device


def test_memory_names_the_members_and_the_line(mesh: Mesh) -> None:
    kept = torch.ones(1 << 18, device=mesh.device)
    view = kept[:10]
    found = dr.memory()
    assert [h.place for h in found.lines if "kept = torch.ones(1 << 18" in h.line] == list(mesh.places)
    assert all(
        h.nbytes == 1 << 20 and h.tensors == 1 for h in found.lines if "kept = torch.ones(1 << 18" in h.line
    )
    assert {d.place: d.held >= 1 << 20 for d in found.devices if d.place in mesh.places} == dict.fromkeys(
        mesh.places, True
    )
    del kept, view
    assert not any("kept = torch.ones(1 << 18" in h.line for h in dr.memory().lines)


def test_memory_knows_which_members_have_nothing(mesh: Mesh) -> None:
    """And a member's proxy is a name, no memory more."""
    kept = torch.ones(1 << 16, device=mesh.device)
    name = kept.member(1)  # type: ignore[attr-defined]
    index = dr.from_shards(
        [torch.full((1 << 14,), 1 << 20 if k == 1 else 0) for k in range(mesh.size())], mesh
    )
    bad = kept.take(index)

    def holding(line: str) -> list[dr.types.Place]:
        return [h.place for h in dr.memory(top=1000).lines if line in h.line and h.place in mesh.places]

    assert sorted(map(str, holding("kept = torch.ones(1 << 16"))) == sorted(
        map(str, mesh.places)
    ) and not holding("name = kept")
    places = [place for k, place in enumerate(mesh.places) if k != 1]
    assert sorted(map(str, holding("bad = kept.take"))) == sorted(map(str, places))
    huge = torch.empty(1 << 50, device=mesh.device)
    with pytest.raises(RuntimeError) as caught:
        huge.member(0).sum().item()  # type: ignore[attr-defined]
    text = str(caught.value)
    assert (
        "held there: " in text
        and "kept = torch.ones(1 << 16" in text
        and "huge = torch.empty" not in text.partition("held there")[2]
    )
    with pytest.raises(dr.errors.RemoteError):
        dr.synchronize()
    assert name.dim() == bad.dim() == 1
    for _ in range(4):
        with suppress(dr.errors.RemoteError):
            dr.synchronize()


def test_meshes_come_and_go(fresh_session: Callable[..., Any]) -> None:
    """More of them than there are place numbers, and torch keeps no group of each."""
    fresh_session(world_size=1, simulate_cuda=120)
    mesh = dr.init_device_mesh("cuda", (120,), mesh_dim_names=("dp",))
    for k in range(120):
        part = mesh.select(dp=k)
        assert torch.ones(2, device=part.device).place.members == (mesh.places[k],)
    known = len(torch.distributed.distributed_c10d._world.pg_names)
    for k in range(30):
        again = dr.init_device_mesh("cuda", (120,), mesh_dim_names=("dp",))
        assert again == mesh and mesh.select(dp=k).size() == 1
    assert len(torch.distributed.distributed_c10d._world.pg_names) == known


MOVED = {
    "FSDPMeshInfo": "del torch_dtensor.torch_fsdp._fsdp._fsdp_common.FSDPMeshInfo",
    "Shard is marked": "code = lambda f: getattr(getattr(f, '__func__', f), '__code__', 0)\n"
    "marked = lambda f: code(f) is torch_dtensor._MARK\n"
    "for name, f in list(vars(Shard).items()): marked(f) and delattr(Shard, name)",
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.slow(reason="starts programs that import torch, 8 s")
def test_a_torch_that_has_moved_its_parts_fails_at_the_first_mesh_with_their_name(name: str) -> None:
    """At every mesh, not at the first alone; and not by computing what rank 0 would."""
    tries = "for _ in 'ab':\n    try: torch_dtensor.prepare()\n"
    tries += "    except dr.errors.NotSupportedError as error: print(error)"
    imports = "import distruntime as dr\nfrom distruntime.mesh import torch_dtensor"
    program = f"{imports}\nfrom torch.distributed.tensor import Shard\n{MOVED[name]}\n{tries}"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == 2 and all(
        re.match(f"torch .* has moved a part of its own that meshes need: .*{name}", line) for line in printed
    )


def test_a_mesh_of_an_ended_session_says_so(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    mesh = dr.init_device_mesh("cpu", (1,))
    dr.shutdown()
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.SessionClosed), mesh:
        pass
    assert repr(dr.init_device_mesh("cpu", (1,)).lines()) == "<1 line of 1 in the mesh of 1 member on node 0>"
