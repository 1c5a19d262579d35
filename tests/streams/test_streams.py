"""Streams and events as torch.cuda has them, and the table of hazards in docs/streams.md.

Each row of the table has a test here.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.operators import defined
from distruntime.session.session import Session, active_session
from distruntime.wire.messages import AskMemory
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import serve
from processes import Child, blocked, stop, stopped, until

N = 64
PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


@pytest.fixture(autouse=True)
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes with a simulated GPU each; the next test gets the same, unless this one has made another
    session.
    """
    monkeypatch.setattr("distruntime.log.order._KEPT", 1 << 30)  # so that `waits` counts all of them
    if not (dr.is_initialized() and _ours and _ours[0] is active_session()):
        dr.shutdown()
        dr.init_master_worker(world_size=2, simulate_cuda=1)
        _ours[:] = [active_session()]
    yield


_ours: list[Session] = []


@pytest.fixture
def pair() -> tuple[dr.Stream, dr.Stream]:
    """Two streams of node 0's CPU."""
    return dr.Stream(0, "cpu"), dr.Stream(0, "cpu")


def slow(node: int = 0, products: int = 12) -> torch.Tensor:
    """Keep the current stream of a node's CPU busy for some hundredths of a second."""
    x = torch.ones(512, 512, device=dr.Stream(node, "cpu").device)
    for _ in range(products):
        x = x @ x / 512
    return x


def waits(node: int = 0) -> int:
    """How many waits between streams have been issued on a node.

    Counts the clocks' snapshots: one for each wait.
    """
    return sum(len(past) for past in active_session().nodes[node].order._past.values())


# -- the API -------------------------------------------------------------------------------------------------


def test_current_and_default_stream(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    assert dr.current_stream(0, "cpu") == dr.default_stream(0, "cpu") != one
    with dr.stream(one):
        assert dr.current_stream() == one
        assert dr.current_stream(1) == dr.default_stream(1)
        with dr.stream(None), two:
            assert dr.current_stream() == two
        assert dr.current_stream() == one
        assert dr.current_stream(0, "cuda:0") == dr.default_stream(0, "cuda:0")
    assert dr.current_stream(0, "cpu") == dr.default_stream(0, "cpu")


def test_torch_remote_has_them_too(pair: tuple[dr.Stream, dr.Stream]) -> None:
    remote: Any = torch.remote  # type: ignore[attr-defined]
    with remote.stream(pair[0]):
        assert remote.current_stream() == pair[0] == remote.current_stream(pair[0].device)
        event = remote.Event()
        event.record()
    assert remote.default_stream(pair[0].device) == dr.default_stream(0, "cpu")
    assert isinstance(remote.Stream(), dr.Stream)
    remote.synchronize(pair[0].device)
    assert event.query()


def test_a_stream_knows_its_place() -> None:
    stream = dr.Stream(1, "cuda:0", priority=-1)
    assert (stream.node, stream.place, stream.priority) == (1, dr.place(1, "cuda:0"), -1)
    assert stream.stream_id > 0 == dr.default_stream(1).stream_id
    assert repr(stream) == f"<distruntime.Stream {stream.stream_id} on node 1 cuda:0>"
    with dr.stream(stream):
        assert torch.ones(2, device="remote").place == stream.place
    assert dr.Stream(torch.ones(1, device=stream.device).device).place == stream.place
    assert dr.Stream(dr.place(1, "cpu")).place == dr.place(1, "cpu")
    assert dr.Stream(1).place == dr.place(1, "cuda:0")
    assert dr.Stream().place == dr.place(0, "cuda:0")
    assert len({stream, dr.Stream(1), dr.default_stream(1), dr.default_stream(1)}) == 3


def test_a_stream_belongs_to_a_thread_and_a_task(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    seen: list[dr.Stream] = []
    with dr.stream(one):
        thread = threading.Thread(target=lambda: seen.append(dr.current_stream(0, "cpu")))
        thread.start()
        thread.join()
        contextvars.copy_context().run(lambda: seen.append(dr.current_stream(0, "cpu")))
    assert seen == [dr.default_stream(0, "cpu"), one]

    async def task(stream: dr.Stream) -> bool:
        with dr.stream(stream):
            await asyncio.sleep(0.01)
            return dr.current_stream(0, "cpu") == stream

    async def both() -> list[bool]:
        return await asyncio.gather(task(one), task(two))

    assert asyncio.run(both()) == [True, True]


def test_more_streams_than_a_device_has_share_queues() -> None:
    streams = [dr.Stream(1, "cpu") for _ in range(40)]
    assert len({s.stream_id for s in streams}) == 32
    results = []
    for stream in streams:
        with dr.stream(stream):
            results.append(torch.full((3,), float(stream.stream_id), device="remote"))
    assert [r.cpu()[0].item() for r in results] == [float(s.stream_id) for s in streams]
    numbers = {s.stream_id for s in streams}
    del streams, stream
    assert dr.Stream(1, "cpu").stream_id in numbers  # a queue is used again


def test_two_streams_run_side_by_side(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    with dr.stream(one):
        slow(products=2000)  # seconds, most of which are dropped below
    late = one.record_event()
    with dr.stream(two):
        assert torch.ones(2, device="remote").sum().item() == 2
    assert not late.query()
    assert not one.query()
    assert two.query()
    one.cancel()
    one.synchronize()
    assert late.query()
    assert one.query()


def test_event_order_without_implicit_waits(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    x = torch.zeros(N, device=one.device)
    dr.synchronize()
    dr.set_implicit_waits(False)
    try:
        with blocked(one):
            with dr.stream(one):
                x.add_(1)
            with dr.stream(two):
                early = x.clone()
                one.record_event().wait()
                late = x.clone()
            assert early.cpu().sum() == 0
        assert late.sum().item() == N
        with dr.stream(one):
            slow()
            x.add_(1)
        two.wait_stream(one)
        with dr.stream(two):
            assert x.clone().sum().item() == 2 * N
        with dr.stream(one):
            slow()
            x.add_(1)
            event = dr.Event()
            event.record()
        two.wait_event(event)
        with dr.stream(two):
            assert x.clone().sum().item() == 3 * N
    finally:
        dr.set_implicit_waits(True)


def test_event_that_was_never_recorded() -> None:
    event = dr.Event()
    event.wait()
    event.synchronize()
    assert event.query()
    assert repr(event) == "<distruntime.Event not recorded>"


def test_elapsed_time_agrees_with_the_workers_clock(
    tmp_path: Path, fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker runs in a thread of this process, and an operator of the test's own notes the time when it
    # runs there.
    clock: list[float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        clock.append(time.perf_counter())
        return x.clone()

    library = torch.library.Library("test_streams", "FRAGMENT")
    library.define("note(Tensor x) -> Tensor")
    library.impl("note", note, "CPU")
    # So nothing travels: the worker knows it already.
    monkeypatch.setattr(defined, "_kernels", {})
    library.impl("note", torch.empty_like, "Meta")
    stop, address = threading.Event(), f"ipc://{tmp_path}/worker"
    interval = sys.getswitchinterval()
    worker = threading.Thread(target=serve, args=(WorkerConfig(listen=address), stop))
    worker.start()
    try:
        fresh_session(workers=[address])
        side, errors = dr.Stream(0, "cpu"), dict[int, list[float]]()
        for stream in (dr.default_stream(), side) * 3:
            start, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
            with dr.stream(stream):
                x = torch.ones(4, device="remote")
                torch.ops.test_streams.note(x)
                slow()
                stream.synchronize()
                clock.clear()
                torch.ops.test_streams.note(x)
                start.record()
                torch.ops.test_streams.note(x)
                slow(products=60)
                torch.ops.test_streams.note(x)
                end.record()
                torch.ops.test_streams.note(x)
            elapsed = start.elapsed_time(end)
            stream.synchronize()
            before, first, last, after = clock  # around each of the two events, however busy the machine
            assert 0 < (last - first) * 1e3 <= elapsed <= (after - before) * 1e3
            assert elapsed > 50
            errors.setdefault(stream.stream_id, []).append(elapsed / ((last - first) * 1e3) - 1)
        # A busy machine may hold the worker up between an event and the look at the clock, but not each time.
        assert all(min(found) <= 0.1 for found in errors.values()), errors
    finally:
        dr.shutdown()
        stop.set()
        worker.join(20)
        sys.setswitchinterval(interval)


def test_elapsed_time_on_a_node_without_streams(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    start, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    start.record()
    torch.ones(300, 300, device="remote") @ torch.ones(300, 300, device="remote")
    end.record()
    assert start.elapsed_time(end) > 0
    assert active_session().nodes[0].order is None


def test_synchronize_raises_what_failed_on_the_stream(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    with blocked(two):
        with dr.stream(two):
            torch.ones(2, device="remote")
        with dr.stream(one):
            torch.linalg.cholesky(-torch.eye(3, device="remote"))
        with pytest.raises(torch.linalg.LinAlgError, match=r"test_streams\.py"):
            one.synchronize()
        assert not two.query()
    dr.synchronize()


def test_synchronize_a_device_waits_for_its_streams_only(pair: tuple[dr.Stream, dr.Stream]) -> None:
    with blocked(pair[0]):
        dr.synchronize(0, "cuda:0")
        assert not pair[0].query()
    dr.synchronize(0, "cpu")
    assert pair[0].query()


def test_autograd_across_streams(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    w = torch.randn(8, 8, device=one.device, requires_grad=True)
    with dr.stream(one):
        slow()
        h = (w @ w).relu()
    with dr.stream(two):
        loss = (h * h).sum()
    loss.backward()
    local = w.detach().cpu().requires_grad_()
    h = (local @ local).relu()
    (h * h).sum().backward()
    torch.testing.assert_close(w.grad.cpu(), local.grad)


def test_training_on_a_stream_equals_local(pair: tuple[dr.Stream, dr.Stream]) -> None:
    def train(device: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        x = torch.randn(32, 8)
        model, x = model.to(device), x.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    here = train("cpu")
    with dr.stream(pair[0]):
        there = train(pair[0].device)
    assert there == pytest.approx(here, rel=1e-6)


# -- hazards: each row of the table in docs/streams.md -------------------------------------------------------


def settled(x: torch.Tensor) -> torch.Tensor:
    """Return `x` when it is there, and known to be there."""
    dr.synchronize()
    return x


def held() -> None:
    """Hold node 0 still and give the current stream work: until `resume` no instruction of it can be known to
    have run.
    """
    stop(_pid())
    slow()


def resume() -> None:
    """Let node 0 go on."""
    os.kill(_pid(), signal.SIGCONT)


def _pid() -> int:
    welcome = active_session().nodes[0].welcome
    assert welcome is not None
    return welcome.pid


def _read_after_write(one: dr.Stream, two: dr.Stream) -> Any:
    x = settled(torch.zeros(N, device=one.device))
    with dr.stream(one):
        held()
        x.add_(1)
    with dr.stream(two):
        total = x.sum()
    return (lambda: total), N


def _read_after_make(one: dr.Stream, two: dr.Stream) -> Any:
    with dr.stream(one):
        held()
        x = torch.ones(N, device="remote")
    with dr.stream(two):
        total = x.sum()
    return (lambda: total), N


def _write_after_read(one: dr.Stream, two: dr.Stream) -> Any:
    x = settled(torch.ones(N, device=one.device))
    with dr.stream(one):
        held()
        y = x + 0
    with dr.stream(two):
        x.zero_()
    return (lambda: y.sum()), N


def _write_after_write(one: dr.Stream, two: dr.Stream) -> Any:
    x = settled(torch.zeros(N, device=one.device))
    with dr.stream(one):
        held()
        x.fill_(1)
    with dr.stream(two):
        x.fill_(2)
    return (lambda: x.sum()), 2 * N


def _through_a_view(one: dr.Stream, two: dr.Stream) -> Any:
    x = settled(torch.zeros(N, device=one.device))
    view = settled(x[: N // 2])
    with dr.stream(one):
        held()
        view.fill_(1)
    with dr.stream(two):
        total = x.sum()
    return (lambda: total), N // 2


def _out(one: dr.Stream, two: dr.Stream) -> Any:
    x, out = settled(torch.ones(N, device=one.device)), settled(torch.zeros(N, device=one.device))
    with dr.stream(one):
        held()
        torch.add(x, 1, out=out)
    with dr.stream(two):
        total = out.sum()
    return (lambda: total), 2 * N


def _draws(one: dr.Stream, two: dr.Stream) -> Any:
    with dr.stream(one):
        held()
        first = torch.rand(N, device="remote")
    with dr.stream(two):
        second = torch.rand(N, device="remote")
    generator = torch.Generator().manual_seed(3)
    expected = torch.stack([torch.rand(N, generator=generator), torch.rand(N, generator=generator)])
    return (lambda: (torch.stack([first, second]) - expected.to(one.device)).abs().sum()), 0


def _freed_while_read(one: dr.Stream, two: dr.Stream) -> Any:
    with dr.stream(two):
        x = settled(torch.ones(N, device="remote"))
    with dr.stream(one):
        held()
        y = x + 1
    del x
    gc.collect()
    with dr.stream(two):
        filler = [torch.zeros(N, device="remote") for _ in range(20)]
    assert len(filler) == 20
    return (lambda: y.sum()), 2 * N


def _uploaded_over(one: dr.Stream, two: dr.Stream) -> Any:
    x = settled(torch.ones(N, device=one.device))
    with dr.stream(one):
        held()
        y = x + 0
    with dr.stream(two):
        x.copy_(torch.full((N,), 5.0))
    return (lambda: y.sum() + x.sum()), 6 * N


def _fetched_then_written(one: dr.Stream, two: dr.Stream) -> Any:
    with dr.stream(one):
        held()
        x = torch.ones(N, device="remote")
    future = dr.fetch_async(x)
    with dr.stream(two):
        x.zero_()
    return (lambda: future.result(timeout=60).sum()), N


HAZARDS: dict[str, tuple[Callable[[dr.Stream, dr.Stream], Any], int]] = {
    "read after write": (_read_after_write, 1),
    "read after make": (_read_after_make, 1),
    "write after read": (_write_after_read, 1),
    "write after write": (_write_after_write, 1),
    "through a view": (_through_a_view, 1),
    "`out=`": (_out, 1),
    "two draws": (_draws, 1),
    "free while read": (_freed_while_read, 0),
    "upload over": (_uploaded_over, 1),
    "fetch, then write": (_fetched_then_written, 1),
}


@pytest.mark.parametrize("row", HAZARDS)
def test_hazard(row: str, pair: tuple[dr.Stream, dr.Stream]) -> None:
    run, count = HAZARDS[row]
    for one, two in (
        pair,
        pair[::-1],
        (dr.default_stream(0, "cpu"), pair[0]),
        (pair[1], dr.default_stream(0, "cpu")),
    ):
        torch.manual_seed(3)
        dr.synchronize()
        before = waits()
        try:
            there, expected = run(one, two)
            issued = waits() - before
        finally:
            resume()
        assert issued == count
        assert there().item() == expected


def test_every_row_of_the_documented_table_is_a_test() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Hazards")[2].partition("\n## ")[0]
    rows = [row for row in re.findall(r"^\| ([^|]+?) \|", table, re.M) if row not in ("row", "---")]
    assert sorted(rows) == sorted([*HAZARDS, "read after read", "write after read, known already"])


def test_reads_do_not_wait_for_reads(pair: tuple[dr.Stream, dr.Stream]) -> None:
    x = settled(torch.ones(N, device=pair[0].device))
    before = waits()
    for _ in range(5):
        for stream in pair:
            with dr.stream(stream):
                x.sum()
    assert waits() == before


def test_what_is_known_is_not_waited_for_again(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    third = dr.Stream(0, "cpu")
    dr.synchronize()
    before = waits()
    try:
        with dr.stream(one):
            held()
            x = torch.zeros(N, device="remote")
        with dr.stream(two):
            x.sum()
            assert waits() == before + 1
            x.sum(), x + 1
            y = x * 2
            assert waits() == before + 1
        with dr.stream(third):
            y.sum()
            assert waits() == before + 2
            x.sum()  # two came after one, and this comes after two
            assert waits() == before + 2
    finally:
        resume()
    dr.synchronize()


def test_one_stream_alone_needs_no_wait(pair: tuple[dr.Stream, dr.Stream]) -> None:
    before = waits()
    with dr.stream(pair[0]):
        x = torch.ones(N, device="remote")
        for _ in range(20):
            x = (x + 1).mul_(0.5)
        assert x.sum().item() == N
    assert waits() == before


# -- across nodes --------------------------------------------------------------------------------------------


def test_an_event_of_one_node_holds_a_stream_of_another() -> None:
    here, there = dr.Stream(0, "cpu"), dr.Stream(1, "cpu")
    with stopped(_pid()):  # so that whoever waited here would wait for ever
        with dr.stream(here):
            slow()
            event = here.record_event()
        event.wait(there)
        with dr.stream(there):
            torch.ones(2, device="remote")
        reached = there.record_event()
        assert not reached.query()
        with dr.on(1, "cpu"):
            assert torch.ones(2).sum().item() == 2  # the node's other streams go on
    reached.synchronize(60)
    assert event.query()


def test_a_ring_of_events_over_two_nodes_does_not_stop() -> None:
    streams = [dr.Stream(node, "cpu") for node in (0, 1, 0, 1)]
    for _ in range(25):
        for k, stream in enumerate(streams):
            stream.wait_stream(streams[k - 1])
            with dr.stream(stream):
                torch.ones(3, device="remote") + 1
    for stream in streams:
        stream.synchronize(60)


def test_an_event_of_a_default_stream_crosses_too(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    with dr.on(0):
        torch.ones(400, 400) @ torch.ones(400, 400)
        event = dr.Event()
        event.record()
    with dr.on(1):
        event.wait()
        assert (torch.ones(2) + 1).sum().item() == 4
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=1)


# -- waiting -------------------------------------------------------------------------------------------------


def test_a_wait_past_its_deadline_names_both_lines(pair: tuple[dr.Stream, dr.Stream]) -> None:
    with blocked(pair[0]):
        with dr.stream(pair[0]):
            x = slow()
            event = pair[0].record_event()  # recorded here
        with pytest.raises(dr.errors.WaitTimeout) as caught:
            event.synchronize(timeout=0.05)  # waited here
        text = str(caught.value)
        assert "event = pair[0].record_event()  # recorded here" in text
        assert "event.synchronize(timeout=0.05)  # waited here" in text
        assert isinstance(caught.value, TimeoutError)
        for wait in (
            lambda: pair[0].synchronize(0.01),
            lambda: dr.synchronize(0, timeout=0.01),
            lambda: dr.synchronize(0, "cpu", 0.01),
            lambda: dr.fetch(x, 0.01),
        ):
            with pytest.raises(dr.errors.WaitTimeout):
                wait()
    dr.synchronize()
    assert torch.ones(2, device="remote").sum().item() == 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_streams_own_wait_past_its_deadline_is_reported(node: int) -> None:
    here, there = dr.Stream(0, "cpu"), dr.Stream(node, "cpu")
    with stopped(_pid()) if node else blocked(here):
        with dr.stream(here):
            slow()
            event = here.record_event()  # recorded here
        event.wait(there, timeout=0.05)  # waited here
        with pytest.raises(dr.errors.WaitTimeout) as caught:
            there.synchronize(60)
    assert "recorded here" in str(caught.value)
    assert "waited here" in str(caught.value)
    dr.synchronize()
    with dr.stream(there):
        assert torch.ones(2, device="remote").sum().item() == 2


def test_cancel_drops_what_has_not_begun(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    kept = torch.ones(N, device=one.device)
    with dr.stream(one):
        slow(products=600)
        dropped = torch.zeros(N, device="remote") + 1
        dr.Event().wait()
    one.cancel()
    with pytest.raises(dr.errors.StreamCancelled, match=r"stream.cancel\(\)"):
        dropped.sum().item()
    with dr.stream(one):  # it works again
        assert (kept + 1).sum().item() == 2 * N
    with dr.stream(two), pytest.raises(dr.errors.StreamCancelled):
        (dropped + 1).sum().item()
    dr.synchronize()  # what was asked for is no failure to report
    memory = active_session().ask(active_session().nodes[0], AskMemory)
    before = active_session().value(memory)[0]
    del dropped
    dr.synchronize()
    assert active_session().value(active_session().ask(active_session().nodes[0], AskMemory))[0] < before


def test_cancel_ends_a_wait_for_another_node() -> None:
    here, there = dr.Stream(0, "cpu"), dr.Stream(1, "cpu")
    with stopped(_pid()):
        with dr.stream(here):
            slow()
        there.wait_stream(here)
        with dr.stream(there):
            dropped = torch.ones(2, device="remote")
        there.cancel()
        there.synchronize(30)
    with pytest.raises(dr.errors.StreamCancelled):
        dropped.cpu()
    dr.synchronize()


def _interrupted() -> None:
    with dr.init_master_worker(world_size=1):
        stream = dr.Stream()
        with dr.stream(stream):
            slow(products=2000)
        timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            stream.synchronize()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        stream.cancel()
        assert torch.ones(2, device="remote").sum().item() == 2
        print("usable", flush=True)


def test_ctrl_c_in_a_wait_leaves_the_session_usable() -> None:
    with Child(_interrupted) as child:
        assert [child.line(), child.line()] == ["interrupted", "usable"]


# -- bad input -----------------------------------------------------------------------------------------------


def test_places_that_are_not_there() -> None:
    with pytest.raises(dr.errors.PlacementError, match="no node 7"):
        dr.Stream(7)
    with pytest.raises(dr.errors.PlacementError, match="no device 'cuda:3'"):
        dr.Stream(0, "cuda:3")
    with pytest.raises(dr.errors.PlacementError, match="cpu"):
        dr.Stream(torch.device("cpu"))
    with pytest.raises(dr.errors.UsageError, match=r"takes a distruntime\.Stream, got builtins\.int"):
        dr.stream(3)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match="crosses nodes"):
        dr.Event(interprocess=True)


def test_elapsed_time_of_events_that_cannot_say() -> None:
    timed, other = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    with pytest.raises(dr.errors.UsageError, match=r"Event\(enable_timing=True\)"):
        dr.Event().elapsed_time(timed)
    with pytest.raises(dr.errors.UsageError, match="both events recorded"):
        timed.elapsed_time(other)
    timed.record(dr.Stream(0))
    other.record(dr.Stream(1))
    with pytest.raises(dr.errors.UsageError, match="two clocks"):
        timed.elapsed_time(other)


def test_record_stream_of_another_node() -> None:
    x = torch.ones(2, device="remote")
    x.record_stream(dr.Stream(0))
    with pytest.raises(dr.errors.PlacementError, match="another node's"):
        x.record_stream(dr.Stream(1))


def test_streams_and_events_of_a_session_that_has_ended(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    stream, event = dr.Stream(), dr.Event()
    event.record(stream)
    dr.shutdown()
    fresh_session(world_size=1)
    for use in (
        lambda: stream.__enter__(), stream.synchronize, stream.query, stream.cancel, stream.record_event,
        event.query, event.synchronize, lambda: event.wait(dr.Stream()),
        lambda: dr.Stream().wait_stream(stream),
    ):  # fmt: skip
        with pytest.raises(dr.errors.SessionClosed):
            use()


def test_events_of_a_node_that_dies(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session(world_size=2)
    here, there = dr.Stream(0), dr.Stream(1)
    with dr.stream(there):
        slow(1, 3000)
    event = there.record_event()
    event.wait(here)
    with dr.stream(here):
        after = torch.ones(2, device="remote")
    os.kill(session.workers[1].pid, signal.SIGKILL)
    until(lambda: session.nodes[1].failed is not None)
    for use in (
        event.query,
        event.synchronize,
        lambda: event.wait(here),
        there.synchronize,
        lambda: dr.Stream(1),
    ):
        with pytest.raises(dr.errors.NodeFailed, match="node 1"):
            use()
    with pytest.raises(dr.errors.NodeFailed, match="event"):  # the wait that stood is over, and says so once
        here.synchronize(30)
    assert after.sum().item() == 2


# -- what a GPU's worker does: copies are a stream's instructions, and a simulated GPU gets these messages too


def test_reads_of_a_gpu_are_instructions_of_the_stream(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session(world_size=1, simulate_cuda=1)
    session.nodes[0].asynchronous = True  # as for a node with real GPUs
    one, two = dr.Stream(0, "cuda:0"), dr.Stream(0, "cuda:0")
    with dr.stream(one):
        x = torch.ones(3, 4, device="remote").t()
        future = dr.fetch_async([x, x.sum()])
    with dr.stream(two):
        x.zero_()
    ones, total = future.result(timeout=60)
    assert torch.equal(ones, torch.ones(4, 3))
    assert total.item() == 12
    assert x.sum().item() == 0
    assert torch.equal(torch.full((300_000,), 2.0, device="remote").cpu(), torch.full((300_000,), 2.0))
    assert "0., 0., 0." in repr(x)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(-torch.eye(3, device="remote")).cpu()
    before = session.value(session.ask(session.nodes[0], AskMemory))[0]
    for _ in range(20):
        x.cpu()
    dr.synchronize()
    assert session.value(session.ask(session.nodes[0], AskMemory))[0] <= before


@pytest.mark.parametrize(
    "timeout", [float("nan"), float("inf"), -1, -0.5, 1e12, 10**400, "2", True, torch.ones(())], ids=repr
)
def test_a_timeout_that_is_none_is_refused_at_the_call(
    pair: tuple[dr.Stream, dr.Stream], timeout: Any
) -> None:
    one, two = pair
    event, future = one.record_event(), dr.fetch_async(torch.ones(2, device="remote"))
    waits: list[Callable[[], object]] = [
        lambda: event.wait(two, timeout),
        lambda: dr.Event().wait(two, timeout),
        lambda: event.synchronize(timeout),
        lambda: two.wait_event(event, timeout),
        lambda: two.wait_stream(one, timeout),
        lambda: one.synchronize(timeout),
        lambda: dr.synchronize(timeout=timeout),
        lambda: dr.synchronize(0, "cpu", timeout=timeout),
        lambda: dr.fetch(torch.ones(2, device="remote"), timeout),
        lambda: future.result(timeout),
        lambda: active_session().ending.shut_down(timeout=timeout),
    ]
    for wait in waits:
        with pytest.raises(dr.errors.UsageError, match="number of seconds"):
            wait()
    two.synchronize(30)  # and nothing waits on the worker
    assert future.result(timeout=30).tolist() == [1, 1]


def test_the_longest_timeout_is_taken(pair: tuple[dr.Stream, dr.Stream]) -> None:
    one, two = pair
    two.wait_stream(one, threading.TIMEOUT_MAX)
    two.synchronize(threading.TIMEOUT_MAX)
    assert dr.fetch(torch.ones(2, device="remote"), threading.TIMEOUT_MAX).tolist() == [1, 1]
