"""Data channels whose calls return before the bytes have moved, as those of GPUs do: what is no value must
not be read as one, here or at whoever has it from here.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from early_channel import Early, Late
from processes import stopped, until

Fresh = Callable[..., Any]


@pytest.fixture
def early(fresh_session: Fresh) -> Iterator[Any]:
    """Three workers, and the channels by name."""
    dr.distributed.register_data_channel("Early", Early)
    dr.distributed.register_data_channel("Late", Late)
    yield fresh_session(world_size=3)
    for _ in range(20):
        try:
            dr.synchronize()
        except (dr.DistruntimeError, IndexError):
            continue
        break


def full(number: float, node: int) -> torch.Tensor:
    return there(torch.full((4,), number), node)


def poisoned(node: int) -> torch.Tensor:
    with dr.node(node):
        return full(7.0, node) + torch.ones(8, device=REMOTE)[torch.tensor([99], device=REMOTE)]


def fails(value: torch.Tensor) -> bool:
    try:
        value.cpu()
    except dr.errors.NodeFailed:
        return True
    return False


def test_values_are_what_they_are(early: Any) -> None:
    group = dr.distributed.new_group([0, 1, 2], backend="Early")
    for k in range(5):
        values = [full(float(k + node), node) for node in range(3)]
        with stopped(early.workers[1].pid):
            dr.distributed.all_reduce(values, group=group)
            dr.synchronize(0)
        # A CPU has no stream that would wait: an operation on gloo stands behind it.
        dr.distributed.barrier(group)
        dr.synchronize()
    group.close()
    assert full(1.0, 0).tolist() == [1.0] * 4


def test_a_poisoned_member_poisons_what_was_computed_before_it_was_known(early: Any) -> None:
    group = dr.distributed.new_group([0, 1], backend="Early")
    kept, a, b = full(3.0, 0), full(5.0, 0), poisoned(1)
    dr.synchronize(0)
    with stopped(early.workers[1].pid):
        dr.distributed.all_reduce([a, b], group=group)
        derived = a * 2
        dr.synchronize(0)
    for value in (b, a, derived):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            value.cpu()
    # What was there before is what it was, and nothing later is believed.
    assert kept.tolist() == [3.0] * 4
    with pytest.raises(IndexError, match=r"all_reduce of group \d+ was queued by then.*dr.restart\("):
        full(1.0, 0).cpu()
    until(lambda: dr.nodes() and group.broken)
    with pytest.raises(dr.errors.NodeFailed, match="a value of node 1 is poisoned"):
        dr.distributed.all_reduce([a, full(1.0, 1)], group=group)
    # It comes over no other channel either.
    with pytest.raises(IndexError):
        derived.to(node=2).cpu()
    assert full(2.0, 2).to(node=1).tolist() == [2.0] * 4
    dr.restart(0, force=True)
    assert full(4.0, 0).to(node=1).tolist() == [4.0] * 4


def test_whoever_has_it_from_a_healthy_member_hears_of_it_too(early: Any) -> None:
    first, second = (
        dr.distributed.new_group([0, 1], backend="Early"),
        dr.distributed.new_group([0, 2], backend="Early"),
    )
    a, b, c = full(5.0, 0), poisoned(1), full(1.0, 2)
    with stopped(early.workers[1].pid):
        dr.distributed.all_reduce([a, b], group=first)
        derived = a * 2
        dr.distributed.all_reduce([derived, c], group=second)
        dr.synchronize(0)
        dr.synchronize(2)
    for value in (b, c, c + 1, derived):
        with pytest.raises(IndexError):
            value.cpu()


def test_a_member_that_dies_leaves_no_garbage_that_reads_as_values(early: Any) -> None:
    first, second = (
        dr.distributed.new_group([0, 1], backend="Early"),
        dr.distributed.new_group([0, 2], backend="Early"),
    )
    kept, a, b, c = full(3.0, 0), full(5.0, 0), full(7.0, 1), full(1.0, 2)
    dr.synchronize()
    with stopped(early.workers[1].pid):
        results = dr.functional.all_reduce([a, b], group=first)
        derived = results[0] * 2
        dr.distributed.all_reduce([derived, c], group=second)
        dr.synchronize(0)
        dr.synchronize(2)
        os.kill(early.workers[1].pid, signal.SIGKILL)
    # A CPU reads what is there, and a GPU would wait for the operation, which never ends.
    until(lambda: dr.nodes() and first.broken)
    for value in (results[0], derived):
        with pytest.raises(dr.errors.NodeFailed, match=r"node 1 .*killed by signal 9"):
            value.cpu()
    until(lambda: fails(c))
    with pytest.raises(dr.errors.NodeFailed, match=r"node 1 .*killed by signal 9"):
        c.cpu()
    assert kept.tolist() == [3.0] * 4


def test_an_operation_that_takes_too_long_breaks_its_group(early: Any) -> None:
    group = dr.distributed.new_group([0, 1], backend="Early", timeout=0.5)
    values = [full(5.0, 0), full(7.0, 1)]
    with stopped(early.workers[1].pid):
        dr.distributed.all_reduce(values, group=group)
        dr.synchronize(0)
        reason = r"all_reduce of group \d+ has not ended within 0.5 s"
        until(lambda: dr.nodes() and group.broken)
        with pytest.raises(dr.errors.NodeFailed, match=reason):
            values[0].cpu()


def test_a_poisoned_member_that_is_known_in_time_poisons_the_results_alone(early: Any) -> None:
    group = dr.distributed.new_group([0, 1], backend="Late")
    a, b = full(5.0, 0), poisoned(1)
    for value in dr.functional.all_reduce([a, b], group=group):
        with pytest.raises(IndexError):
            value.cpu()
    assert a.tolist() == [5.0] * 4
    sums = dr.functional.all_reduce([a, full(1.0, 1)], group=group)
    assert [value.tolist() for value in sums] == [[6.0] * 4] * 2


def test_along_a_mesh_no_garbage_is_read(fresh_session: Fresh) -> None:
    dr.distributed.register_data_channel("Early", Early)
    opened = fresh_session(world_size=3, data_channel="Early")
    mesh = dr.init_device_mesh("cpu", (3,))
    parts = [full(1.0, 0), full(1.0, 1), poisoned(2)]
    whole = dr.from_shards(parts, mesh)
    lines = mesh.lines()
    with stopped(opened.workers[2].pid):
        sums = dr.lines.all_reduce(lines, whole)
        derived = sums * 2
    for value in (sums.member(2), *(made.member(k) for made in (sums, derived) for k in range(3))):
        with pytest.raises(IndexError):
            value.cpu()
    with contextlib.suppress(dr.DistruntimeError, IndexError):
        dr.synchronize()


@pytest.mark.parametrize("seed", range(3))
def test_in_random_chains_of_sums_no_garbage_is_read(early: Any, seed: int) -> None:
    """Sums of random groups, in place, of which some carry a poisoned value by then. One worker stands still
    meanwhile, so the others queue what they cannot know to be spoilt.
    """
    choose = random.Random(seed)
    groups = [
        dr.distributed.new_group(nodes, backend="Early") for nodes in ([0, 1], [1, 2], [0, 2], [0, 1, 2])
    ]
    flush = dr.distributed.new_group([0, 1, 2], backend="Early")
    values = [full(float(node + 1), node) for node in range(3)]
    twins, spoilt = [1.0, 2.0, 3.0], [False] * 3
    dr.synchronize()
    with stopped(early.workers[choose.randrange(3)].pid):
        for _ in range(8):
            group = choose.choice(groups)
            if choose.random() < 0.3:
                node = choose.choice(group.nodes)
                values[node], spoilt[node] = poisoned(node), True
            try:
                dr.distributed.all_reduce([values[node] for node in group.nodes], group=group)
            except dr.errors.NodeFailed:
                # It is known already, and the group cannot go on.
                break
            total, bad = sum(twins[n] for n in group.nodes), any(spoilt[n] for n in group.nodes)
            for node in group.nodes:
                twins[node], spoilt[node] = total, bad
    with contextlib.suppress(dr.errors.NodeFailed):
        dr.distributed.broadcast([full(0.0, node) for node in range(3)], group_src=0, group=flush)
    for _ in range(20):
        with contextlib.suppress(dr.DistruntimeError, IndexError):
            dr.synchronize()
            break
    for value, twin, bad in zip(values, twins, spoilt):
        try:
            got = value.tolist()
        except (IndexError, dr.errors.NodeFailed):
            # More than what is spoilt may be lost.
            assert True in spoilt, "a value was lost, and no member was poisoned"
            continue
        assert not bad and got == [twin] * 4
