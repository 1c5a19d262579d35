"""`nn.DataParallel` ran the whole batch on one of several workers, and said nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import distruntime as dr

SAID = (
    r'dr.init_device_mesh\("cpu", \(2,\)\).*dr.parallel.DataParallel\(model, mesh\)'
    ".*DistributedDataParallel.*dr.from_shards"
)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=2)
    yield
    dr.shutdown()


def test_of_several_workers_it_would_use_one(two_workers: None) -> None:
    with pytest.raises(dr.errors.NotSupportedError, match=SAID):
        nn.DataParallel(nn.Linear(4, 2).to("remote"))
    # Most scripts wrap the module first.
    parallel = nn.DataParallel(nn.Linear(4, 2))
    assert parallel(torch.ones(3, 4)).shape == (3, 2)
    parallel.to("remote")
    with pytest.raises(dr.errors.NotSupportedError, match=SAID):
        parallel(torch.ones(3, 4, device="remote"))
    mesh = dr.init_device_mesh("cpu", (2,))
    with pytest.raises(dr.errors.NotSupportedError, match=SAID):
        nn.DataParallel(nn.Linear(4, 2).to(mesh.device))
    alone = nn.DataParallel(nn.Linear(4, 2).to("remote"), device_ids=[0])
    assert alone(torch.ones(3, 4, device="remote")).shape == (3, 2)


def test_the_remedy_is_the_serial_model(two_workers: None) -> None:
    serial, batch = nn.Linear(4, 2), torch.arange(24.0).reshape(6, 4)
    mesh = dr.init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 2)
    model.load_state_dict(serial.state_dict())
    replicas = nn.parallel.DistributedDataParallel(model.to(mesh.device), process_group=mesh.get_group())
    replicas(dr.from_shards(batch.chunk(2), mesh)).square().mean().backward()
    serial(batch).square().mean().backward()
    assert model.weight.grad is not None and serial.weight.grad is not None
    for shard in dr.shards(model.weight.grad):
        torch.testing.assert_close(shard, serial.weight.grad)


def test_one_worker_is_enough_for_one_device() -> None:
    dr.shutdown()
    dr.init_master_worker(world_size=1)
    try:
        parallel = nn.DataParallel(nn.Linear(4, 2)).to("remote")
        assert parallel(torch.ones(3, 4, device="remote")).shape == (3, 2)
    finally:
        dr.shutdown()
