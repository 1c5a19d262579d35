"""DistributedDataParallel over a mesh reduces beside the backward pass, with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import distruntime as dr
from distruntime.session.session import active_session
from fewer import fewer
from meshes import make

SHAPES = {"2 nodes": ("cpu", (2,)), "2 a node": ("cuda", (4,)), "1": ("cpu", (1,))}


@pytest.fixture(scope="module", params=SHAPES)
def mesh(request: pytest.FixtureRequest) -> Iterator[dr.mesh.DeviceMesh]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    kind, shape = SHAPES[request.param]
    yield dr.init_device_mesh(kind, shape, mesh_dim_names=("dp",))
    dr.shutdown()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh()) * self.scale


def batches(mesh: dr.mesh.DeviceMesh, rows: int = 6) -> tuple[list[torch.Tensor], torch.Tensor]:
    parts = [torch.randn(rows, 8) for _ in mesh.places]
    return parts, dr.from_shards(parts, mesh)


def wrap(serial: nn.Module, mesh: dr.mesh.DeviceMesh, **options: Any) -> Any:
    # Small buckets, so that there are several.
    options = {"bucket_cap_mb": 0.001, **options}
    return DistributedDataParallel(
        copy.deepcopy(serial).to(mesh.device), process_group=mesh.get_group("dp"), **options
    )


def same(model: Any, serial: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(model.module.named_parameters(), serial.parameters()):
        assert p.grad is not None and q.grad is not None, name
        for shard in dr.shards(p.grad):
            torch.testing.assert_close(shard, q.grad, atol=atol, rtol=max(atol, 1e-5))


def serial_step(serial: nn.Module, parts: list[torch.Tensor]) -> None:
    sum(serial(part).square().mean() for part in parts).div(len(parts)).backward()  # type: ignore[union-attr]


def streams_of(mesh: dr.mesh.DeviceMesh) -> int:
    order = mesh._mesh_log.order
    return 1 if order is None else order.count


@pytest.mark.parametrize(
    "options",
    fewer(
        [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
        3,
        "other options, 1 s",
    ),
    ids=lambda options: next(iter(options), "plain"),
)
def test_gradients_are_the_serial_ones(options: dict[str, bool], mesh: dr.mesh.DeviceMesh) -> None:
    serial = Net()
    model = wrap(serial, mesh, **options)
    for _ in range(3):
        parts, x = batches(mesh)
        model.zero_grad()
        serial.zero_grad()
        model(x).square().mean().backward()
        serial_step(serial, parts)
        same(model, serial)
    # The reductions have gone to one stream of the mesh's own.
    assert streams_of(mesh) == 2


def test_no_sync_reduces_at_the_last_micro_batch_alone(mesh: dr.mesh.DeviceMesh) -> None:
    serial = Net()
    model = wrap(serial, mesh)
    for _ in range(2):
        model.zero_grad()
        serial.zero_grad()
        for k in range(3):
            parts, x = batches(mesh)
            if k < 2:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
            serial_step(serial, parts)
        same(model, serial)


def test_ignored_parameters_stay_the_members_own(mesh: dr.mesh.DeviceMesh) -> None:
    serial = Net()
    replica = copy.deepcopy(serial).to(mesh.device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(replica, ["b.weight"])
    model = DistributedDataParallel(replica, process_group=mesh.get_group("dp"))
    parts, x = batches(mesh)
    model(x).square().mean().backward()
    for k, part in enumerate(parts):
        own = copy.deepcopy(serial)
        own(part).square().mean().backward()
        assert own.b.weight.grad is not None and replica.b.weight.grad is not None
        torch.testing.assert_close(dr.shards(replica.b.weight.grad)[k], own.b.weight.grad)
    serial_step(serial, parts)
    assert replica.a.weight.grad is not None and serial.a.weight.grad is not None
    for shard in dr.shards(replica.a.weight.grad):
        torch.testing.assert_close(shard, serial.a.weight.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook"])
def test_hooks(hook: str, mesh: dr.mesh.DeviceMesh) -> None:
    serial = Net()
    model = wrap(serial, mesh)
    model.register_comm_hook(mesh.get_group("dp"), getattr(default_hooks, hook))
    for _ in range(2):
        parts, x = batches(mesh)
        model.zero_grad()
        serial.zero_grad()
        model(x).square().mean().backward()
        serial_step(serial, parts)
        same(model, serial, 1e-6 if hook == "allreduce_hook" else 1e-3)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those with data"])
def test_join_where_a_members_data_ends_earlier(by_all: bool, mesh: dr.mesh.DeviceMesh) -> None:
    """It goes on with any batch, whose loss counts nothing. torch's join adds zeros in its place."""
    serial = Net()
    model = wrap(serial, mesh)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, serial))
    n = len(mesh.places)
    # Members have 3, 2, 1 and 1 batches.
    have = [max(3 - k, 1) for k in range(n)]
    with model.join(divide_by_initial_world_size=by_all, throw_on_early_termination=True):
        for step in range(3):
            parts, x = batches(mesh)
            active = [float(step < mine) for mine in have]
            share = 1.0 if by_all else n / sum(active)
            weight = dr.from_shards([torch.tensor(share * one) for one in active], mesh)
            ours.zero_grad()
            theirs.zero_grad()
            (model(x).square().mean() * weight).backward()
            losses = [serial(part).square().mean() for part, one in zip(parts, active) if one]
            torch.stack(losses).sum().div(n if by_all else len(losses)).backward()
            same(model, serial)
            ours.step()
            theirs.step()


def test_members_with_batches_of_other_sizes(mesh: dr.mesh.DeviceMesh) -> None:
    """Each member's loss is the mean of its own rows, as on ranks."""
    serial = Net()
    model = wrap(serial, mesh)
    for rows in (5, 1):
        parts = [torch.randn(6, 8) for _ in mesh.places[1:]] + [torch.randn(rows, 8)]
        model.zero_grad()
        serial.zero_grad()
        with model.join():
            model(dr.from_shards(parts, mesh)).square().mean().backward()
        serial_step(serial, parts)
        same(model, serial)


def test_training_is_the_serial_one(mesh: dr.mesh.DeviceMesh) -> None:
    serial = Net()
    model = wrap(serial, mesh)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, serial))
    for _ in range(5):
        parts, x = batches(mesh)
        ours.zero_grad()
        theirs.zero_grad()
        model(x).square().mean().backward()
        serial_step(serial, parts)
        ours.step()
        theirs.step()
    for p, q in zip(model.module.parameters(), serial.parameters()):
        for shard in dr.shards(p.detach()):
            torch.testing.assert_close(shard, q.detach(), atol=1e-5, rtol=1e-4)


def test_an_async_all_reduce_runs_beside_and_is_waited_for(mesh: dr.mesh.DeviceMesh) -> None:
    x = dr.from_shards([torch.full((3,), float(k + 1)) for k in range(len(mesh.places))], mesh)
    work = dist.all_reduce(x, group=mesh.get_group("dp"), async_op=True)
    assert work is not None and work.wait()
    total = float(sum(range(1, len(mesh.places) + 1)))
    assert all(torch.equal(shard, torch.full((3,), total)) for shard in dr.shards(x * 1))
    # What the caller waits for stays on the current stream.
    before = streams_of(mesh)
    dist.all_reduce(x, group=mesh.get_group("dp"))
    assert streams_of(mesh) == before


def test_two_meshes_have_streams_of_their_own() -> None:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    try:
        grid = make("2x2")
        serial = Net()
        models = [wrap(serial, part) for part in (grid.select(tp=0), grid.select(tp=1))]
        for model, part in zip(models, (grid.select(tp=0), grid.select(tp=1))):
            parts, x = batches(part)
            model(x).square().mean().backward()
            serial.zero_grad()
            serial_step(serial, parts)
            same(model, serial)
        assert active_session().nodes
    finally:
        dr.shutdown()
