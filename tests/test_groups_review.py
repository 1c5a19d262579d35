"""Groups at their edges: what is cancelled, closed by another thread, written through odd views, or said by a worker that lies."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session import active_session
from processes import until


def there(value: torch.Tensor, node: int) -> torch.Tensor:
    """Return a copy on a node's CPU."""
    with dr.node(node):
        return value.to(REMOTE)


def test_a_cancelled_collective_waits_for_its_turn(session: object) -> None:
    group = dr.new_group([0, 1])
    slow, dropped = dr.Stream(0), dr.Stream(0)
    large = there(torch.randn(1000, 1000), 0)
    first = [there(torch.ones(2), 0), there(torch.full((2,), 2.0), 1)]
    second = [there(torch.full((2,), 10.0), 0), there(torch.full((2,), 20.0), 1)]
    with dr.stream(slow):
        for _ in range(10):
            large = large @ large / 1000
        dr.all_reduce(first, group=group)
    with dr.stream(dropped):
        results = dr.functional.all_reduce(second, group=group)
    dropped.cancel()
    assert [t.tolist() for t in first] == [[3.0, 3.0]] * 2  # not of what node 0 puts into the second, before its first
    for result in results:
        with pytest.raises(dr.StreamCancelled):
            result.tolist()
    group.close()


def test_a_group_closed_while_another_thread_uses_it(session: object) -> None:
    a, b = there(torch.ones(2), 0), there(torch.ones(2), 1)
    for _ in range(8):
        group = dr.new_group([0, 1])
        begun, errors = threading.Event(), list[type[Exception]]()

        def run(group: Any = group, begun: Any = begun, errors: Any = errors) -> None:
            try:
                while True:
                    dr.all_reduce([a, b], group=group)
                    begun.set()
            except Exception as error:
                errors.append(type(error))

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait(10)
        group.close()
        thread.join()
        assert errors == [dr.UsageError]
    dr.synchronize()
    assert all(node.failed is None for node in active_session().nodes)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="a process's threads are counted in /proc, which this system has not")
def test_a_broken_group_leaves_no_threads_on_a_worker(session: object) -> None:
    a, b = there(torch.ones(2), 0), there(torch.ones(2), 1)
    opened = active_session()
    worker = dr.nodes()[1]

    def threads() -> int:
        return len(os.listdir(f"/proc/{worker.pid}/task"))

    def broken() -> None:
        group = dr.new_group([0, 1])
        dr.all_reduce([a, b], group=group)
        dr.synchronize()
        opened.groups.end(group, "for a test")

    broken()
    dr.synchronize()
    before = threads()
    for _ in range(5):
        broken()
    until(lambda: threads() <= before)


def test_a_reduction_in_place_of_what_is_pending_negation(session: object) -> None:
    a, b = there(torch.tensor([1 + 2j]), 0).conj().imag, there(torch.tensor([5.0]), 1)
    assert a.is_neg() and a.is_contiguous()
    dr.all_reduce([a, b], op=dr.ReduceOp.MAX)
    assert (a.tolist(), b.tolist()) == ([5.0], [5.0])


def test_all_to_all_over_its_own_inputs(session: object) -> None:
    tensors = [there(torch.arange(4.0), 0), there(torch.arange(4.0) * 10, 1)]
    dr.all_to_all_single(tensors, tensors)
    assert [t.tolist() for t in tensors] == [[0.0, 1.0, 0.0, 10.0], [2.0, 3.0, 20.0, 30.0]]


def test_an_expanded_tensor_is_no_output(session: object) -> None:
    group = dr.new_group([0, 1])
    row, wide = there(torch.ones(1), 0), there(torch.arange(4.0), 1)
    with pytest.raises(dr.UsageError, match="single memory location"):
        dr.all_reduce([row.expand(4), wide], group=group)
    whole = there(torch.ones(4), 0)
    dr.all_reduce([whole, wide], group=group)  # the group is as good as before
    assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
    group.close()


def test_a_copy_over_an_expanded_tensor_fails_as_at_home(session: object) -> None:
    row, wide = there(torch.ones(1), 0).expand(4), there(torch.arange(4.0), 1)
    with pytest.raises(RuntimeError, match="single memory location") as raised:
        row.copy_(wide).tolist()
    assert not isinstance(raised.value, dr.NodeFailed)  # the channel between the two nodes is as good as before
    assert wide.to(dr.place(0, "cpu")).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", True])
def test_a_groups_timeouts_are_numbers_of_seconds(session: object, seconds: Any) -> None:
    with pytest.raises(dr.UsageError, match="seconds"):
        dr.new_group([0, 1], timeout=seconds)
    with pytest.raises(dr.UsageError, match="seconds"):
        dr.barrier(timeout=seconds)
    work = dr.all_reduce([there(torch.ones(1), 0), there(torch.ones(1), 1)], async_op=True)
    assert work is not None
    with pytest.raises(dr.UsageError, match="seconds"):
        work.synchronize(seconds)


@pytest.mark.parametrize("lists", [[], [[]], 3, [3, 4]], ids=str)
def test_all_to_all_of_what_are_no_lists(session: object, lists: Any) -> None:
    with pytest.raises(dr.UsageError, match="must be a list"):
        dr.all_to_all(lists, lists)
    with pytest.raises(dr.UsageError, match="must be a list"):
        dr.functional.all_to_all(lists)
