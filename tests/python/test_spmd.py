"""`dr.spmd`: a function runs once for each member of a mesh, as a rank of torch.distributed."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distruntime as dr
from processes import state, until


def ranks(mesh: dr.mesh.DeviceMesh) -> list[torch.Tensor]:
    return [torch.full((3,), float(k)) for k in range(mesh.size())]


def serial(steps: int, rate: float = 0.1) -> tuple[nn.Module, list[float]]:
    """Train a small model on the whole batch, here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    x = torch.randn(8, 4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# -- arguments and results -----------------------------------------------------------------------------------


def test_each_member_runs_it_on_its_shard(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def f(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, int, str, dict[str, torch.Tensor]]:
        assert type(x) is torch.Tensor
        total = x.clone()
        dist.all_reduce(total)
        names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
        there = " ".join(os.environ[name] for name in names.split()[:3])
        assert all(os.environ[name] for name in names.split())
        return total * factor, dist.get_rank(), there, {"own": x + 1}

    x = dr.from_shards(ranks(mesh), mesh)
    total, rank, there, named = f(x, 2.0)
    assert [t.tolist() for t in dr.shards(total)] == [[2.0] * 3] * 2
    assert dr.fetch(rank) == [0, 1]
    assert dr.fetch(there) == ["0 2 0", "1 2 0"]
    assert [t.tolist() for t in dr.shards(named["own"] * 1)] == [[1.0] * 3, [2.0] * 3]


def test_what_it_writes_into_a_shard_is_there_afterwards(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def write(x: torch.Tensor) -> None:
        x[1:] += 10 + dist.get_rank()

    x = torch.zeros(3, device=mesh.device)
    row, before = x[1:], x.clone()
    write(x[:])
    write(x)
    assert [t.tolist() for t in dr.shards(x)] == [[0, 20, 20], [0, 22, 22]]
    assert [t.tolist() for t in dr.shards(row)] == [[20, 20], [22, 22]]
    assert not before.any()


def test_a_known_call_waits_for_nothing(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2, device=mesh.device)
    double(x)
    dr.profiler.set_sync_debug_mode("error")
    try:
        y = double(double(x))
    finally:
        dr.profiler.set_sync_debug_mode("default")
    assert y.tolist() == [4.0, 4.0]


def test_local_tensors_and_arrays_arrive(mesh: dr.mesh.DeviceMesh) -> None:
    found = dr.spmd(mesh, lambda x, y, z: (x + z["y"].sum(), float(y.sum())))(
        torch.ones(2), torch.arange(1 << 15).numpy(), {"y": torch.ones(2, device=mesh.device)}
    )
    assert found[0].tolist() == [3.0, 3.0]
    assert dr.fetch(found[1]) == [float(sum(range(1 << 15)))] * 2


def test_sizes_that_differ_come_as_a_list(mesh: dr.mesh.DeviceMesh) -> None:
    found = dr.spmd(mesh, lambda: torch.ones(1 + dist.get_rank()))()
    assert [t.tolist() for t in found] == [[1.0], [1.0, 1.0]]
    assert [t.place.node for t in found] == [0, 1]


def test_an_argument_elsewhere_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    says = r"runs on 2 members .* is on node 0 cpu: .*x\.to\(mesh\.device\)"
    with pytest.raises(dr.errors.PlacementError, match=says):
        dr.spmd(mesh, lambda x: x)(torch.ones(2, device="remote"))
    with pytest.raises(dr.errors.UsageError, match="takes a mesh"):
        dr.spmd(3)  # type: ignore[call-overload]


def test_objects_stay_with_their_members(mesh: dr.mesh.DeviceMesh) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = dist.get_rank()

    @dr.spmd(mesh)
    def count(counter: Counter) -> int:
        counter.count += 1
        return counter.count

    counters = dr.spmd(mesh, lambda: Counter())()
    assert dr.fetch(count(counters)) == [1, 2]
    assert dr.fetch(count(counters)) == [2, 3]
    with pytest.raises(dr.errors.UsageError, match=r"a list by rank goes to functions of dr.spmd"):
        dr.remote(lambda c: c)(counters)


def test_what_it_prints_is_shown_here_with_its_rank(mesh: dr.mesh.DeviceMesh, capfd: Any) -> None:
    said: list[str] = []

    def shown() -> bool:
        # A session that has printed much just now leaves lines out for a while.
        dr.fetch(dr.spmd(mesh, lambda: print("hello from", dist.get_rank()))())
        said.append(capfd.readouterr().out)
        return all(f"[node {k}] [rank {k}] hello from {k}" in "".join(said) for k in (0, 1))

    until(shown)


# -- torch's own, as they are --------------------------------------------------------------------------------


def test_ddp_is_a_serial_run(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def setup(model: nn.Module) -> Any:
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=False)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    @dr.spmd(mesh)
    def step(ddp: nn.Module, optimizer: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size(), [p.grad for p in ddp.parameters()]

    wanted, losses = serial(3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = dr.from_shards([*torch.randn(8, 4).chunk(2)], mesh)
    remote = model.to(mesh.device)
    ddp, optimizer = setup(remote)
    for loss in losses:
        found, gradients = step(ddp, optimizer, x)
        assert found.item() == pytest.approx(loss)
    for p, q in zip(gradients, wanted.parameters()):
        torch.testing.assert_close(p.cpu(), q.grad)
    for p, q in zip(remote.parameters(), wanted.parameters()):
        # The parameters themselves were trained, in the memory of the mesh's tensors.
        for shard in dr.shards(p.detach()):
            torch.testing.assert_close(shard, q.detach())


def test_gradients_arrive_and_come_back(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def backward(model: nn.Module, x: torch.Tensor) -> None:
        assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in model.parameters())
        model.zero_grad()
        nn.parallel.DistributedDataParallel(model)(x).sum().backward()

    model = nn.Linear(3, 1).to(mesh.device)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    backward(model, torch.ones(2, 3, device=mesh.device))
    assert model.weight.grad is not None and model.bias.grad is not None
    assert [t.tolist() for t in dr.shards(model.weight.grad)] == [[[2.0] * 3]] * 2
    assert [t.tolist() for t in dr.shards(model.bias.grad)] == [[2.0]] * 2


def test_zero_redundancy_sampler_and_checkpoint(mesh: dr.mesh.DeviceMesh, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")

    @dr.spmd(mesh)
    def train(x: torch.Tensor) -> Any:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.utils.data import DistributedSampler

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        again = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
        dcp.load(again, checkpoint_id=folder)
        sampler = [*DistributedSampler(range(10), shuffle=False)]
        return [p.detach() for p in model.parameters()], [*again["model"].values()], sampler

    wanted, _ = serial(3)
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    found, loaded, sampled = train(dr.from_shards([*torch.randn(8, 4).chunk(2)], mesh))
    for p, q, r in zip(found, loaded, wanted.parameters()):
        for shard, read in zip(dr.shards(p), dr.shards(q)):
            torch.testing.assert_close(shard, r.detach())
            torch.testing.assert_close(read, r.detach())
    assert dr.fetch(sampled) == [[*range(0, 10, 2)], [*range(1, 10, 2)]]


def test_stores_are_torchs_own(mesh: dr.mesh.DeviceMesh, tmp_path: Path) -> None:
    path = str(tmp_path / "store")

    @dr.spmd(mesh)
    def meet(x: torch.Tensor) -> list[str]:
        mine, other = dist.get_rank(), 1 - dist.get_rank()
        found = []
        for store in (dist.distributed_c10d._get_default_store(), dist.FileStore(path, 2)):
            named = dist.PrefixStore("met", store)
            named.set(f"{mine}", f"rank {mine}")
            # This waits until the other rank has set it.
            found.append(named.get(f"{other}").decode())
        return found

    assert dr.fetch(meet(dr.from_shards(ranks(mesh), mesh))) == [["rank 1"] * 2, ["rank 0"] * 2]


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_a_serial_run(mesh: dr.mesh.DeviceMesh, version: int) -> None:
    @dr.spmd(mesh)
    def train(x: torch.Tensor) -> list[torch.Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if version == 1:
            sharded: nn.Module = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            own = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            sharded = fully_shard(model, mesh=own)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            sharded(x).square().mean().backward()
            optimizer.step()
        if version == 1:
            with FullyShardedDataParallel.summon_full_params(sharded):
                return [p.detach().clone() for p in model.parameters()]
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]

    wanted, _ = serial(3)
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    found = train(dr.from_shards([*torch.randn(8, 4).chunk(2)], mesh))
    for p, q in zip(found, wanted.parameters()):
        torch.testing.assert_close(p.cpu().reshape(q.shape), q.detach())


def test_a_call_finds_its_rank_in_the_environment_whatever_the_last_one_did(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh, returns=object)
    def size(after: str) -> str:
        found = os.environ["WORLD_SIZE"]
        os.environ["WORLD_SIZE"] = after
        return found

    assert [dr.fetch(size("7")) for _ in range(2)] == [["2", "2"]] * 2


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_function_may_end_the_group(mesh: dr.mesh.DeviceMesh, ranks: tuple[int, ...]) -> None:
    @dr.spmd(mesh, returns=object)
    def ends(counter: list[int]) -> int:
        counter.append(dist.get_rank())
        dist.barrier()
        if dist.get_rank() in ranks:
            dist.destroy_process_group()
        return len(counter)

    @dr.spmd(mesh, returns=object)
    def total(stays: object) -> tuple[float, int]:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item(), os.getpid()

    stays = dr.spmd(mesh, lambda: nn.Linear(1, 1))()
    before = dr.fetch(total(stays))
    for _ in range(2):
        assert dr.fetch(ends([])) == [1, 1]
        # The processes are those that were there, and so are their objects.
        assert dr.fetch(total(stays)) == before == [(2.0, pid) for _, pid in before]


# -- processes -----------------------------------------------------------------------------------------------


def test_members_of_one_worker_and_their_end(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=3)
    mesh = dr.init_device_mesh("cuda", (3,))

    def total(x: torch.Tensor) -> tuple[torch.Tensor, int, str]:
        dist.all_reduce(x)
        return x, os.getpid(), os.environ["LOCAL_RANK"]

    x = dr.from_shards(ranks(mesh), mesh)
    function = dr.spmd(mesh, total)
    found, pids, local = function(x)
    assert [t.tolist() for t in dr.shards(found)] == [[3.0] * 3] * 3
    assert dr.fetch(local) == ["0", "1", "2"]
    first = dr.fetch(pids)
    assert len({*first}) == 3
    del mesh, function, found, pids, local, x
    gc.collect()
    dr.synchronize()
    until(lambda: not any(map(state, first)))
    # A worker that is killed takes its members along.
    mesh = dr.init_device_mesh("cuda", (2,))
    second = dr.fetch(dr.spmd(mesh, os.getpid)())
    worker = dr.fetch(dr.remote(os.getpid)(node=0))
    os.kill(worker, signal.SIGKILL)
    until(lambda: not any(map(state, second)))


def test_threads_call_at_the_same_time_beside_collectives(mesh: dr.mesh.DeviceMesh) -> None:
    @dr.spmd(mesh)
    def total(x: Any, k: float) -> Any:
        y = x * k
        dist.all_reduce(y)
        return y

    x, found = torch.ones(2, device=mesh.device), list[Any]()

    def call() -> None:
        found.extend([total(x, float(k)).member(1)[0].item() for k in range(8)])

    def reduce() -> None:
        found.extend([dr.lines.all_reduce(mesh.lines(), x * k).member(1)[0].item() for k in range(8)])

    total(x, 1.0)
    threads = [threading.Thread(target=act, daemon=True) for act in (call, call, reduce)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(3 * [2.0 * k for k in range(8)])
