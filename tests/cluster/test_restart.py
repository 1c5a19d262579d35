"""A lost worker: what its loss says and costs, and another in its place."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.cluster import connector as connectors
from distruntime.cluster.connector import Connector
from distruntime.cluster.local_workers import LocalLauncher, LocalWorker
from distruntime.session.session import active_session
from distruntime.wire.identity import has_died
from distruntime.wire.messages import Join
from distruntime.wire.zeromq.connections import PeerEvent
from processes import STARTING, ListeningWorker, until

REMOTE = "remote"


def kill(node: int) -> int:
    """Kill a worker; return its process id."""
    pid: int = dr.nodes()[node].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def is_lost(node: int) -> bool:
    return active_session().nodes[node].failed is not None


def test_a_loss_names_node_host_signal_and_what_was_lost(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=3)
    mine = torch.zeros(256, 256, device=REMOTE).to(node=1)  # the line that the error names
    kept = torch.ones(4, device=REMOTE)
    mine.sum().item()
    pid = kill(1)
    with pytest.raises(dr.errors.NodeFailed) as caught:
        until(lambda: mine.sum().item() is None)
    text = str(caught.value)
    for part in (
        "node 1",
        dr.nodes()[1].host,
        f"pid {pid}",
        "signal 9 (SIGKILL)",
        "256.0 KiB by",
        "mine = torch.zeros",
        "dr.restart(1)",
    ):
        assert part in text, (part, text)
    until(lambda: [node.state for node in dr.nodes()] == ["ready", "lost", "ready"])
    assert "SIGKILL" in repr(dr.nodes())
    assert kept.sum().item() == 4 and kept.to(node=2).sum().item() == 4


def test_the_others_keep_computing_while_one_dies(fresh_session: Callable[..., Any]) -> None:
    """Each node has a thread that works on it; two of them never notice."""
    fresh_session(world_size=3)
    counts, errors, stop = [0, 0, 0], list[BaseException](), threading.Event()

    def work(node: int) -> None:
        x = torch.zeros(64, device=REMOTE).to(node=node)
        try:
            while not stop.is_set():
                for _ in range(100):
                    x += 1
                counts[node] += 100
                assert x[0].item() == counts[node]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(node,)) for node in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: min(counts) >= 500)
    kill(1)
    until(lambda: errors)
    before = list(counts)
    until(lambda: counts[0] >= before[0] + 2000 and counts[2] >= before[2] + 2000)
    stop.set()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [dr.errors.NodeFailed]


def test_restart_gives_the_number_to_another_worker(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    lost, here = torch.ones(3, device=REMOTE).to(node=1), torch.ones(3, device=REMOTE)
    lost.sum().item()
    old = kill(1)
    until(lambda: is_lost(1))
    dr.restart(1)
    until(lambda: [node.state for node in dr.nodes()] == ["ready", "ready"])
    assert dr.nodes()[1].pid != old
    with dr.on(1):
        new = torch.full((3,), 2.0, device=REMOTE)
    assert new.place == dr.place(1, "cpu") and new.sum().item() == 6
    for use in (lambda: lost + 1, lambda: lost.sum().item(), lambda: new + lost):
        with pytest.raises(dr.errors.NodeFailed, match=f"pid {old}"):
            use()
    assert (here.to(node=1) + new).tolist() == [3, 3, 3]  # the workers have found each other again
    group = dr.distributed.new_group([0, 1])
    parts = [torch.ones(2, device=REMOTE), torch.ones(2, device=REMOTE).to(node=1)]
    dr.distributed.all_reduce(parts, group=group)
    assert parts[0].tolist() == parts[1].tolist() == [2, 2]
    mesh = dr.init_device_mesh("cpu", (2,))
    assert torch.ones(2, device=mesh.device).sum().item() == 2


def test_a_lost_tensor_takes_no_part_in_what_the_new_worker_does(fresh_session: Callable[..., Any]) -> None:
    """The places are the same, and a group that was made since would take its ref for another value's."""
    fresh_session(world_size=2)
    lost = [torch.full((3,), float(k), device="remote:0") for k in range(8)]
    there = torch.zeros(3, device="remote:1")
    kill(0)
    until(lambda: is_lost(0))
    dr.restart(0)
    fresh = [torch.full((3,), 10.0 + k, device="remote:0") for k in range(8)]
    # The group of both workers, for copies, and one for what is in place.
    assert fresh[0].to("remote:1").tolist() == [10.0] * 3
    group = dr.distributed.new_group([0, 1])
    acts: list[Callable[[Any], object]] = [
        lambda x: x.to("remote:1"),
        lambda x: there.copy_(x),
        lambda x: x.copy_(there),
        lambda x: dr.distributed.all_reduce([x, there], group=group),
        lambda x: dr.distributed.broadcast([x, there], src=0, group=group),
    ]
    for x, act in itertools.product(lost, acts):
        with pytest.raises(dr.errors.NodeFailed, match="signal 9"):
            act(x)
    assert [x.tolist() for x in (there, *fresh)] == [[0.0] * 3, *([10.0 + k] * 3 for k in range(8))]
    dr.distributed.all_reduce([fresh[1], there], group=group)
    assert there.tolist() == fresh[1].tolist() == [11.0] * 3


def test_how_a_worker_has_ended_is_said_once(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_session(world_size=1)
    session = active_session()
    monkeypatch.setattr(LocalWorker, "poll", lambda worker: "exited with code 3")
    epitaph = session.workers.epitaph(session.nodes[0])
    monkeypatch.undo()
    assert epitaph is not None and re.match(r"\(pid \d+\) exited with code 3", epitaph)


def test_how_a_worker_has_ended_is_waited_for(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh_session(world_size=2)
    inner = active_session()
    x, node = torch.ones(3, device=REMOTE), inner.nodes[0]
    x.sum().item()
    looks, look_for = [node], connectors.look_for
    monkeypatch.setattr(connectors, "look_for", lambda *args: (look_for(*args), looks.append(node)))
    with monkeypatch.context() as patch:
        # The kernel has reported the death, and the nursery has not yet.
        patch.setattr(type(inner.workers[0]), "poll", lambda self: None)
        kill(0)
        until(lambda: has_died(node.welcome.process))
        looks.clear()
        until(lambda: len(looks) > 3)
        assert node.failed is None
    until(lambda: node.failed is not None)
    with pytest.raises(dr.errors.NodeFailed, match="exited: killed by signal 9"):
        x.sum().item()
    assert session.nodes[0].state == "lost"


def test_once_there_is_a_new_worker_nobody_advises_a_restart(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    lost = torch.ones(3, device=REMOTE)
    dr.publish("m", lost)
    kill(0)
    until(lambda: is_lost(0))
    with pytest.raises(dr.errors.NodeFailed, match=r"dr\.restart\(0\) puts a new worker there"):
        lost.sum().item()
    dr.restart(0)
    for use in (lambda: lost.sum().item(), lambda: dr.lookup("m")):
        with pytest.raises(
            dr.errors.NodeFailed, match="Node 0 has a new worker by now: make or publish"
        ) as caught:
            use()
        assert "dr.restart" not in str(caught.value).replace("by dr.restart()", "")


def test_restart_of_a_worker_that_lives_begins_anew(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    x = torch.ones(3, device=REMOTE)
    x.sum().item()
    old = dr.nodes()[0].pid
    with pytest.raises(dr.errors.UsageError, match=r"node 0 .* runs .*dr\.restart\(0, force=True\)"):
        dr.restart(0)
    assert x.sum().item() == 3
    dr.restart(0, force=True)
    assert dr.nodes()[0].pid != old
    with pytest.raises(dr.errors.NodeFailed, match=r"dr\.restart"):
        x.sum().item()
    assert torch.ones(3, device=REMOTE).sum().item() == 3


def test_streams_and_events_of_a_restarted_node(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    old = dr.Stream(0)
    with dr.stream(old):
        torch.ones(3, device=REMOTE).sum().item()
    kill(0)
    until(lambda: is_lost(0))
    dr.restart(0)
    with dr.stream(dr.Stream(0)):
        x = torch.ones(3, device=REMOTE)
    event = dr.current_stream(0).record_event()
    event.synchronize()
    assert x.sum().item() == 3
    with pytest.raises(dr.errors.NodeFailed):
        with dr.stream(old):
            torch.ones(3, device=REMOTE)
        old.synchronize()


def test_restart_of_what_is_no_node(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.PlacementError, match="no node 3"):
        dr.restart(3)
    with pytest.raises(dr.errors.ConfigurationError, match="timeout is a number of seconds"):
        dr.restart(0, timeout=-1)


def test_restart_workers_starts_them_again(
    fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    fresh_session(world_size=2, restart_workers=True)
    for _ in range(2):
        old = active_session().nodes[1]
        pid = kill(1)
        until(lambda: dr.nodes()[1].state == "connecting" and "killed by signal 9" in dr.nodes()[1].why)
        until(lambda old=old: active_session().nodes[1] is not old)
        assert dr.nodes()[1].pid != pid and torch.ones(3, device=REMOTE).to(node=1).sum().item() == 3
    assert "killed by signal 9" in caplog.text and "is there again" in caplog.text


def test_a_worker_that_is_started_again_and_dies_at_once_is_reported(
    fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    session = fresh_session(world_size=1, restart_workers=True)
    for _ in range(2):
        kill(0)
        until(lambda: dr.nodes()[0].state == "connecting")
        os.kill(session.workers[0].pid, signal.SIGKILL)
        until(lambda: "ended before it was ready: killed by signal 9" in caplog.text)
        until(lambda: dr.nodes()[0].state == "ready")
        caplog.clear()
    assert torch.ones(3, device=REMOTE).sum().item() == 3


class FirstDies(dr.workers.Launcher):
    """Lets the second worker go on once the first has died, and another has asked for its place."""

    def __init__(self) -> None:
        self.started: list[dr.workers.WorkerProcess] = []
        self.joined: set[int] = set()
        self.connectors: list[Connector] = []
        self.launcher = LocalLauncher()

    def start(self, spec: dr.workers.LaunchSpec) -> dr.workers.WorkerProcess:
        self.started.append(self.launcher.start(spec))
        if len(self.started) == 2:
            os.kill(self.started[1].pid, signal.SIGSTOP)
            threading.Thread(target=self.play, daemon=True).start()
        return self.started[-1]

    def play(self) -> None:
        until(lambda: any(0 in connector.nodes for connector in self.connectors))
        os.kill(self.started[0].pid, signal.SIGKILL)
        until(lambda: len(self.started) == 3 and self.started[2].pid in self.joined)
        os.kill(self.started[1].pid, signal.SIGCONT)


def test_a_worker_that_is_lost_while_others_are_waited_for_is_replaced_by_its_own_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dr.shutdown()
    launcher, joined = FirstDies(), Connector._joined

    def note(self: Connector, peer: bytes, join: Join) -> None:
        joined(self, peer, join)
        launcher.connectors.append(self)
        launcher.joined.add(join.pid)

    monkeypatch.setattr(Connector, "_joined", note)
    dr.init_master_worker(world_size=2, launcher=launcher, restart_workers=True, timeout=STARTING)
    try:
        until(lambda: [node.state for node in dr.nodes()] == ["ready", "ready"])
        assert [node.pid for node in dr.nodes()] == [launcher.started[2].pid, launcher.started[1].pid]
        tensors = [torch.ones(2, device=REMOTE).to(node=k) for k in range(2)]
        dr.distributed.all_reduce(tensors)
        assert [t.tolist() for t in tensors] == [[2.0, 2.0]] * 2
    finally:
        dr.shutdown()


def test_restart_workers_is_for_workers_that_were_started_here() -> None:
    dr.shutdown()
    with pytest.raises(
        dr.errors.ConfigurationError, match="restart_workers is for workers that are started here"
    ):
        dr.init_master_worker(workers=["tcp://127.0.0.1:1"], restart_workers=True)


def test_a_dead_worker_is_reported_with_its_last_words(
    fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    fresh_session(world_size=1)
    worker = active_session().workers[0]
    assert worker is not None
    os.kill(worker.pid, signal.SIGABRT)  # faulthandler writes a stack
    until(lambda: is_lost(0))
    # Who loses it says so a moment later.
    until(lambda: "SIGABRT" in caplog.text)
    assert "its last lines" in caplog.text and "Aborted" in caplog.text, caplog.text


def test_a_daemon_that_comes_back_takes_its_place(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first = ListeningWorker(folders[0], "--listen", "tcp://127.0.0.1:0")
    second = None
    try:
        session = fresh_session(workers=[first.address])
        x = torch.ones(3, device=REMOTE)
        x.sum().item()
        started = time.monotonic()
        first.process.kill()
        first.process.wait()
        with pytest.raises(dr.errors.NodeFailed, match="died: the process is gone"):
            until(lambda: x.sum().item() is None)
        assert session.nodes[0].state == "lost" and time.monotonic() - started < 30
        old = session.nodes[0]
        second = ListeningWorker(folders[1], "--listen", first.address)
        until(lambda: session.nodes[0] is not old)
        assert torch.ones(3, device=REMOTE).sum().item() == 3
        with pytest.raises(dr.errors.NodeFailed):
            x.sum().item()
    finally:
        dr.shutdown()
        for worker in (first, second):
            if worker is not None:
                worker.stop()


def test_a_daemons_last_words_count_though_its_end_is_seen_with_them(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        session = fresh_session(workers=[worker.address])
        x = torch.ones(3, device=REMOTE)
        assert x.sum().item() == 3
        events, connections = session.channel.events, session.channel._connections

        def held_up() -> list[PeerEvent]:
            """The reader has found no message, and looks at connections only after both have come."""
            worker.process.terminate()
            worker.process.wait(20)
            until(lambda: session.nodes[0].failed is not None or connections.poll(0))
            found: list[PeerEvent] = events()
            return found

        monkeypatch.setattr(session.channel, "events", held_up)
        with pytest.raises(dr.errors.NodeFailed, match="left: the worker was stopped"):
            until(lambda: x.sum().item() is None)
    finally:
        monkeypatch.undo()
        dr.shutdown()
        worker.stop()


def test_a_daemon_that_is_stopped_has_left(
    fresh_session: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        fresh_session(workers=[worker.address])
        x = torch.ones(3, device=REMOTE)
        worker.process.terminate()
        with pytest.raises(dr.errors.NodeFailed, match="left: the worker was stopped"):
            until(lambda: x.sum().item() is None)
        assert dr.nodes()[0].state == "left"
        start = f"distruntime-worker --listen {worker.address}"
        with pytest.raises(dr.errors.ConnectionFailed) as caught:
            dr.restart(0, timeout=0.3)
        text = str(caught.value)
        assert f"no replacement for node 0 appeared at {worker.address} within 0.3 s" in text
        assert f"Start one there: {start}. It joins by itself" in text
        assert f"Start another worker in its place within 0.3 s: {start}" in caplog.text
    finally:
        dr.shutdown()
        worker.stop()
