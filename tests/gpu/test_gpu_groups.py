"""Groups of GPUs: what NCCL does, which only two GPUs can show, and two workers on one card.

Check 23 of `make gpu` runs the suite of data channels on NCCL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import active_session
from processes import stopped

# No card has so many bytes.
TOO_MANY = 1 << 50


@pytest.fixture
def two_workers() -> Iterator[Any]:
    """Two workers on this machine, each with its share of the GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL takes two GPUs here, and there are {torch.cuda.device_count()}")
    dr.shutdown()
    dr.init_master_worker(world_size=2)
    yield active_session()
    for _ in range(20):
        try:
            dr.synchronize()
        except (dr.DistruntimeError, torch.OutOfMemoryError):
            continue
        break
    dr.shutdown()


def full(number: float, node: int, count: int = 1 << 20) -> torch.Tensor:
    with dr.node(node):
        return torch.full((count,), number, device="remote")


def test_auto_takes_nccl_between_two_cards(two_workers: Any) -> None:
    group = dr.distributed.new_group([0, 1])
    assert group.backend == "nccl", f"{group!r}: the warning says why"
    values = [full(1.0, 0), full(2.0, 1)]
    dr.distributed.all_reduce(values, group=group)
    assert [value.unique().tolist() for value in values] == [[3.0]] * 2
    assert values[0].to(node=1).unique().tolist() == [3.0]


def test_two_workers_share_a_card_or_have_one_each(two_nodes: list[dr.types.Place]) -> None:
    """The first example of the README. On a machine with one GPU the two go through its memory."""
    group = dr.distributed.new_group(two_nodes)
    values = [full(1.0, 0), full(2.0, 1)]
    dr.distributed.all_reduce(values, group=group)
    assert [value.unique().tolist() for value in values] == [[3.0]] * 2, group
    assert values[0].to(node=1).unique().tolist() == [3.0]


def test_a_gpu_and_a_cpu_go_through_the_host(gpu: dr.types.Place) -> None:
    group = dr.distributed.new_group([gpu, dr.place(gpu.node, "cpu")])
    assert group.backend == "gloo"
    one, other = (torch.full((5,), k + 1.0, device=place) for k, place in enumerate(group.places))
    dr.distributed.all_reduce([one, other], group=group)
    assert one.tolist() == other.tolist() == [3.0] * 5


def test_a_poisoned_member_is_no_zero_to_the_others(two_workers: Any) -> None:
    """NCCL has returned long before the other worker says that its value is poisoned."""
    group = dr.distributed.new_group([0, 1])
    for _ in range(2):
        a, b = full(5.0, 0), full(7.0, 1)
        dr.distributed.all_reduce([a, b], group=group)
    with dr.node(1):
        bad = b + torch.empty(TOO_MANY, device="remote")[: 1 << 20]
    with stopped(two_workers.workers[1].pid):
        dr.distributed.all_reduce([a, bad], group=group)
        derived = a * 2
    for value in (bad, derived, a):
        with pytest.raises(torch.OutOfMemoryError):
            value.sum().item()
    assert [two_workers.workers[k].poll() for k in range(2)] == [None, None], "both processes live on"


def test_a_member_that_dies_costs_its_groups_and_no_process(two_workers: Any) -> None:
    group = dr.distributed.new_group([0, 1])
    values = [full(1.0, 0), full(2.0, 1)]
    dr.distributed.all_reduce(values, group=group)
    dr.synchronize()
    with stopped(two_workers.workers[1].pid):
        dr.distributed.all_reduce(values, group=group)
        derived = values[0] * 2
        os.kill(two_workers.workers[1].pid, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed, match=r"node 1 "):
        derived.sum().item()
    assert two_workers.workers[0].poll() is None, "the other process lives on"
    dr.restart(0, force=True)
    assert full(4.0, 0).unique().tolist() == [4.0]


def test_a_member_that_dies_before_the_first_operation_is_noticed(two_workers: Any) -> None:
    """A communicator that the first operation made would wait for half an hour."""
    group = dr.distributed.new_group([0, 1])
    os.kill(two_workers.workers[1].pid, signal.SIGKILL)
    with pytest.raises(dr.errors.NodeFailed):
        a = full(1.0, 0)
        dr.distributed.all_reduce([a, full(2.0, 1)], group=group)
        a.sum().item()


def test_two_devices_of_one_worker_keep_the_order_of_their_streams(gpu: dr.types.Place) -> None:
    """One thread issues their sum, and each of them has a stream of its own."""
    names = [device.name for device in dr.nodes()[gpu.node].devices if device.name != "cpu"]
    if len(names) < 2:
        pytest.skip(f"it takes two devices of one worker, which offers {names[0]} alone")
    places = [dr.place(gpu.node, f"accelerator:{name.partition(':')[2]}") for name in names[:2]]
    groups = [dr.distributed.new_group(places), dr.distributed.new_group(places, backend="gloo")]
    first, second = (dr.Stream(place) for place in places)
    for k in range(30):
        with dr.stream(first):
            x = torch.full((1 << 16,), float(k), device="remote")
        with dr.stream(second):
            y = torch.zeros(1 << 16, device="remote")
            for _ in range(50):
                y = y + 20
        with dr.stream(second), dr.stream(first):
            dr.distributed.all_reduce([x, y], group=groups[k % 2])
        with dr.stream(second):
            after = y * 1
        with dr.stream(first):
            before = x * 1
        assert before.unique().tolist() == after.unique().tolist() == [1000.0 + k], groups[k % 2]
