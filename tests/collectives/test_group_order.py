"""Collectives from several threads, under Ctrl-C, with full windows and across streams: order holds, and
nothing is left behind.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.session.session import active_session
from processes import STARTING, Child, slots, stop, stopped, until, window_is_full


def test_threads_with_overlapping_groups_at_once(fresh_session: Any) -> None:
    fresh_session(world_size=3)
    groups = [dr.distributed.new_group(nodes) for nodes in ([0, 1], [1, 2], [2, 0], [0, 1, 2])]
    wrong: list[str] = []

    def work(number: int) -> None:
        group = groups[number]
        streams = [dr.Stream(node) for node in group.nodes] if number % 2 else []
        for k in range(20):
            values = [there(torch.full((100,), float(k + node)), node) for node in group.nodes]
            if streams:
                with dr.stream(streams[k % len(streams)]):
                    dr.distributed.all_reduce(values, group=group)
            else:
                dr.distributed.all_reduce(values, group=group, async_op=bool(k % 2))
            expected = float(sum(k + node for node in group.nodes))
            if k % 5 == 0 and [t[7].item() for t in values] != [expected] * len(values):
                wrong.append(f"thread {number}, round {k}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


def _collectives_under_interrupts(seed: int) -> None:
    """Child: interrupts at every moment of collectives, copies, sends and receives; each either happens on
    all members or on none.
    """
    draw, armed, over = random.Random(seed), [False], threading.Event()

    here = sys._getframe()

    def interrupt(_: int, struck: FrameType | None) -> None:
        # Not in this function's own lines: a second one would leave the clause that catches the first.
        if armed[0] and struck is not here:
            raise KeyboardInterrupt

    with dr.init_master_worker(world_size=3, timeout=STARTING):
        signal.signal(signal.SIGINT, interrupt)
        group, struck, rounds = dr.distributed.new_group(), 0, 0
        values = [there(torch.ones(4, dtype=torch.int64), node) for node in range(3)]

        def storm() -> None:
            while not over.wait(draw.random() * 0.004):
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=storm)
        thread.start()
        while rounds < 120:
            try:
                armed[0] = True
                while rounds < 120:
                    rounds += 1
                    dr.distributed.all_reduce(values, group=group, async_op=rounds % 3 == 0)
                    values[0].to(node=1)
                    dr.distributed.send(values[1], 2, tag=rounds)
                    dr.distributed.recv(values[2].clone(), tag=rounds)
                    dr.distributed.broadcast(values, rounds % 3, group)
                    if rounds % 20 == 0:
                        values[rounds % 3].sum().item()
                armed[0] = False
            except KeyboardInterrupt:
                armed[0] = False
                struck += 1
        over.set()
        thread.join()
        print("struck", struck, flush=True)
        dr.distributed.all_reduce(values, group=group)
        first, *others = [value.tolist() for value in values]
        print("equal", others == [first, first], flush=True)
        dr.synchronize(timeout=30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_leave_no_member_alone() -> None:
    with Child(_collectives_under_interrupts, 1) as child:
        assert int(child.expect("struck")) > 20
        assert child.expect("equal") == "True"
        child.finish()


@pytest.mark.slow(reason="fills windows, 9 s")
def test_collectives_between_full_windows(session: object) -> None:
    """One worker has far more to do than the other, so that the master must wait for it, with the other's
    part still to be sent.
    """
    x, values, full = there(torch.zeros(10), 1), [there(torch.ones(10), node) for node in (0, 1)], 0
    dr.distributed.all_reduce(values)
    dr.synchronize()
    with stopped(dr.nodes()[1].pid):
        thread = threading.Thread(
            target=lambda: [
                dr.distributed.all_reduce(values) or [x.add_(1) for _ in range(5000)] for _ in range(40)
            ]
        )
        thread.start()
        until(lambda: window_is_full(1))
        full += 1
    thread.join(60)
    assert not thread.is_alive() and full
    assert x[0].item() == 200_000 and values[0][0].item() == 2.0**41


def test_collectives_leave_nothing_behind(session: object) -> None:
    def everything() -> None:
        for _ in range(10):
            values = [there(torch.ones(6), node).requires_grad_() for node in (0, 1)]
            outs = dr.functional.all_reduce(values) + dr.functional.all_gather(values)
            sum(out.sum().to(outs[0].device) for out in outs).backward()
            work = dr.distributed.all_reduce([value.detach() for value in values], async_op=True)
            assert work is not None
            work.wait()
            work.get_future()
            dr.distributed.send(values[0], 1)
            dr.distributed.recv(there(torch.zeros(6), 1))
            waiting = dr.distributed.irecv(there(torch.zeros(6), 1))
            waiting.get_future()
            dr.distributed.isend(values[0].detach(), 1).wait()
            dr.distributed.barrier()

    everything()
    # What another test has left in a cycle is not to go between the two looks.
    gc.collect()
    before = slots(0), slots(1)
    gc.disable()
    try:
        everything()
        assert (slots(0), slots(1)) == before
    finally:
        gc.enable()


def _waits_across() -> None:
    """Child: node 1 has much to do once an event of node 0 has come, which it cannot before all is issued:
    node 0 is held still.
    """
    dr.init_master_worker()
    session = active_session()
    dr.distributed.all_reduce([there(torch.ones(2), node) for node in (0, 1)])  # they have met
    with dr.node(0):
        gate = torch.ones(1200, 1200, device=REMOTE)
    with dr.node(1):
        work = torch.ones(1200, 1200, device=REMOTE)
    dr.synchronize()
    stop(session.workers[0].pid)
    gate = gate @ gate / 1200
    event, side = dr.current_stream(0, "cpu").record_event(), dr.Stream(1)
    side.wait_event(event)
    with dr.stream(side):
        for _ in range(400):
            work = work @ work / 1200
    for node in session.nodes:
        node.flush()
    print("pids", *(worker.pid for worker in session.workers), flush=True)
    sys.stdin.readline()
    side.cancel()
    session.ending.shut_down(raise_unread=False)


def processor_seconds(pid: int) -> float:
    """Return for how long a process has computed, in seconds."""
    text = subprocess.run(
        ["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout.strip()
    return sum(float(part) * 60**k for k, part in enumerate(reversed(re.split("[-:]", text))))


def test_an_event_goes_from_worker_to_worker() -> None:
    """It comes while the master is stopped, and what waits for it begins."""
    with Child(_waits_across) as child:
        waited_for, pid = map(int, child.expect("pids").split())
        with stopped(child.pid):
            before = processor_seconds(pid)
            os.kill(waited_for, signal.SIGCONT)
            until(lambda: processor_seconds(pid) >= before + 1)
        child.tell()
        child.finish()
