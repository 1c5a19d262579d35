"""A master that runs ahead of a worker blocks; memory stays bounded on both sides, Ctrl-C works, nothing is
lost.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from processes import Child, resident, slots, steady, stopped, until, window_is_full

OPERATIONS = 200_000
MIB = 1 << 20


def issue_ahead() -> None:
    """The child: count to OPERATIONS on a worker, telling how far it is; Ctrl-C is told and otherwise
    ignored.
    """
    torch.set_num_threads(1)
    dr.init_master_worker(world_size=1)
    x = torch.ones(20, 20, device="remote")
    total = torch.zeros((), dtype=torch.int64, device="remote")
    total += 1
    assert (x + x).sum().item() == 800
    issued, interrupts, done = 1, 0, threading.Event()

    def tell() -> None:
        while not done.wait(0.05):
            print("blocked" if window_is_full() else "issued", issued)

    print("worker", dr.nodes()[0].pid)
    sys.stdin.readline()
    threading.Thread(target=tell, daemon=True).start()
    while issued < OPERATIONS:
        try:
            total += 1
            issued += 1
        except KeyboardInterrupt:
            interrupts += 1
            print("interrupted")
    done.set()
    print("too many", total.item() - issued, (x + x).sum().item())
    # The worker ends with its master, and is measured first.
    sys.stdin.readline()
    dr.synchronize()
    del x, total
    gc.collect()  # what leaks without it is another test's subject
    print("slots", slots())
    dr.shutdown()


def test_a_master_ahead_of_a_stopped_worker_blocks_in_bounded_memory_and_ctrl_c_works() -> None:
    with Child(issue_ahead) as child:
        worker = int(child.expect("worker"))
        before = resident(child.pid), resident(worker)
        with stopped(worker):
            child.tell()
            until(lambda: child.latest().startswith("blocked"))
            blocked_at = str(steady(child.latest, 1.0))
            assert 1_000 < int(blocked_at.removeprefix("blocked ")) < OPERATIONS
            assert resident(child.pid) - before[0] < 64 * MIB
            child.interrupt()
            until(lambda: child.latest() and "interrupted" in child.printed)
            steady(child.latest, 0.5)  # it blocks again
            assert resident(child.pid) - before[0] < 64 * MIB
        surplus, value = child.expect("too many").split()
        assert int(surplus) in (0, 1)  # Ctrl-C may fall between the operation and the child's own count
        assert float(value) == 800
        assert resident(worker) - before[1] < 64 * MIB
        child.tell()
        assert child.expect("slots") == "0"
        child.finish()


def _fill(node: int, issued: list[int], stop: threading.Event) -> None:
    """Issue operations until `stop`, counting them."""
    with dr.on(node):
        x = torch.ones(4, device="remote")
        while not stop.is_set():
            x + x
            issued[0] += 1


def test_who_blocks_on_one_worker_holds_up_no_other(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["distruntime.log.log"], "WINDOW", 4_000
    )  # words, which even a slow machine issues at once
    fresh_session(world_size=2)
    with dr.on(1):
        x = torch.ones(3, device="remote")
        assert (x + x).tolist() == [2, 2, 2]
    stop, issued = threading.Event(), [0]
    filler = threading.Thread(target=_fill, args=(0, issued, stop), daemon=True)
    with stopped(dr.nodes()[0].pid):
        filler.start()
        until(window_is_full)
        blocked_at = steady(lambda: issued[0], 0.5)
        for k in range(2_000):
            y = x + k
        assert y.tolist() == [2000, 2000, 2000]
        assert issued[0] == blocked_at
        stop.set()
    filler.join(60)
    assert not filler.is_alive()
