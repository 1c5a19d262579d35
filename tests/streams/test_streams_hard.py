"""What streams do where something is cancelled, late, gone or hostile."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session, active_session
from processes import ListeningWorker, blocked, slots, steady, stopped, until

N = 64


@pytest.fixture(autouse=True)
def _two_nodes() -> Iterator[None]:
    """Two nodes for the whole module; a test that breaks them leaves the next one to start others."""
    if not (
        dr.is_initialized()
        and _ours
        and _ours[0].closed is None
        and not any(n.failed for n in _ours[0].nodes)
    ):
        dr.shutdown()
        dr.init_master_worker(world_size=2)
        _ours[:] = [active_session()]
    yield


_ours: list[Session] = []


@pytest.fixture
def three() -> tuple[dr.Stream, dr.Stream, dr.Stream]:
    """Three streams of node 0's CPU."""
    return dr.Stream(0, "cpu"), dr.Stream(0, "cpu"), dr.Stream(0, "cpu")


def slow(stream: dr.Stream, products: int = 100) -> None:
    """Keep a stream of a CPU busy for some tenths of a second."""
    with dr.stream(stream):
        x = torch.ones(512, 512, device=stream.device)
        for _ in range(products):
            x = x @ x / 512


def settled(x: torch.Tensor) -> torch.Tensor:
    """Return `x` when it is there, and known to be there."""
    dr.synchronize()
    return x


# -- cancelled and late --------------------------------------------------------------------------------------


def test_two_streams_that_waited_for_each_other_in_turn_do_not_stop_when_one_is_cancelled(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    cancelled, other, _ = three
    slow(cancelled, 1000)
    other.wait_stream(cancelled)
    with dr.stream(other):
        kept = torch.ones(N, device="remote")
    cancelled.wait_stream(other)  # dropped below: who waits for what stood before it must not wait for this
    cancelled.cancel()
    other.synchronize(30)
    assert kept.sum().item() == N


def test_who_waits_for_a_cancelled_stream_waits_for_what_it_waited_for(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    first, cancelled, last = three
    x = settled(torch.zeros(N, device=first.device))
    with blocked(first):
        with dr.stream(first):
            made = torch.ones(N, device="remote")
            x.add_(1)
        with dr.stream(cancelled):
            dropped = x + made
        last.wait_stream(cancelled)
        with dr.stream(last):
            total, both = x.sum(), made + 1  # known to come after `first`, by way of `cancelled`
        cancelled.cancel()
        cancelled.synchronize(30)
    assert total.item() == N
    assert both.sum().item() == 2 * N
    with pytest.raises(dr.errors.StreamCancelled):
        dropped.cpu()


def test_a_cancelled_stream_does_not_count_on_the_waits_that_it_dropped(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    first, cancelled, _ = three
    with blocked(first):
        with dr.stream(first):
            made = torch.ones(N, device="remote")
        with dr.stream(cancelled):
            made + 1
        cancelled.cancel()
        with dr.stream(cancelled):
            total = (made + 2).sum()
    assert total.item() == 3 * N


def test_a_write_that_is_cancelled_spares_the_reads_before_it(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    reads, writes, _ = three
    x = settled(torch.zeros(N, device=reads.device))
    with blocked(reads):
        with dr.stream(reads):
            y = x + 1
        with dr.stream(writes):
            x.add_(1)
        writes.cancel()
        assert not writes.query()  # what is dropped poisons `x`, and that must wait for who reads it
    assert y.sum().item() == N
    with pytest.raises(dr.errors.StreamCancelled):
        x.cpu()


def test_a_check_that_is_cancelled_is_no_failure_of_the_next_read(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    true = settled(torch.ones((), device=three[0].device))
    slow(three[0], 1000)
    with dr.stream(three[0]):
        torch._assert_async(true)
    three[0].cancel()
    with dr.stream(three[0]):
        assert torch.ones(N, device="remote").sum().item() == N


def test_a_wait_that_ran_out_of_time_is_not_counted_on(three: tuple[dr.Stream, dr.Stream, dr.Stream]) -> None:
    first, late, _ = three
    x = settled(torch.zeros(N, device=first.device))
    with blocked(first):
        with dr.stream(first):
            made = torch.ones(N, device="remote")
            x.add_(1)
        first.record_event().wait(late, timeout=0.0)
        passed = late.record_event()
        with dr.stream(late):
            total, more = x.sum(), made + 1
        with pytest.raises(dr.errors.WaitTimeout):
            passed.synchronize(30)
    assert total.item() == N
    assert more.sum().item() == 2 * N


def test_a_write_to_a_view_that_was_dropped_is_not_lost(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    cancelled, other, _ = three
    x = settled(torch.zeros(N, device=cancelled.device))
    slow(cancelled, 1000)
    with dr.stream(cancelled):
        part = x[1:4]
        deeper = part[1:]
    cancelled.cancel()
    with dr.stream(other):
        deeper.add_(1)
    with pytest.raises(dr.errors.StreamCancelled):
        x.cpu()


def test_a_view_that_was_dropped_takes_nothing_along(three: tuple[dr.Stream, dr.Stream, dr.Stream]) -> None:
    cancelled, other, _ = three
    x, y = settled(torch.zeros(N, device=cancelled.device)), settled(torch.zeros(3, device=cancelled.device))
    slow(cancelled, 1000)
    with dr.stream(cancelled):
        part = x[1:4]
    cancelled.cancel()
    with dr.stream(other):
        y.add_(part)
    assert x.sum().item() == 0
    with pytest.raises(dr.errors.StreamCancelled):
        y.cpu()


def test_an_upload_that_is_cancelled_before_its_target_was_made_is_not_lost(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    makes, uploads, _ = three
    with blocked(makes):
        with dr.stream(makes):
            x = torch.zeros(N, device="remote") + 1
        with dr.stream(uploads):
            x.copy_(torch.arange(N, dtype=torch.float32))
        uploads.cancel()
    with pytest.raises(dr.errors.StreamCancelled):
        x.cpu()


def test_what_a_cancelled_stream_owes_is_passed_on_by_another_that_is_cancelled_too(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    last, one, two = three
    makes, holds = dr.Stream(0, "cpu"), dr.Stream(0, "cpu")
    with stopped(dr.nodes()[1].pid):
        event = dr.default_stream(1).record_event()
        for stream in (makes, holds, one):
            event.wait(stream)
        slow(makes)
        with dr.stream(makes):
            made = torch.ones(N, device="remote")
        two.wait_stream(makes)
        one.wait_stream(two)
        one.wait_stream(holds)
        last.wait_stream(one)
        with dr.stream(last):
            more = made + 1  # known to come after `makes`, by way of `one` and `two`
        two.cancel()
        two.synchronize(30)
        one.cancel()
        one.synchronize(30)
    assert more.sum().item() == 2 * N


# -- what an instruction reads and writes without saying so --------------------------------------------------


def test_a_recorded_layer_is_replayed_before_another_stream_writes_its_input(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    compute, copy, _ = three
    layer = torch.nn.LSTM(8, 8)
    x = torch.randn(5, 3, 8)
    layer(x)[0].sum().backward()
    assert layer.weight_ih_l0.grad is not None
    expected = layer.weight_ih_l0.grad.clone()
    layer.zero_grad()
    there, batch = layer.to(compute.device), settled(x.to(compute.device))
    with dr.stream(compute):
        loss = there(batch)[0].sum()
    slow(compute)
    with dr.stream(compute):
        loss.backward()
    with dr.stream(copy):
        batch.zero_()
    assert there.weight_ih_l0.grad is not None
    torch.testing.assert_close(there.weight_ih_l0.grad.cpu(), expected)


@pytest.mark.parametrize("other", [False, True])
def test_set_is_a_write(other: bool, three: tuple[dr.Stream, dr.Stream, dr.Stream]) -> None:
    x, y = torch.zeros(N, device=three[0].device), settled(torch.ones(N, device=three[0].device))
    slow(three[0])
    with dr.stream(three[0]):
        x.set_(y)
    if other:
        with dr.stream(three[1]):
            total = x.sum()
        assert total.item() == N
    assert torch.equal(x.cpu(), torch.ones(N))


@pytest.mark.slow(reason="issues thousands of forms, 10 s")
def test_templates_are_forgotten_while_others_come(
    three: tuple[dr.Stream, dr.Stream, dr.Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["distruntime.log.templates"], "_MOST_TEMPLATES", 3000)
    before = slots()
    total = torch.zeros(2, dtype=torch.int64, device=three[0].device)
    for k in range(8_000):  # a number that is no float is part of the template
        with dr.stream(three[k % 3]):
            total.add_(k)
    assert total.cpu()[0].item() == sum(range(8_000))
    del total
    assert slots() <= before


def is_at(thread: threading.Thread) -> tuple[str, int]:
    """Return the function that a thread is in, and its instruction.

    From Python 3.14 on, it takes a lock in a function of the lock's.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is not None and frame.f_code.co_name == "__enter__":
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_name, frame.f_lasti)


def test_a_thread_that_was_issuing_when_the_first_stream_came(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    node, default = active_session().nodes[0], dr.default_stream(0, "cpu")
    x = torch.ones(N, device=default.device)
    for _ in range(3):
        settled(x + 1)  # the signature is known
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(x + 1))
    with blocked(default):
        with node.lock:
            thread.start()
            until(lambda: is_at(thread)[0] == "dispatch")
            # It is at the lock, past the look into the cache.
            steady(lambda: is_at(thread), 0.1)
            stream = dr.Stream(0, "cpu")
            with dr.stream(stream):
                x.sum()
        thread.join()
        assert not default.record_event().query()
        with dr.stream(stream):
            x.zero_()
    assert made[0].sum().item() == 2 * N


def test_a_wait_of_another_node_does_not_swallow_a_failed_check() -> None:
    there = torch.zeros((), device=dr.default_stream(1, "cpu").device)
    torch._assert_async(there)
    event = dr.default_stream(1, "cpu").record_event()
    event.wait(dr.default_stream(0, "cpu"))
    with dr.on(0):
        assert torch.ones(N).sum().item() == N
    with pytest.raises(RuntimeError, match="assert"):
        there.item()
    dr.synchronize()


class _Issues:
    """A cycle whose finalizer issues something, on the default stream, and has the log sent."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        dr.manual_seed(0)
        active_session().nodes[0].flush()


def test_a_finalizer_may_issue_in_the_middle_of_an_instruction(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    x = torch.zeros(N, device=three[0].device)
    finalized = [0]
    # Else each collection looks through all that other tests have imported, which takes 0.4 s.
    gc.collect()
    gc.freeze()

    def collect(frame: FrameType, event: str, _: Any) -> None:
        if (
            event == "call" and frame.f_code.co_name == "put" and finalized[0] < k
        ):  # where Python looks for signals too, and from 3.12 on collects
            finalized[0] = k
            gc.collect()

    for k in range(1, 40):
        _Issues()
        with dr.stream(three[k % 3]):
            sys.setprofile(collect)
            x.add_(1)
            sys.setprofile(None)
            y = x + 0
    assert y.sum().item() == x.sum().item() == 39 * N


# -- bad input -----------------------------------------------------------------------------------------------


def test_what_is_no_stream_or_event_or_priority_harms_no_worker(
    three: tuple[dr.Stream, dr.Stream, dr.Stream],
) -> None:
    x, no, timed = torch.ones(N, device=three[0].device), 3, dr.Event(enable_timing=True)
    wrong: Any = no
    for use in (
        lambda: three[0].wait_stream(wrong), lambda: three[0].wait_event(wrong),
        lambda: three[0].record_event(wrong), lambda: dr.Event().wait(wrong),
        lambda: dr.Event().record(wrong), lambda: timed.elapsed_time(wrong),
        lambda: x.record_stream(wrong),
    ):  # fmt: skip
        with pytest.raises(
            dr.errors.UsageError, match=r"takes a distruntime\.(Stream|Event), got builtins\.int"
        ):
            use()
    for priority in ("high", 0.5, 1 << 70, True, None):
        with pytest.raises(dr.errors.UsageError, match="whole number"):
            dr.Stream(0, "cpu", priority=priority)  # type: ignore[arg-type]
    dr.synchronize(0, "cpu")
    assert x.sum().item() == N


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="starts a master and kills it, 4 s")
def test_a_worker_stops_computing_for_a_master_that_has_gone(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    dr.shutdown()
    os.chmod(tmp_path, 0o700)
    worker = ListeningWorker(tmp_path, "--listen", f"ipc://{tmp_path}/s", "--insecure")
    tasks = Path(f"/proc/{worker.process.pid}/task")
    if not tasks.exists():
        pytest.skip("this test counts threads in /proc, which is Linux's")
    try:
        with fresh_session(workers=[worker.address]):
            dr.Stream(0, "cpu").synchronize()
        until(lambda: "ended" in worker.text())
        idle = len(list(tasks.iterdir()))
        with pytest.raises(ZeroDivisionError), fresh_session(workers=[worker.address]):
            one, two, three = dr.Stream(0, "cpu"), dr.Stream(0, "cpu"), dr.Stream(0, "cpu")
            slow(one, 6000)
            slow(dr.default_stream(0, "cpu"), 6000)
            two.wait_stream(one)
            with dr.stream(two):
                torch.ones(N, device="remote")
            three.synchronize()
            raise ZeroDivisionError
        until(lambda: len(list(tasks.iterdir())) <= idle)
        fresh_session(workers=[worker.address])
        assert torch.ones(N, device="remote").sum().item() == N
        assert "Traceback" not in worker.text()
    finally:
        dr.shutdown()
        worker.stop()


# -- random numbers ------------------------------------------------------------------------------------------


def test_a_draw_that_meets_the_first_stream_is_waited_for_by_the_next_draw(
    fresh_session: Callable[..., Any],
) -> None:
    (node,) = fresh_session(world_size=1).nodes
    x = torch.zeros(N, device="remote")
    x.uniform_()
    x.uniform_().cpu()  # from here on its signature is known
    draw = threading.Thread(target=x.uniform_)
    with node.lock:  # so that it stands where it is about to issue
        draw.start()
        until(lambda: stands_still(draw))
        stream = dr.Stream(0)
    draw.join(30)
    assert not draw.is_alive()
    assert node.order.generator.written == x._handle.storage.written
    with dr.stream(stream):
        torch.rand(N, device="remote").cpu()


def stands_still(thread: threading.Thread) -> bool:
    """Whether a thread has been at one instruction of this package for a while."""
    seen = set()
    for _ in range(20):
        frame = sys._current_frames().get(thread.ident or 0)
        seen.add((frame.f_code, frame.f_lasti) if frame is not None else None)
        threading.Event().wait(0.005)
    return len(seen) == 1 and (only := seen.pop()) is not None and "distruntime" in only[0].co_filename


def test_a_layer_whose_results_the_worker_describes_draws_in_turn(fresh_session: Callable[..., Any]) -> None:
    (node,) = fresh_session(world_size=1).nodes
    stream = dr.Stream(0)
    # An LSTM in bfloat16 needs AVX-512, and a GRU runs everywhere.
    layer, x = torch.nn.GRU(8, 8, num_layers=2, dropout=0.5), torch.randn(3, 2, 8)
    layer, x = layer.to("remote"), x.to("remote")
    before = node.order.generator.written
    with dr.stream(stream), torch.autocast("remote", torch.bfloat16):
        layer(x)[0].sum()
    assert node.order.generator.written > before


def test_what_is_issued_after_a_seed_comes_after_it_on_every_stream(
    fresh_session: Callable[..., Any],
) -> None:
    (node,) = fresh_session(world_size=1).nodes
    with dr.stream(dr.Stream(0)):
        torch.ones(3, device="remote")
    dr.manual_seed(3)
    order = node.order
    assert len(order.last) == 2
    assert all(order.comes_after(stream, 0, order.last[0]) for stream in order.last if stream)
