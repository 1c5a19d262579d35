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
