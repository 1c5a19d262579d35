"""torch.distributed under one master: what takes one rank's share is refused, the rest needs no rank."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.nn import functional
from torch.utils.data import DistributedSampler

import distruntime as dr

WEIGHTS = [torch.tensor([1.0, k]) for k in range(4)]

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def mesh() -> Iterator[dr.mesh.DeviceMesh]:
    """Members 0 and 2 are a line of "data", and so are 1 and 3."""
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield dr.init_device_mesh("cuda", [("data", 2), ("tensor", 2)])
    dr.shutdown()


def test_a_sampler_of_the_callers_rank_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    """It gave rank 0's share: an epoch trained on a quarter of the data."""
    group = mesh.get_group("data")
    for sample in (
        lambda: DistributedSampler(range(12)),  # type: ignore[arg-type]
        lambda: DistributedSampler(range(12), num_replicas=4),  # type: ignore[arg-type]
        lambda: DistributedSampler(range(12), 4, dist.get_rank()),  # type: ignore[arg-type]
        lambda: DistributedSampler(range(12), 2, dist.get_rank(group)),  # type: ignore[arg-type]
    ):
        with pytest.raises(dr.errors.UsageError, match=r"leave out the data.*dr.from_shards\(.*, mesh\)"):
            sample()
    own = [list(DistributedSampler(range(12), 4, k, shuffle=False)) for k in range(4)]  # type: ignore[arg-type]
    assert own[0] == [0, 4, 8] and sorted(itertools.chain(*own)) == list(range(12))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_an_optimizer_of_one_ranks_parameters_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    """It updated the first rank's parameters, and left those of the others as they were."""
    optimizers, model = importlib.import_module("torch.distributed.optim"), nn.Linear(2, 2).to(mesh.device)
    for group in (mesh.get_group("data"), None):
        with pytest.raises(
            dr.errors.NotSupportedError,
            match=r"fully_shard\(.*reshard_after_forward=False\).*SGD\(model.parameters\(\)\)",
        ):
            optimizers.ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.SGD, process_group=group, lr=1.0
            )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_each_ranks_parts_is_refused(mesh: dr.mesh.DeviceMesh, tmp_path: Path) -> None:
    state = {"x": torch.ones(2, device=mesh.device)}
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"no_dist=True\), or torch.save\(dr.fetch\(state\)"
    ):
        checkpoint.save(state, checkpoint_id=tmp_path / "parts")
    checkpoint.save(dr.fetch(state), checkpoint_id=tmp_path / "whole", no_dist=True)
    found = {"x": torch.zeros(2)}
    checkpoint.load(found, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert found["x"].tolist() == [1, 1]


def test_scatter_from_any_member(mesh: dr.mesh.DeviceMesh) -> None:
    group, at = mesh.get_group("data"), mesh.coordinate("data") * 10.0

    def scattered(**source: int) -> list[float]:
        got = torch.zeros((), device=mesh.device)
        assert dist.scatter(got, [at, at + 1], group=group, **source) is None  # type: ignore[func-returns-value]
        return [shard.item() for shard in dr.shards(got)]

    assert scattered() == [0, 0, 1, 1]
    # Member 2 is the second of its line.
    assert scattered(src=2) == scattered(group_src=1) == [10, 10, 11, 11]
    with pytest.raises(dr.errors.UsageError, match="Give scatter_list="):
        dist.scatter(torch.zeros((), device=mesh.device), src=2, group=group)


def test_a_barrier_needs_no_rank(mesh: dr.mesh.DeviceMesh) -> None:
    dist.barrier(mesh.get_group("data"))
    dist.barrier()
    assert dist.barrier(async_op=True).wait()


def test_what_would_wait_for_other_ranks_is_refused(mesh: dr.mesh.DeviceMesh) -> None:
    """A group of gloo's blocked for good in its constructor."""
    for make in (
        lambda: dist.new_group([0, 1], backend="gloo"),
        lambda: dist.device_mesh.init_device_mesh("remote", (4,), backend_override={0: "gloo"}),
    ):
        with pytest.raises(
            dr.errors.NotSupportedError, match=r"wait for its other ranks.*dr.distributed.new_group\(places, "
        ):
            make()
    with pytest.raises(dr.errors.NotSupportedError, match=r"names who is late"):
        dist.monitored_barrier(mesh.get_group("data"))


def test_groups_of_several_dimensions(mesh: dr.mesh.DeviceMesh) -> None:
    moe = dr.init_device_mesh(mesh.places, [("data", 2), ("pipe", 2), ("tensor", 1)])
    group = moe["pipe", "tensor"]._flatten("model").get_group()
    assert group is moe["model"].get_group() and group.size() == 2
    x = mesh.coordinate("data") * 10 + mesh.coordinate("tensor")
    dist.broadcast(x, 0, group=group)
    assert [shard.item() for shard in dr.shards(x)] == [0, 0, 10, 10]


def gradients(mesh: dr.mesh.DeviceMesh, run: Callable[[torch.Tensor], torch.Tensor]) -> list[list[float]]:
    """Return what each member's share gets of the sum of all results, each times its member's weights."""
    x = dr.from_shards([torch.full((2,), float(k)) for k in range(4)], mesh).requires_grad_()
    (run(x) * dr.from_shards(WEIGHTS, mesh)).sum().backward()
    assert x.grad is not None
    return [shard.tolist() for shard in dr.shards(x.grad)]


def test_gradients_of_torchs_collectives(mesh: dr.mesh.DeviceMesh) -> None:
    """That of a broadcast asked for the caller's rank, and was lost for each source but the first."""
    group = mesh.get_group("data")
    assert gradients(mesh, lambda x: functional.broadcast(x, 0, group)) == [[2, 2], [2, 4], [0, 0], [0, 0]]
    assert gradients(mesh, lambda x: functional.broadcast(x, 2, group)) == [[0, 0], [0, 0], [2, 2], [2, 4]]

    def gathered(x: torch.Tensor) -> torch.Tensor:
        first, second = functional.all_gather(x, group)
        return first + 2 * second

    assert gradients(mesh, gathered) == [[2, 2], [2, 4], [4, 4], [4, 8]]

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        first, second = functional.all_to_all(
            [torch.zeros_like(x), torch.zeros_like(x)], [x, 3 * x], group=group
        )
        return first + 2 * second

    # Member 0 sends x to itself, where the weight is [1, 0], and 3 x to member 2, where it is [1, 2].
    assert gradients(mesh, exchanged) == [[4, 6], [4, 10], [8, 12], [8, 20]]
