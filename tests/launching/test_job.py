"""What becomes of a launch whose workers end, whose launcher fails, or whose time is over."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.launch import address, from_file, from_names
from distruntime.launching.job import Job, Meeting, run
from distruntime.launching.script import command


class Worker(dr.workers.WorkerProcess):
    """A worker that has ended after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.stopped = looks, False

    @property
    def pid(self) -> int:
        return 4711

    def poll(self) -> str | None:
        self.looks -= 1
        return "exited with code 3" if self.looks < 0 else None

    def last_lines(self, count: int = 20) -> str:
        return "no GPU here"

    def terminate(self) -> None:
        pass

    def stop(self, timeout: float = 5.0) -> None:
        self.stopped = True

    def leave(self) -> None:
        pass


class Workers(dr.workers.Launcher):
    def __init__(self, looks: int = 1_000_000, fails: str = "") -> None:
        self.looks, self.fails, self.started = looks, fails, list[tuple[dr.workers.LaunchSpec, Worker]]()

    def start(self, spec: dr.workers.LaunchSpec) -> Worker:
        if self.fails:
            raise dr.errors.ConnectionFailed(self.fails)
        self.started.append((spec, Worker(self.looks)))
        return self.started[-1][1]


def job(
    folder: Path, launcher: dr.workers.Launcher, words: list[str], said: list[str], restarts: int = 3
) -> Job:
    spec = dr.workers.LaunchSpec(0, "tcp://a:1", "", None, False, 1, 0, {}, folder, workers=2, once=False)
    return Job(
        launcher, Meeting("tcp://0.0.0.0:1", "tcp://a:1", None, 2), spec, restarts, words, False, said.append
    )


def test_workers_that_end_again_and_again_end_the_launch(tmp_path: Path) -> None:
    said, launcher = list[str](), Workers(looks=0)
    assert run(job(tmp_path, launcher, ["sleep", "1000"], said, restarts=2), os.environ) == 1
    assert len(launcher.started) == 4 and all(worker.stopped for _, worker in launcher.started)
    assert said[0] == (
        "worker 0 (pid 4711) exited with code 3. Another one starts in its place, and 1 more may; its last "
        "lines:\n  no GPU here"
    )
    assert said[-1] == (
        "worker 0 (pid 4711) exited with code 3, and --max-restarts 2 allows no other in its place; its last "
        "lines:\n  no GPU here\nThe script is ended"
    )


def test_a_launcher_that_fails_ends_the_launch_with_its_error(tmp_path: Path) -> None:
    said = list[str]()
    assert run(job(tmp_path, Workers(fails="nobody listens"), ["sleep", "1000"], said), os.environ) == 1
    assert said == ["ConnectionFailed: nobody listens"]


def test_the_script_hears_where_its_workers_are(tmp_path: Path) -> None:
    launcher = Workers()
    shown = tmp_path / "shown"
    words = ["sh", "-c", f"echo $DISTRUNTIME_LISTEN $DISTRUNTIME_WORLD_SIZE $DISTRUNTIME_KEY > '{shown}'"]
    done = job(tmp_path, launcher, words, [])
    done.meeting = Meeting("tcp://0.0.0.0:1", "tcp://a:1", tmp_path / "key", 2)
    assert run(done, os.environ) == 0
    assert shown.read_text(encoding="utf-8") == f"tcp://0.0.0.0:1 2 {tmp_path}/key\n"
    assert [spec.node for spec, _ in launcher.started] == [0, 1]
    assert launcher.started[1][0].arguments()[:4] == ["--master", "tcp://a:1", "--node", "1"]
    assert "--once" not in launcher.started[1][0].arguments()


def test_before_its_time_is_over_the_script_gets_sigterm(tmp_path: Path) -> None:
    said, again = list[str](), list[str]()
    # The script itself tells the launch, as the scheduler does.
    trap = f"trap 'exit 5' TERM; kill -USR1 {os.getpid()}; while :; do sleep 0.02; done"
    todo = job(tmp_path, Workers(), ["sh", "-c", trap], said)
    todo.before_limit = lambda: again.append("queued")
    assert run(todo, os.environ) == 5
    assert again == ["queued"] and said == ["the time is nearly over: the script gets SIGTERM"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_what_a_script_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    assert command([script, "-x"], module=False, program=False) == [sys.executable, script, "-x"]
    assert command(["a.b", "-x"], module=True, program=False) == [sys.executable, "-m", "a.b", "-x"]
    assert command(["repl"], module=False, program=False) == [sys.executable, "-m", "distruntime", "repl"]
    assert command(["sleep", "1"], module=False, program=True) == ["sleep", "1"]
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"got the script 'nothing\.py', and there is no such"
    ):
        command(["nothing.py"], module=False, program=False)
    with pytest.raises(
        dr.errors.ConfigurationError, match="got 'no-such-program' to run, and it cannot be run: No such"
    ):
        run(job(tmp_path, Workers(), ["no-such-program"], []), os.environ)


def test_hosts(tmp_path: Path) -> None:
    assert from_names("gpu1, gpu2") == ["gpu1", "gpu2"]
    file = tmp_path / "hosts"
    file.write_text("# ours\ngpu1 slots=2 max_slots=4\n\nme@gpu2  # new\n", encoding="utf-8")
    assert from_file(file) == ["gpu1", "gpu1", "me@gpu2"]
    file.write_text("gpu1 slots=many\n", encoding="utf-8")
    with pytest.raises(dr.errors.ConfigurationError, match=r"line 1: got 'slots=many', expected slots=N"):
        from_file(file)
    for text in ("", "# none\n"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(dr.errors.ConfigurationError, match="without a machine"):
            from_file(file)
    with pytest.raises(dr.errors.ConfigurationError, match="cannot be read: No such file"):
        from_file(tmp_path / "nothing")
    assert address("gpu1", 0) == "ssh://gpu1" and address("gpu1", 2) == "ssh://gpu1?simulate_cuda=2"
    assert address("tcp://gpu1:29400", 2) == "tcp://gpu1:29400"
