"""`dr.why_slow` names what was planted: slow reads, a slow node, a late member, a slow network, Python."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session
from distruntime.timeline import chrome
from distruntime.timeline.why_slow import WhySlow, why_slow
from network import Network
from processes import ListeningWorker, stopped
from traces import line_of

at = partial(line_of, __file__)


def looked(folder: Path, work: Callable[[], None], **options: Any) -> WhySlow:
    path = folder / "step.json"
    with dr.trace(path, quiet=True, **options):
        work()
    return dr.why_slow()


def five(slow: WhySlow) -> None:
    """Check what holds for each answer."""
    assert sorted(c.kind for c in slow.causes) == ["computing", "network", "python", "reads", "waiting"]
    assert [c.seconds for c in slow.causes] == sorted((c.seconds for c in slow.causes), reverse=True)
    assert sum(c.seconds for c in slow.causes) == pytest.approx(slow.seconds, rel=0.02, abs=0.002)
    # A head, the five, and what to do.
    assert len(repr(slow).splitlines()) >= 7 and "took" in repr(slow)


@dr.remote
def for_so_long(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x


def test_reads_in_a_loop(session: Session, tmp_path: Path) -> None:
    x = torch.ones(2, 2, device="remote")
    y = x + 1
    y.sum().item()

    def work() -> None:
        for _ in range(300):
            y[0, 0].item()  # the slow read

    slow = looked(tmp_path, work)
    five(slow)
    reads = slow["reads"]
    assert reads.line.endswith(at("the slow read")) and "300 waits for item" in reads.text
    # On a busy machine the program's own part takes longer, too. No other node has anything to do with it.
    assert slow.cause.kind in ("reads", "python") and slow["network"].seconds < reads.seconds


def test_python_between_operators(session: Session, tmp_path: Path) -> None:
    x = torch.ones(2, 2, device="remote")

    def work() -> None:
        y = x
        for _ in range(5):
            y = y + x
            sum(k * k for k in range(400_000))  # the program's own

    slow = looked(tmp_path, work)
    five(slow)
    assert slow.cause.kind == "python" and slow.cause.line.endswith(at("the program's own"))
    assert slow.cause.share > 0.5


def test_a_worker_that_computes(session: Session, tmp_path: Path) -> None:
    x = torch.ones(2, 2, device="remote")
    for_so_long(x, 0.0)

    def work() -> None:
        for _ in range(5):
            for_so_long(x, 0.1)  # the long one
        (x + 1).sum().item()

    slow = looked(tmp_path, work)
    five(slow)
    cause = slow.cause
    assert cause.kind == "computing" and cause.line.endswith(at("the long one"))
    assert "for_so_long" in cause.operator and cause.node == 0 and cause.share > 0.5


def test_a_slow_node_of_a_mesh(session: Session, tmp_path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x, line = torch.ones(8, 8, device=mesh.device), mesh.lines()
    dr.lines.all_reduce(line, x)
    for_so_long(x.member(1), 0.0)
    dr.synchronize()

    def work() -> None:
        for _ in range(4):
            y = x * 2
            for_so_long(x.member(1), 0.15)  # node 1 is slow
            dr.lines.all_reduce(line, y)  # all wait
        dr.synchronize()

    slow = looked(tmp_path, work)
    five(slow)
    cause = slow.cause
    assert cause.kind == "waiting" and cause.node == 1
    assert cause.line.endswith(at("all wait")) and "all_reduce" in cause.operator
    assert "node 1 is late" in cause.text and "for_so_long" in cause.text
    assert at("node 1 is slow") in cause.text


def test_a_collective_that_is_stuck(session: Session, tmp_path: Path) -> None:
    group = dr.distributed.new_group([0, 1])
    a, b = torch.ones(3, device=dr.place(0)), torch.ones(3, device=dr.place(1))
    dr.distributed.all_reduce([a, b], group=group)
    dr.synchronize()
    for_so_long(b, 0.0)

    def work() -> None:
        for_so_long(b, 1.5)
        dr.distributed.all_reduce([a, b], group=group)  # stuck

    slow = looked(tmp_path, work, timeout=0.5)
    cause = slow.cause
    assert cause.kind == "waiting" and cause.node == 1 and cause.line.endswith(at("stuck"))
    assert any("had not run everything" in note for note in slow.missing)
    dr.synchronize()


def test_a_member_that_does_not_answer(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh_session(world_size=2)
    group = dr.distributed.new_group([0, 1])
    a, b = torch.ones(3, device=dr.place(0)), torch.ones(3, device=dr.place(1))
    dr.distributed.all_reduce([a, b], group=group)
    dr.synchronize()
    trace = dr.trace(tmp_path / "step.json", timeout=0.5, quiet=True)
    trace.start()
    with stopped(session.nodes[1].welcome.pid):
        dr.distributed.all_reduce([a, b], group=group)  # nobody comes
        monkeypatch.setenv("DISTRUNTIME_LOOK_TIMEOUT", "0.3")
        trace.stop()
    slow = dr.why_slow()
    assert slow.cause.kind == "waiting" and slow.cause.node == 1
    assert slow.cause.line.endswith(at("nobody comes"))
    dr.synchronize()


def test_a_slow_network(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0", "--insecure")
    try:
        with Network(worker.address) as network:
            fresh_session(workers=[network.address], insecure=True)
            x = torch.ones(2, 2, device="remote")
            (x + 1).sum().item()
            network.slow(0.02)

            def work() -> None:
                for _ in range(12):
                    x[0, 0].item()  # over the line

            slow = looked(tmp_path, work)
            five(slow)
            assert slow.cause.kind == "network" and slow.cause.node == 0
            assert slow.cause.line.endswith(at("over the line"))
            assert "a round trip to node 0 takes" in slow.cause.text
            dr.shutdown()
    finally:
        worker.stop()


@pytest.mark.slow(reason="starts IPython in a program of its own, 3 s")
def test_the_shell_says_the_same(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    with dr.trace(path, quiet=True) as trace:
        torch.ones(3, device="remote").sum().item()
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "why-slow", str(path)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and done.stdout.strip() == repr(dr.why_slow(trace)).strip()
    assert "<table>" in dr.why_slow(path)._repr_html_()


def test_the_shell_says_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "why-slow", str(tmp_path / "no.json")],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1 and "cannot be read" in done.stderr and "Traceback" not in done.stderr


def test_a_trace_by_hand(tmp_path: Path) -> None:
    """Each moment counts once, for what holds the program up."""
    events = chrome.Events()
    events.process(1, "master")
    events.process(2, "node 0")
    main, stream = events.thread(1, "main"), events.thread(2, "stream 0")
    ms = 1_000_000
    events.slice(
        1, main, "wait: item", "read", 10 * ms, 60 * ms, {"line": "a.py:1", "code": "x", "why": "item"}
    )
    events.slice(2, stream, "aten.mm", "operator", 20 * ms, 50 * ms, {"line": "a.py:2", "code": "y"})
    events.slice(
        1, events.thread(1, "lines"), "a.py:3", "python", 0, 10 * ms, {"line": "a.py:3", "code": "z"}
    )
    path = tmp_path / "hand.json"
    nodes = [{"node": 0, "round_trip_ms": 5.0, "missing": "", "dropped": 0}]
    chrome.write(path, events.all, {"seconds": 0.1, "main": main, "nodes": nodes})
    slow = why_slow(path)
    five(slow)
    took = {cause.kind: round(cause.seconds * 1000) for cause in slow.causes}
    assert took == {"python": 50, "computing": 30, "reads": 15, "network": 5, "waiting": 0}
    assert slow["computing"].line == "a.py:2" and slow["reads"].line == "a.py:1"
    assert slow["python"].line == "a.py:3"
    with pytest.raises(KeyError):
        slow["nothing"]


def test_an_exchange_in_which_nobody_is_late(tmp_path: Path) -> None:
    """Members of one node wait for no other node."""
    events = chrome.Events()
    events.process(1, "master")
    events.process(2, "node 0")
    main, stream = events.thread(1, "main"), events.thread(2, "stream 0")
    about = {"line": "a.py:1", "code": "x", "together": "7", "nodes": [0]}
    events.slice(2, stream, "all_reduce", "collective", 0, 60_000_000, about)
    path = tmp_path / "hand.json"
    nodes = [{"node": 0, "round_trip_ms": 0.1, "missing": "", "dropped": 0}]
    chrome.write(path, events.all, {"seconds": 0.1, "main": main, "nodes": nodes})
    waits = why_slow(path)["waiting"]
    assert (waits.line, waits.node, waits.operator) == ("a.py:1", None, "all_reduce")
    assert "0.060 s in all_reduce at a.py:1   x, and no node was late" in waits.text
    assert "fewer and larger" in repr(why_slow(path)) and "late node" not in repr(why_slow(path))
