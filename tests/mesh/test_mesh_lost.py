"""A member of a mesh is killed in the midst of something: every wait ends, and says who and why; the others'
shards are there.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distruntime as dr
from distruntime.session.session import active_session
from meshes import MLP
from processes import STARTING, slots, stop, until

Mesh = dr.mesh.DeviceMesh
LOSSES = 6  # tests below, each of which kills a worker


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """Workers of two simulated GPUs each: the last of them that is there is the next to be killed."""
    dr.shutdown()
    dr.init_master_worker(world_size=LOSSES + 1, simulate_cuda=2, timeout=STARTING)
    yield active_session()
    dr.shutdown()


@pytest.fixture
def mesh(session: Any) -> Mesh:
    """Two members of worker 0, and two of the worker that will be killed: the first dimension goes from one
    to the other.
    """
    victim = max(node.index for node in session.nodes if node.failed is None)
    return dr.init_device_mesh(
        [dr.place(w, f"cuda:{k}") for w in (0, victim) for k in range(2)], (2, 2), mesh_dim_names=("dp", "tp")
    )


@contextmanager
def dying(mesh: Mesh, standing: bool = True) -> Iterator[str]:
    """Kill the last member's worker within a `with` block, whether that waits for it or not; `standing` still
    from its beginning.

    Gives what every error must say. In the end its loss is known, and the failures that it has caused are
    read.
    """
    node = mesh.places[-1].node
    worker, pid = mesh.session.nodes[node], mesh.session.workers[node].pid
    if standing:
        stop(pid)
    killer = threading.Timer(0.5, lambda: os.kill(pid, signal.SIGKILL))
    killer.start()
    try:
        yield rf"node {node} .*exited: killed by signal 9"
    finally:
        killer.join()
    until(lambda: worker.failed)
    settle()


def settle() -> None:
    for _ in range(20):
        with suppress(dr.errors.NodeFailed):
            dr.synchronize(0)
            return


def numbered(mesh: Mesh) -> torch.Tensor:
    return dr.from_shards([torch.full((3,), float(k)) for k in range(mesh.size())], mesh)


def left(mesh: Mesh) -> Mesh:
    """A new mesh of the members that are left; it works."""
    found = dr.init_device_mesh(mesh.places[:2], (2,), mesh_dim_names=("tp",))
    assert [s.tolist() for s in dr.shards(dr.lines.all_reduce(found.lines("tp"), numbered(found)))] == [
        [1.0] * 3
    ] * 2
    return found


def there(t: torch.Tensor, wanted: list[list[float]]) -> None:
    """Hold that the members that are left have these values, and the others say why they have none."""
    assert [t.member(k).tolist() for k in range(2)] == wanted  # type: ignore[attr-defined]
    for k in (2, 3):
        with pytest.raises(dr.errors.NodeFailed, match=r"exited: killed by signal 9"):
            t.member(k)  # type: ignore[attr-defined]


@pytest.mark.parametrize("standing", [False, True])
def test_in_a_stream_of_operators(mesh: Mesh, standing: bool) -> None:
    gc.collect()
    before, kept = slots(0), numbered(mesh)
    several = [kept + k for k in range(300)]
    with dying(mesh, standing) as why:
        with pytest.raises(
            dr.errors.NodeFailed, match=rf"the mesh of 4 members on nodes 0.* has lost a member: {why}"
        ):
            x = kept
            for _ in range(10_000_000):
                x = x * 0.5 + 1
    there(x, [x.member(0).tolist()] * 2)  # type: ignore[attr-defined]
    there(several[-1], [[299.0] * 3, [300.0] * 3])
    with pytest.raises(dr.errors.NodeFailed, match=why):
        dr.shards(kept)
    with pytest.raises(dr.errors.NodeFailed, match=why):
        kept.add_(1)
    assert "member 0 of 4" in repr(kept) and kept.tolist() == [0.0] * 3
    new = left(mesh)
    again = dr.from_shards([kept.member(k) for k in range(2)], new)  # type: ignore[attr-defined]
    assert [s.tolist() for s in dr.shards(again + 1)] == [[1.0] * 3, [2.0] * 3]
    # What is let go of is let go of on the workers that are left: it was theirs until the session ended.
    del kept, several, x, again
    gc.collect()
    until(lambda: slots(0) <= before)


def test_in_a_collective(mesh: Mesh) -> None:
    kept, lines, within = numbered(mesh), mesh.lines("dp"), mesh.lines("tp")
    dr.shards(dr.lines.all_reduce(lines, kept))
    with dying(mesh) as why:
        operations: list[Callable[[dr.lines.Lines, torch.Tensor], torch.Tensor]] = [
            dr.lines.all_reduce,
            dr.lines.all_gather,
            lambda lines, x: dr.lines.broadcast(lines, x, 1),
        ]
        results = [operation(lines, kept) + 1 for operation in operations]
        fine = dr.lines.all_reduce(within, kept)
        for t in results:
            for read in (t.cpu, lambda t=t: t.sum().item(), lambda t=t: dr.shards(t), t.member(1).tolist):  # type: ignore[attr-defined,misc]
                with pytest.raises(dr.errors.NodeFailed, match=why):
                    read()
            assert "poisoned: group" in repr(t)
    there(fine, [[1.0] * 3] * 2)
    there(kept, [[0.0] * 3, [1.0] * 3])
    with pytest.raises(dr.errors.NodeFailed, match=why):
        dr.lines.all_reduce(lines, kept)
    left(mesh)


def train(model: nn.Module, mesh: Mesh, steps: int) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 16, device=mesh.device)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def parallel(mesh: Mesh) -> nn.Module:
    return parallelize_module(MLP().to(mesh.device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def sharded(mesh: Mesh) -> nn.Module:
    model = MLP().to(mesh.device)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about FSDP2 and views
@pytest.mark.parametrize("make", [parallel, sharded])
def test_in_a_step_of_training(mesh: Mesh, make: Callable[[Mesh], nn.Module]) -> None:
    model = make(mesh["dp"])
    assert train(model, mesh, 2).item() > 0
    weight: DTensor = model[0].weight  # type: ignore[index,assignment]
    frozen: Any = model[0].bias.detach().clone()  # type: ignore[index,union-attr,operator]
    with dying(mesh) as why, pytest.raises(dr.errors.NodeFailed, match=why):
        train(model, mesh, 1).item()
        train(model, mesh, 10_000)
    with torch.no_grad():
        shards = [frozen.to_local().member(k) for k in range(2)]
    assert shards[0].tolist() == shards[1].tolist()
    for read in (
        lambda: weight.full_tensor().cpu(),
        lambda: dr.fetch(model.state_dict()),
        lambda: train(model, mesh, 1),
    ):
        with pytest.raises(dr.errors.NodeFailed, match=why):
            read()
    new = left(mesh)
    assert train(make(new), new, 2).item() > 0


def test_while_it_is_read(mesh: Mesh) -> None:
    whole = distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])
    assert whole.full_tensor().tolist() == list(range(8))
    kept = numbered(mesh)
    with dying(mesh) as why:
        with pytest.raises(dr.errors.NodeFailed, match=why):
            dr.shards(kept)
        for read in (
            lambda: whole.full_tensor().cpu(),
            lambda: dr.fetch(whole),
            lambda: dr.shards(whole.to_local()),
        ):
            with pytest.raises(dr.errors.NodeFailed, match=why):
                read()
        assert "member 0 of 4" in repr(kept) and "node 0 cuda:1" in repr(kept.member(1))  # type: ignore[attr-defined]
    with torch.no_grad():  # else torch makes a view of it, which is an operator
        there(whole.to_local(), [[0.0, 1.0, 2.0, 3.0]] * 2)
    left(mesh)
