"""`distruntime launch` on this machine: the script finds its workers, and nothing is left of either."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from launches import Launch
from processes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# It has two sessions, one after the other, and a worker that dies in the second one.
SCRIPT = """
import os, signal, sys
import torch
import distruntime as dr
from processes import until

for number in range(2):
    with dr.init_master_worker(quiet=True):
        nodes = dr.nodes()
        x = torch.ones(3, device="remote").to(node=1)
        print("session", number, len(nodes), x.place, x.sum().item(), flush=True)
        if number:
            os.kill(nodes[1].pid, signal.SIGKILL)
            until(lambda: dr.nodes()[1].pid != nodes[1].pid and dr.nodes()[1].state == "ready")
            print("another", torch.ones(2, device=dr.place(1)).sum().item(), flush=True)
print("words", sys.argv[1:])
sys.exit(7)
"""

# It traps what it gets, and says so.
TRAPS = "trap 'echo got it; exit 9' INT TERM; echo ready; while :; do sleep 0.02; done"


@pytest.mark.slow(reason="starts a script and its workers, 7 s")
def test_a_script_finds_its_workers_and_they_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    with Launch(tmp_path, "-n", "2", "train.py", "--lr", "0.1") as launch:
        assert launch.ended() == 7, launch.said()
        launch.until_nothing_is_left()
        lines = launch.out.splitlines()
    assert lines == [
        "session 0 2 node 1 cpu 3.0",
        "session 1 2 node 1 cpu 3.0",
        "another 2.0",
        "words ['--lr', '0.1']",
    ]
    assert "[launch] worker 1 (pid " in launch.err and "killed by signal 9 (SIGKILL)" in launch.err
    assert "Another one starts in its place, and 2 more may" in launch.err


def test_kill_9_leaves_no_process_behind(tmp_path: Path) -> None:
    with Launch(tmp_path, "-n", "2", "--verbose", "--no-python", "sleep", "1000") as launch:
        launch.until_said("dialling ipc://", 2)
        assert "[worker 0] " in launch.err and "[worker 1] " in launch.err
        # These are the launch, its script, the nursery and two workers.
        assert len(launch.pids()) == 5
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.until_nothing_is_left()


def test_kill_9_leaves_no_process_behind_while_workers_are_about_to_be_forked(tmp_path: Path) -> None:
    with Launch(tmp_path, "-n", "4", "--no-python", "sleep", "1000") as launch:
        # These are the launch, its script, and the nursery, which imports torch now.
        until(lambda: len(launch.pids()) == 3)
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.until_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_script_and_its_exit_code_comes_back(tmp_path: Path, number: int) -> None:
    with Launch(tmp_path, "-n", "1", "--no-python", "sh", "-c", TRAPS) as launch:
        launch.until_said("ready")
        os.kill(launch.process.pid, number)
        assert launch.ended() == 9, launch.said()
        assert launch.out.splitlines() == ["ready", "got it"]
        launch.until_nothing_is_left()


def test_a_script_that_a_signal_ends_gives_the_code_that_a_shell_gives(tmp_path: Path) -> None:
    with Launch(tmp_path, "-n", "1", "--no-python", "sh", "-c", "kill -9 $$") as launch:
        assert launch.ended() == 128 + 9
        launch.until_nothing_is_left()
