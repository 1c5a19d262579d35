"""Looking at workers: what they do, and where their threads are, with a session and without one."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import distruntime as dr
from distruntime import __main__ as command_line
from distruntime.cluster import named_sessions
from distruntime.cluster.absences import refuses
from distruntime.cluster.observe import Answer, Observer
from distruntime.looking import report
from distruntime.session.session import active_session
from distruntime.session.tables import table_text
from distruntime.wire.keys import KeyPair
from distruntime.wire.messages import AskStacks, AskWorker, DeviceRow, SessionRow, WorkerReport
from distruntime_worker.log.progress import Progress
from distruntime_worker.log.state import State
from distruntime_worker.machine.devices import Devices
from distruntime_worker.session.report import Reporter
from distruntime_worker.values.streams import Stream
from processes import Child, ListeningWorker, blocked, state, stopped, until

REMOTE = "remote"


pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ListeningWorker]:
    started = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    yield started
    dr.shutdown()
    started.stop()


def report_of(observer: Observer) -> WorkerReport:
    (answer,) = observer.ask(AskWorker, 30.0)
    assert answer.value is not None, answer.why
    return answer.value


def test_a_stranger_with_the_key_sees_the_sessions_and_opens_none(daemon: ListeningWorker) -> None:
    with Observer([daemon.address]) as observer:
        assert report_of(observer).sessions == []
        dr.init_master_worker(workers=[daemon.address], session="day")
        x = torch.ones(3, device=REMOTE)
        dr.synchronize()
        (row,) = report_of(observer).sessions
        assert (row.name, row.lasting, row.away, row.running) == ("day", True, None, None) and row.values >= 1
        with blocked(dr.current_stream()):
            ys = [x + 1 for _ in range(100)]
            active_session().nodes[0].flush()
            until(lambda: report_of(observer).sessions[0].queued >= 90)
            # The wait for the block is one more.
            assert report_of(observer).sessions[0].queued <= 110
        assert ys[-1].tolist() == [2.0] * 3
        dr.detach()
        until(lambda: report_of(observer).sessions[0].away is not None)
        report = report_of(observer)
        assert (report.address, report.version) == (daemon.address, dr.__version__)
        assert [device.name for device in report.devices] == ["cpu"] and report.busy == [None]
    assert daemon.text().count("begins") == 1


def test_what_is_queued_may_hold_words_of_any_kind() -> None:
    dr.init_master_worker(world_size=1)
    with blocked(dr.current_stream()):
        xs = [torch.ones(2, 3).to(REMOTE) for _ in range(20)]
        active_session().nodes[0].flush()
        assert dr.nodes()[0].queued
        assert dr.nodes()[0].state == "busy"
    assert sum(x.sum().item() for x in xs) == 120.0


def test_without_the_key_nothing_is_said(daemon: ListeningWorker, tmp_path: Path) -> None:
    KeyPair.generate().save(tmp_path / "another")
    with Observer([daemon.address], key=tmp_path / "another") as observer:
        (answer,) = observer.ask(AskWorker, 30.0)
    assert answer.value is None and "closed the connection during the handshake" in answer.why


def test_who_does_not_answer_is_named_and_the_others_are_shown(
    daemon: ListeningWorker, tmp_path: Path
) -> None:
    nobody = f"ipc://{tmp_path}/nobody"
    with Observer([nobody, daemon.address]) as observer:
        first, second = observer.ask(AskWorker, 30.0)
        assert first == Answer(nobody, None, first.why) and "nobody listens" in first.why
        assert second.value is not None
        with stopped(second.value.pid):
            third = observer.ask(AskWorker, 0.3)[1]
        assert third.value is None and "did not answer as a worker within 0 s" in third.why
        assert observer.ask(AskWorker, 30.0)[1].value is not None


def _busy() -> Any:
    """Keep node 0 in one operator for a second or more."""
    x = torch.ones(1500, 1500, device=REMOTE)
    for _ in range(20):
        x = x @ x
    return x


def test_instructions_of_every_kind_are_counted() -> None:
    dr.init_master_worker(world_size=1)
    x = torch.eye(3, device=REMOTE)
    with blocked(dr.current_stream()):
        uploaded = [torch.ones(3).to(REMOTE) for _ in range(5)]
        checked = [torch.linalg.inv(x) for _ in range(5)]
        x.t().fill_diagonal_(2)
        active_session().nodes[0].flush()
        until(lambda: (dr.nodes()[0].queued or 0) >= 10)
    assert uploaded[-1].tolist() == [1, 1, 1] and torch.equal(checked[-1].cpu(), torch.eye(3))


@pytest.mark.slow(reason="starts a program that imports torch, 4 s")
def test_nodes_tell_what_runs_there_and_stacks_where(tmp_path: Path) -> None:
    dr.init_master_worker(world_size=1)
    assert (dr.nodes()[0].doing, dr.nodes()[0].queued, dr.nodes()[0].sessions) == ("nothing", 0, 1)
    x = _busy()
    until(lambda: "aten.mm for" in str(dr.nodes()[0].doing))
    node = dr.nodes()[0]
    assert node.queued and node.processor is not None and node.processor >= 0
    head, row = repr(dr.nodes()).splitlines()[2:]
    assert head.split() == "node address doing queued sessions CPU".split() and row.split()[-1] == "%"
    assert dr.nodes()._repr_html_().count("<table>") == 2
    found = dr.profiler.stacks(0)
    assert repr(found) == str(found) and f"pid {node.pid}" in found
    assert "thread executor" in found and "executor.py" in found
    x.sum().item()
    with pytest.raises(dr.errors.PlacementError):
        dr.profiler.stacks(7)


def test_a_worker_that_does_not_answer_has_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    dr.init_master_worker(world_size=1)
    pid = dr.nodes()[0].pid
    monkeypatch.setenv("DISTRUNTIME_LOOK_TIMEOUT", "0.2")
    with stopped(pid), pytest.raises(dr.errors.WaitTimeout, match=f"py-spy dump --native --pid {pid}"):
        dr.profiler.stacks(0)
    # It goes on: it is stopped no more.
    assert state(pid) not in ("", "T", "Z")


def test_the_commands_show_named_sessions_and_end_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["sessions"]) == 0 and "no session is noted here" in capsys.readouterr().out
    assert command_line.main(["status"]) == 0 and "nothing to show" in capsys.readouterr().out
    assert command_line.main(["top"]) == 1 and "name the workers" in capsys.readouterr().err
    dr.init_master_worker(world_size=2, session="day")
    torch.ones(3, device=REMOTE).sum().item()
    assert command_line.main(["status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == "worker host pid up doing queued CPU memory free".split()
    assert [line.rpartition("/worker-")[2].split()[1] for line in shown[-2:]] == ["day", "day"]
    assert command_line.main(["top", "--times", "2"]) == 0
    assert capsys.readouterr().out.count("memory free") == 2
    assert command_line.main(["stacks", "1", "--session", "day"]) == 0
    assert "thread executor" in capsys.readouterr().out
    assert command_line.main(["stacks", "5"]) == 1 and "0 is ipc://" in capsys.readouterr().err
    dr.detach()
    # The workers hear of it a moment later.
    until(lambda: command_line.main(["sessions"]) == 0 and "2 of 2   none for" in capsys.readouterr().out)
    assert command_line.main(["sessions", "--end", "day"]) == 0
    assert capsys.readouterr().out == "the session 'day' has ended, on 2 nodes\n"
    assert named_sessions.names() == []


def test_a_look_and_a_resumption_are_no_strangers_to_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    dr.init_master_worker(world_size=1, session="day", quiet=False)
    assert capsys.readouterr().out.endswith('began session "day"\n')
    worker = active_session().workers.of(active_session().nodes[0])
    assert worker is not None
    for look in (["sessions"], ["status"], ["stacks", "0"], ["status"]):
        assert command_line.main(look) == 0
    dr.detach()
    dr.init_master_worker(session="day", resume=True)
    torch.ones(3, device=REMOTE).sum().item()
    assert "begins" in worker.last_lines(50) and "refused" not in worker.last_lines(50)


def holds(address: str) -> None:
    """Child: the master of a session that is in use."""
    dr.init_master_worker(workers=[address], session="held", quiet=True)
    print("begun", flush=True)
    time.sleep(600)


def test_a_session_in_use_ends_by_force(daemon: ListeningWorker, capsys: pytest.CaptureFixture[str]) -> None:
    with Child(holds, daemon.address) as child:
        child.expect("begun")
        assert command_line.main(["sessions", "--end", "held"]) == 1
        said = capsys.readouterr().err
        assert f"in use, by pid {child.pid} on" in said and "--force ends it" in said and "force=" not in said
        assert command_line.main(["sessions", "--end", "held", "--force"]) == 0
    assert "has ended, on 1 node" in capsys.readouterr().out
    assert named_sessions.names() == []


def test_what_is_not_noted_cannot_be_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["sessions", "--end", "nope"]) == 1
    said = capsys.readouterr().err
    assert "no session 'nope' is noted here: there is none" in said and "resume" not in said


def _killed() -> None:
    """Begin a session on this machine, leave it, and kill its workers."""
    dr.init_master_worker(world_size=2, session="gone")
    pids = [node.pid for node in dr.nodes()]
    dr.detach()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    entry = named_sessions.read("gone")
    assert entry is not None
    until(lambda: all(refuses(address) for address in entry.workers))


@pytest.mark.parametrize("arguments", [["status"], ["sessions"], ["sessions", "--end", "gone"]])
def test_the_note_of_a_session_whose_workers_have_died_is_dropped(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _killed()
    command_line.main(arguments)
    said = capsys.readouterr().err
    assert "the session 'gone' has ended: nobody listens at ipc://" in said and "protocol" not in said
    assert "Its note is dropped" in said and named_sessions.names() == []


def test_a_note_of_a_worker_elsewhere_is_kept_until_force_drops_it(
    daemon: ListeningWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    dr.init_master_worker(workers=[daemon.address], session="far")
    dr.detach()
    daemon.stop()
    assert command_line.main(["status"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(" no worker of the session 'far' answers") and said.count("\n") == 1
    assert command_line.main(["sessions"]) == 0 and "unknown: no answer" in capsys.readouterr().out
    assert command_line.main(["sessions", "--end", "far"]) == 1
    assert "sessions --end far --force` drops its note" in capsys.readouterr().err
    assert command_line.main(["sessions", "--end", "far", "--force"]) == 0
    assert named_sessions.names() == []


def test_a_stranger_who_asks_on_and_on_costs_a_session_nothing(daemon: ListeningWorker) -> None:
    dr.init_master_worker(workers=[daemon.address])
    x = torch.ones(3, device=REMOTE)
    with Observer([daemon.address]) as observer:
        for _ in range(20):
            (stacks,) = observer.ask(AskStacks, 30.0)
            assert stacks.value is not None and len(stacks.value) <= 1 << 18
            assert (x + 1).sum().item() == 6.0


def test_an_operator_runs_since_the_last_look_that_has_found_another() -> None:
    stream = Stream(0, torch.device("cpu"))
    progress = Progress(cast(State, None), ())
    stream.started = time.monotonic() - 100
    assert progress._seconds(stream, 5) >= 100
    assert progress._seconds(stream, 9) < 50
    again = progress._seconds(stream, 9)
    assert again <= progress._seconds(stream, 9) < 50
    # The next segment has begun.
    stream.started = time.monotonic()
    assert progress._seconds(stream, 9) < again + 50


def test_a_gpu_that_fails_does_not_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Devices):
        def _row_of(self, name: str, device: torch.device) -> DeviceRow:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    def untold(device: object) -> int:
        raise Exception("Not Supported")

    devices = Broken()
    devices.names = ["cpu", "cuda:0"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "utilization", untold)
    report = Reporter(devices, {}, "tcp://here:1").report()
    assert report.busy == [None, None]
    assert [row.name for row in report.devices] == ["cpu", "cuda:0"]
    assert report.devices[1].description == "unusable: CUDA error: an illegal memory access was encountered"


def test_what_a_worker_says_cannot_steer_a_terminal() -> None:
    row = SessionRow("day", "\x1b[2J", 7, True, None, 1.0, 0, 0, "\x1b]0;all is well\a", 1.0)
    worker = WorkerReport("\x1b[31m", 7, "", "", "", "", 1.0, False, 0.0, [], [], [row])
    answers = [Answer("tcp://gpu1:29400", worker), Answer("tcp://gpu2:29400", None, "\x1b[2J gone")]
    assert "?[2J" in report(answers)
    assert all(c == "\n" or c.isprintable() for c in report(answers))
    assert table_text([["a", "b"], ["\x1b[2J", "c\nd"]]) == " a     b\n ?[2J  c d"
