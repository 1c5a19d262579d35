"""One session, many hands: threads, asyncio, finalizers and Ctrl-C at any moment.

Every value right, nothing stuck.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from processes import Child, slots, until

THREADS = 4


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads change hands after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], None], timeout: float = 60.0) -> None:
    """Run jobs in threads of their own; fail if one of them fails or is stuck."""
    failed: list[BaseException] = []
    ready = threading.Barrier(len(jobs), timeout=60)

    def run(job: Callable[[], None]) -> None:
        try:
            ready.wait()
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "stuck"


def _mixed_work(number: int, rounds: int) -> None:
    """Operations of all kinds with values that only this thread knows, read in all ways."""
    base = torch.full((5, 5), float(number), device=REMOTE)
    total = torch.zeros((), device=REMOTE)
    expected, pending = 0.0, []
    for k in range(rounds):
        x = base + k
        x.mul_(2)
        row = x[k % 5]
        row.add_(1)
        total += row.sum()
        expected += 5 * (2 * (number + k) + 1)
        kind = k % 7
        if kind == 0:
            assert total.item() == expected
        elif kind == 1:
            pending.append((2.0 * (number + k), dr.fetch_async({"x": x, "again": [x, base]})))
        elif kind == 2:
            assert dr.fetch([row, base])[0].tolist() == [2.0 * (number + k) + 1] * 5
        elif kind == 3:
            assert bool((base == number).all())
        elif kind == 4:
            assert torch.nonzero(torch.arange(3.0 + number, device=REMOTE)).shape == (
                2 + number,
                1,
            )  # a round trip for its shape
        elif kind == 5:
            y = torch.full((3 + k,), 1.5).to(REMOTE)  # a signature that is new
            assert y.sum().item() == 1.5 * (3 + k)
    for value, future in pending:
        tree = future.result(timeout=60)
        assert tree["x"].max().item() in (value, value + 1) and tree["again"][0] is tree["x"]
        assert tree["again"][1].unique().tolist() == [number]
    assert total.item() == expected


def test_threads_issue_and_read_at_once(session: object, switching: None) -> None:
    together(*(lambda number=number: _mixed_work(number, 150) for number in range(THREADS)))


def test_threads_on_two_nodes(session: object, switching: None) -> None:
    def work(number: int) -> None:
        with dr.on(number % 2):
            x = torch.full((3,), float(number), device=REMOTE)
            for k in range(200):
                y = x + k
                assert y.get_node() == number % 2
                if k % 10 == 0:
                    assert y.tolist() == [number + k] * 3
                if k % 50 == 0:
                    assert y.to(node=1 - number % 2).tolist() == [number + k] * 3

    together(*(lambda number=number: work(number) for number in range(THREADS)))


def test_each_threads_operations_stay_in_order_on_a_shared_tensor(session: object, switching: None) -> None:
    shared = torch.zeros(THREADS, device=REMOTE)

    def work(number: int) -> None:
        mine = shared[number]
        for _ in range(500):
            mine.add_(1)
            mine.mul_(1)

    together(*(lambda number=number: work(number) for number in range(THREADS)))
    assert shared.tolist() == [500] * THREADS


def test_new_signatures_in_many_threads_with_a_full_window(session: object) -> None:
    """Who waits for room while it holds anything that a reading thread needs would stop all of them."""

    def issue(number: int) -> None:
        x = torch.ones(8, 8, device=REMOTE)
        for k in range(400):
            heavy = torch.ones(150, 150, device=REMOTE)
            heavy @ heavy
            x.expand(1 + k + 1000 * number, 8, 8)
            dr.fetch_async(x)  # sends what has gathered: a segment each time

    def read() -> None:
        x = torch.ones(8, 8, device=REMOTE)
        for _ in range(200):
            assert x.sum().item() == 64

    together(lambda: issue(0), lambda: issue(1), read, read)


def test_frees_from_other_threads(session: object, switching: None) -> None:
    gc.collect()
    before = slots()
    handed: list[torch.Tensor] = []
    done = threading.Event()

    def make() -> None:
        try:
            for k in range(3_000):
                x = torch.full((4,), float(k), device=REMOTE)
                handed.append(x + 1)
                handed.append(x)
        finally:
            done.set()

    def drop() -> None:
        while not done.is_set() or handed:
            if handed:
                x = handed.pop()
                if random.random() < 0.01:
                    assert len(set(x.tolist())) == 1
                del x

    together(make, drop, drop)
    gc.collect()
    assert slots() == before


def test_a_future_is_completed_once_whoever_reads_the_reply(session: object, switching: None) -> None:
    x, y = torch.ones(2, device=REMOTE), torch.zeros(30, 30, device=REMOTE)

    def ask() -> None:
        for _ in range(300):
            first, second = dr.fetch_async([x, y]).result(timeout=60)
            assert first.sum() == 2 and second.shape == (30, 30)

    together(ask, ask, ask)


def test_one_future_may_have_many_waiters(session: object) -> None:
    busy = torch.ones(600, 600, device=REMOTE)
    for _ in range(30):
        busy = busy @ busy * 1e-3
    future = dr.fetch_async(busy.isfinite().all())
    together(*[lambda: future.result(timeout=30)] * THREADS)
    assert future.done()


def test_callbacks_of_futures_may_issue_and_read(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    seen: list[float] = []
    arrived = threading.Event()

    def next_step(future: Any) -> None:
        seen.append((x * future.result()).sum().item())
        arrived.set()

    dr.fetch_async(x.sum()).add_done_callback(next_step)
    until(arrived.is_set)
    assert seen == [9.0]


def test_contexts_belong_to_their_task_and_thread(session: object) -> None:
    async def make(node: int) -> int:
        with dr.node(node):
            await asyncio.sleep(0.001)
            x = torch.zeros(2, device="remote")
            await asyncio.sleep(0.001)
            return x.get_node()

    async def main() -> list[int]:
        return await asyncio.gather(*(make(k % 2) for k in range(10)))

    assert asyncio.run(main()) == [0, 1] * 5
    with dr.node(1):
        seen: list[int] = []
        together(lambda: seen.append(torch.zeros(2, device="remote").get_node()))
        assert seen == [0]  # a new thread starts with the session's default, as in torch.cuda
    shared = dr.node(1)

    def enter() -> None:
        for _ in range(200):
            with shared:
                assert torch.zeros(2, device="remote").get_node() == 1
            assert torch.zeros(2, device="remote").get_node() == 0

    # Several threads may enter one context object.
    together(*[enter] * 3)


# Finalizers run wherever the collector does: inside locks, inside the socket's code, in the pump


class _Counts:
    """Issues an operation when it is collected; it is a cycle, so the collector decides where that is."""

    def __init__(self, *counters: torch.Tensor) -> None:
        self._counters = counters
        self._me = self

    def __del__(self) -> None:
        for counter in self._counters:
            counter.add_(1)


class _Reads:
    """Reads a value when it is collected."""

    def __init__(self, tensor: torch.Tensor, seen: list[float]) -> None:
        self._tensor, self._seen = tensor, seen
        self._me = self

    def __del__(self) -> None:
        try:
            self._seen.append(self._tensor.item())
        except dr.DistruntimeError:  # it ran in the midst of the socket's own code, where nobody can wait
            self._seen.append(math.nan)


@pytest.fixture
def collecting() -> Iterator[None]:
    """The collector runs after every few allocations."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    yield
    gc.set_threshold(*before)
    gc.collect()


@pytest.mark.slow(reason="issues from finalizers for 6 s")
def test_finalizers_that_issue_operations(session: object, collecting: None) -> None:
    here, there = torch.zeros((), device=REMOTE), torch.zeros((), device=REMOTE).to(node=1)
    x = torch.ones(3, device=REMOTE)
    together(lambda: _churn(lambda: _Counts(here, there), x, 1_500))
    gc.collect()
    assert (here.item(), there.item()) == (1_500, 1_500)


def test_finalizers_that_issue_operations_in_many_threads(session: object, collecting: None) -> None:
    here, there = torch.zeros((), device=REMOTE), torch.zeros((), device=REMOTE).to(node=1)
    x = torch.ones(3, device=REMOTE)
    together(*[lambda: _churn(lambda: _Counts(here, there), x, 400)] * 3)
    gc.collect()
    assert (here.item(), there.item()) == (1_200, 1_200)


def test_finalizers_that_read(session: object, collecting: None) -> None:
    value, x, seen = torch.full((), 2.5, device=REMOTE), torch.ones(3, device=REMOTE), []  # type: ignore[var-annotated]
    together(lambda: _churn(lambda: _Reads(value, seen), x, 300))
    # Another thread may be in the midst of a collection, and a second one does nothing then.
    until(lambda: gc.collect() >= 0 and len(seen) == 300)
    assert sum(math.isnan(value) for value in seen) <= 15
    assert all(value == 2.5 for value in seen if not math.isnan(value))


def test_a_finalizer_inside_the_sending_does_not_wait_for_what_it_keeps_from_going(session: Any) -> None:
    """A thread waited there for ever, with the lock that all others need."""
    node, x, seen = session.nodes[0], torch.ones(3, device=REMOTE), []  # type: ignore[var-annotated]

    def read(phase: str, info: object) -> None:
        if phase == "stop" and node.flushing and node.words and not seen:
            seen.append(None)
            y = x + 1  # behind what is being sent
            try:
                seen.append(y.sum().item())
            except dr.DistruntimeError as error:
                seen.append(str(error))

    before = gc.get_threshold()
    gc.callbacks.append(read)
    gc.set_threshold(1, 2, 2)
    try:
        until(lambda: (x + 1) is not None and len(seen) > 1)
    finally:
        gc.callbacks.remove(read)
        gc.set_threshold(*before)
    assert "inside the log's own sending" in seen[1]
    assert (x + 1).sum().item() == 6


def test_a_finalizer_inside_the_log_waits_for_no_reader_that_waits_for_it(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["distruntime.session.session"], "_INSIDE", 0.3)
    x = torch.ones(3, device=REMOTE)
    busy = torch.ones(900, 900, device=REMOTE)
    for _ in range(30):
        busy = busy @ busy * 1e-3
    reader = threading.Thread(target=busy.sum().item)  # type: ignore[attr-defined]
    reader.start()
    until(lambda: session.requests.attended)
    with session.lock, pytest.raises(dr.DistruntimeError, match="waits no longer than"):
        x.sum().item()
    reader.join()
    assert x.sum().item() == 3


def _churn(make: Callable[[], object], x: torch.Tensor, rounds: int) -> None:
    for k in range(rounds):
        make()
        y = x + k
        if k % 5 == 0:
            assert y.sum().item() == 3 * (k + 1)


def test_a_signal_handler_may_read_while_the_main_thread_waits(session: object) -> None:
    loss = torch.full((), 2.5, device=REMOTE)
    busy = torch.ones(700, 700, device=REMOTE)
    assert loss.item() == 2.5
    for _ in range(60):
        busy = busy @ busy * 1e-3
    seen: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(loss.item()))
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert busy.isfinite().all().item()
        until(lambda: seen == [2.5])
    finally:
        signal.signal(signal.SIGUSR1, before)


# Ctrl-C at random moments


class Storm:
    """Raises KeyboardInterrupt in the main thread at random moments while `calm` is False."""

    def __init__(self, seed: int, rate: float) -> None:
        self.calm = True
        self.hits = 0
        self._stop = threading.Event()
        self._random = random.Random(seed)
        self._rate = rate
        signal.signal(signal.SIGINT, self._strike)
        self._thread = threading.Thread(target=self._thunder, daemon=True)
        self._thread.start()

    def _strike(self, *_: object) -> None:
        if not self.calm:
            self.calm = True
            self.hits += 1
            raise KeyboardInterrupt

    def _thunder(self) -> None:
        while not self._stop.wait(self._random.expovariate(self._rate)):
            os.kill(os.getpid(), signal.SIGINT)

    def end(self) -> None:
        self.calm = True
        self._stop.set()
        self._thread.join()


def under_interrupts(seed: int, rounds: int, rate: float) -> None:
    """The child: operations and reads under a storm of Ctrl-C, which a second thread must not notice."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    dr.init_master_worker(world_size=2)
    storm = Storm(seed, rate)
    kept: list[tuple[int, torch.Tensor]] = []
    futures: list[tuple[int, dr.types.Fetched]] = []
    beside, stop = [0], threading.Event()
    wrong: list[str] = []
    missed: list[int] = []

    def work() -> None:
        try:
            x = torch.ones(3, device=REMOTE)
            while not stop.is_set():
                beside[0] += 1
                if (x + beside[0]).sum().item() != 3 * (1 + beside[0]):
                    wrong.append("a value beside")
                try:
                    if dr.fetch_async([x, x * 2]).result(timeout=30)[1].tolist() != [2, 2, 2]:
                        wrong.append("a future beside")
                except TimeoutError:
                    missed.append(beside[0])
        except BaseException as error:
            wrong.append(repr(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def step(k: int) -> None:
        x = torch.full((3,), float(k), device=REMOTE)
        y = x * 2 + 1
        x.add_(5)
        if k % 3 == 0:
            kept.append((k, y))
        if k % 4 == 0:
            future = dr.fetch_async([x, y])
            futures.append((k, future))
        if k % 5 == 0 and y.sum().item() != 3 * (2 * k + 1):
            wrong.append(f"read {k}")
        if k % 11 == 0:
            z = torch.rand(2, 3 + k % 40).to(REMOTE)  # shapes that are new for a while
            z.view(-1).sum(), z.to(node=1)
        if k % 13 == 0:
            repr(y)
        if k % 50 == 0:
            dr.synchronize()

    step(0)  # whatever is imported on first use: Python's import lock does not survive interrupts
    for k in range(1, rounds):
        try:
            storm.calm = False
            step(k)
            storm.calm = True
        except KeyboardInterrupt:
            pass
    storm.end()
    print("struck", storm.hits)
    stop.set()
    thread.join(60)
    print("beside", "stuck" if thread.is_alive() else "fine", wrong[:3])
    for k, y in kept:
        if y.tolist() != [2.0 * k + 1] * 3:
            wrong.append(f"kept {k}: {y.tolist()}")
    lost = len(missed)
    for k, future in futures:
        try:
            x, y = future.result(timeout=30)
        except TimeoutError:
            lost += 1
            continue
        if x.tolist() != [k + 5.0] * 3 or y.tolist() != [2.0 * k + 1] * 3:
            wrong.append(f"future {k}: {x.tolist()} {y.tolist()}")
    dr.synchronize()
    print("wrong", len(wrong), wrong[:3])
    print("lost", lost)
    fresh = torch.arange(4.0, device=REMOTE)
    print("fresh", dr.fetch([fresh, (fresh * 2).to(node=1)])[1].tolist())
    dr.shutdown()


def test_interrupts_leave_the_session_usable_and_the_values_right() -> None:
    survives_interrupts(seed=0, rounds=300, rate=300.0, least=20)


def survives_interrupts(seed: int, rounds: int, rate: float, least: int) -> None:
    with Child(under_interrupts, seed, rounds, rate) as child:
        assert int(child.expect("struck")) >= least
        assert child.expect("beside") == "fine []"
        assert child.expect("wrong") == "0 []"
        assert int(child.expect("lost")) == 0
        assert child.expect("fresh") == "[0.0, 2.0, 4.0, 6.0]"
        child.finish()
