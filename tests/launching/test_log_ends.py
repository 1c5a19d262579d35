"""The ends of workers' logs: what is shown, and that a log of a worker elsewhere does not grow for ever."""

from __future__ import annotations

import base64
import os
from functools import partial
from pathlib import Path

import pytest

from distruntime.launching import log_ends, programs, ray_actors, ssh_agent
from distruntime.launching.log_ends import Tails, cut, last_lines
from distruntime.launching.programs import start_program
from distruntime.session.launcher import LaunchSpec
from distruntime_worker.machine import own_log
from processes import until

MOST, KEPT = 5000, 100


def fill(path: Path, first: int, count: int) -> None:
    """Append lines of 10 bytes."""
    with path.open("ab") as file:
        file.writelines(f"line {k:04}\n".encode() for k in range(first, first + count))


def test_the_lines_of_each_worker_say_whose_they_are(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("of an earlier launch\n", encoding="utf-8")
    shown = list[str]()
    tails = Tails(tmp_path, 2, routine=False, show=shown.append)
    with (
        (tmp_path / "worker-0.log").open("a", encoding="utf-8") as one,
        (tmp_path / "worker-1.log").open("w", encoding="utf-8") as two,
    ):
        print("2026-11-23 10:00:00,1 INFO distruntime.worker: dialling", file=one)
        print("half", end="", file=one, flush=True)
        print("whole", file=two, flush=True)
        tails.look()
        assert shown == ["[worker 1] whole"]
        print(" a line", file=one)
        print("2026-11-23 10:00:00,1 WARNING distruntime.worker: hot", end="", file=two)
    tails.look(last=True)
    assert shown[1:] == [
        "[worker 0] half a line",
        "[worker 1] 2026-11-23 10:00:00,1 WARNING distruntime.worker: hot",
    ]


def test_the_last_lines_stay_where_a_log_has_grown_large(tmp_path: Path) -> None:
    log = tmp_path / "worker-3.log"
    fill(log, 0, 500)
    assert not cut(log, MOST, KEPT)
    fill(log, 500, 500)
    assert cut(log, MOST, KEPT) and not cut(log, MOST, KEPT)
    first, *rest = log.read_text(encoding="utf-8").splitlines()
    assert first == "(what was before this was removed: 0 MiB)"
    assert rest == [f"line {k:04}" for k in range(991, 1000)]
    assert last_lines(log, 2) == "line 0998\nline 0999"
    assert not cut(tmp_path / "nothing.log", MOST, KEPT)


@pytest.mark.parametrize("more", [0, 3, 100])
def test_each_line_is_shown_once_though_its_log_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    # Fewer bytes than stay.
    monkeypatch.setattr(log_ends, "_KNOWN", KEPT // 2)
    log, shown = tmp_path / "worker-0.log", list[str]()
    tails = Tails(tmp_path, 1, routine=True, show=shown.append)
    fill(log, 0, 1000)
    tails.look()
    fill(log, 1000, more)
    assert cut(log, MOST, KEPT)
    fill(log, 1000 + more, 2)
    tails.look()
    lines = [int(line.rpartition(" ")[2]) for line in shown if "line" in line]
    assert lines[:1000] == list(range(1000)) and lines == sorted(set(lines))
    # All that the log still has.
    assert lines[-min(more + 2, 11) :] == list(range(1000 + more + 2 - min(more + 2, 11), 1000 + more + 2))


def test_the_log_of_a_worker_behind_a_program_is_cut_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "cut", partial(cut, most=MOST, kept=KEPT))
    write = "k=0; while :; do echo line $k; k=$((k + 1)); [ $((k % 500)) = 0 ] && sleep 0.01; done"
    spec = LaunchSpec(
        node=2,
        directory=tmp_path,
        master="tcp://127.0.0.1:1",
        listen="",
        key=None,
        insecure=False,
        threads=0,
        simulate_cuda=0,
        environment={},
    )
    worker = start_program("srun", ["sh", "-c", write], spec, os.environ, ends=True)
    try:
        until(lambda: worker.poll() is not None or "was removed" in head(worker.log))
        assert worker.poll() is None
        until(lambda: worker.last_lines(1).startswith("line "))
    finally:
        worker.stop()


def head(log: Path) -> str:
    with log.open("rb") as file:
        return file.read(100).decode()


def test_a_worker_below_an_actor_of_ray_cuts_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "scratch_folder", lambda kind: tmp_path)
    host = ray_actors.Host(["--log-level", "nonsense"], {}, b"")
    # This closes its pipe.
    with host._process:
        assert host.wait() == "exited with code 2" and "nonsense" in host.last_lines(5)
    (log,) = tmp_path.iterdir()
    with log.open("ab") as file:
        file.write(b"line\n" * 2000)
        assert own_log.cut(file.fileno(), MOST, KEPT)


def test_a_log_that_ssh_has_brought_here_begins_anew_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, log = list[dict[str, object]](), tmp_path / "log"
    monkeypatch.setattr(ssh_agent, "MOST", MOST)
    monkeypatch.setattr(ssh_agent, "say", lambda **news: said.append(news))
    log.write_text("listening on tcp://127.0.0.1:4321, and so on\n", encoding="utf-8")
    (tmp_path / "pid").write_text("7", encoding="utf-8")

    def look(agent: ssh_agent.Agent) -> str:
        said.clear()
        agent.look()
        return "".join(base64.b64decode(str(one["log"])).decode() for one in said if "log" in one)

    agent = ssh_agent.Agent()
    agent.folder = str(tmp_path)
    assert look(agent) == log.read_text(encoding="utf-8") and said[0]["port"] == 4321
    fill(log, 0, 600)
    assert look(agent).count("line") == 600
    assert log.stat().st_size == 0 and said[-1] == {"log": "", "offset": 0}
    log.write_text("listening on tcp://127.0.0.1:666, a function says\n", encoding="utf-8")
    # The connection broke, and the master had heard of no beginning.
    later = ssh_agent.Agent()
    later.act({"do": "watch", "folder": str(tmp_path), "offset": 6046, "lasting": True, "sshd": os.getppid()})
    assert look(later) == log.read_text(encoding="utf-8")
    assert said[0]["port"] == 4321 and said[0]["pid"] == 7
