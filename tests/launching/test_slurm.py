"""Workers in an allocation of Slurm: what Slurm says, what `srun` gets, and a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distruntime as dr
import one_node_slurm
from distruntime.launching.slurm import (
    Allocation,
    SlurmLauncher,
    allocation,
    queue_again,
    tasks,
)
from launches import Launch
from one_node_slurm import OneNodeSlurm
from processes import until


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs that stand for Slurm's. What they get is noted in a file beside them."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def write(folder: Path, name: str, code: str) -> None:
    program = folder / f"{name}.py"
    program.write_text(f"import json, os, sys\n{code}\n", encoding="utf-8")
    # The first line of a script can name no Python whose path has blanks.
    words = shlex.join([sys.executable, str(program)])
    (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    (folder / name).chmod(0o755)


HOSTS = """
assert sys.argv[1:] == ["show", "hostnames", "gpu[1-3]"], sys.argv
print("gpu1", "gpu2", "gpu3", sep=chr(10))
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-3]"}


@pytest.mark.parametrize(
    "text, hosts, found",
    [
        ("2(x3),1", 4, [2, 2, 2, 1]),
        ("4", 1, [4]),
        ("1,2,1", 3, [1, 2, 1]),
        # What is not known is one for each.
        ("", 2, [1, 1]),
        ("2(x3)", 2, [1, 1]),
    ],
)
def test_slurms_numbers_of_tasks(text: str, hosts: int, found: list[int]) -> None:
    assert tasks(text, hosts) == found


def test_an_allocation_has_a_worker_for_each_task_or_each_machine(programs: Path) -> None:
    write(programs, "scontrol", HOSTS)
    assert allocation({}) is None and allocation({"SLURM_JOB_ID": "7"}) is None
    found = allocation({**JOB, "SLURM_TASKS_PER_NODE": "48(x3)"})
    assert found == Allocation("7", ("gpu1", "gpu2", "gpu3"), (1, 1, 1))
    asked = {**JOB, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_GPUS_ON_NODE": "4"}
    found = allocation(asked)
    assert found == Allocation("7", ("gpu1", "gpu2", "gpu3"), (2, 2, 1), 4) and found.count == 5
    assert [found.host(k) for k in range(5)] == [
        ("gpu1", 0, 2),
        ("gpu1", 1, 2),
        ("gpu2", 0, 2),
        ("gpu2", 1, 2),
        ("gpu3", 0, 1),
    ]
    spread = allocation(JOB, workers=4)
    assert spread is not None and spread.workers == (2, 1, 1)
    with pytest.raises(dr.errors.ConfigurationError, match="got -n 2 in an allocation of 3 machines"):
        allocation(JOB, workers=2)


def test_slurms_own_errors_reach_the_user(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(programs, "scontrol", "sys.exit('Invalid job id specified')")
    with pytest.raises(
        dr.errors.ConfigurationError, match="scontrol requeue 7 failed: Invalid job id specified"
    ):
        queue_again("7")
    monkeypatch.setenv("PATH", str(programs / "empty"))
    with pytest.raises(dr.errors.ConfigurationError, match="Slurm's command 'scontrol' is not on the PATH"):
        queue_again("7")


def test_each_worker_is_a_step_on_its_machine_with_its_share_of_the_gpus(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(programs, "srun", "json.dump([sys.argv[1:], dict(os.environ)], open(sys.argv[-1] + '.json', 'w'))")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    launcher = SlurmLauncher(Allocation("7", ("gpu1", "gpu2"), (2, 1), 4))
    for node, host, cards in ((0, "gpu1", "0,2"), (1, "gpu1", "1,3"), (2, "gpu2", None)):
        key = tmp_path / f"key-{node}"
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        spec = dr.workers.LaunchSpec(node, "tcp://login:1", "", key, False, 2, 0, {"A": "b"}, tmp_path)
        worker = launcher.start(spec)
        until(lambda worker=worker: worker.poll() is not None)
        assert worker.poll() == "srun exited with code 0", worker.last_lines()
        words, variables = json.loads((tmp_path / f"key-{node}.json").read_text(encoding="utf-8"))
        assert {"--jobid=7", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"} <= set(words)
        assert words[-len(spec.arguments()) :] == spec.arguments()
        assert variables["A"] == "b" and variables.get("CUDA_VISIBLE_DEVICES") == cards
        # A step that inherited the number of the allocation's tasks would be refused.
        assert "SLURM_NTASKS" not in variables


def test_outside_of_an_allocation_the_launch_says_how_to_get_one(tmp_path: Path) -> None:
    with Launch(tmp_path, "--slurm", "train.py") as launch:
        assert launch.ended() == 2 and "got --slurm outside of an allocation of Slurm" in launch.err


SCRIPT = """
import os
import torch
import distruntime as dr
from distruntime.launching.slurm import SlurmLauncher, allocation
from distruntime.testing import check_launcher
from processes import free_port

with dr.init_master_worker(quiet=True):
    print("nodes", len(dr.nodes()), torch.ones(3, device=dr.place(1)).sum().item(), flush=True)
if os.environ.get("CHECK"):
    del os.environ["DISTRUNTIME_LISTEN"]
    check_launcher(SlurmLauncher(allocation()), listen=f"tcp://127.0.0.1:{free_port()}")
    print("checked", flush=True)
"""
WAITS = """
import signal, sys
import distruntime as dr

signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
session = dr.init_master_worker(quiet=True)
print("computes", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneNodeSlurm]:
    """A real Slurm."""
    if why := one_node_slurm.lacking():
        pytest.skip(why)
    with OneNodeSlurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.mark.slow(reason="starts Slurm's daemons, and nine workers by srun")
def test_in_a_real_allocation(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    inside = (sys.executable, "-m", "distruntime", "launch", "--slurm", "train.py")
    program = ("salloc", "--quiet", "--ntasks=2", "--overcommit")
    with Launch(tmp_path, *inside, program=program, CHECK="1", **slurm.variables) as launch:
        assert launch.ended() == 0, launch.said() + slurm.said()
        assert launch.out.splitlines() == ["nodes 2 3.0", "checked"], launch.said()
        launch.until_nothing_is_left()


@pytest.mark.slow(reason="starts Slurm's daemons, and a batch job twice")
def test_a_job_is_queued_again_before_its_time_is_over(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS, encoding="utf-8")
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```text\n(#!/bin/sh\n#SBATCH .*?)^```\n", page, re.M | re.S)
    launch_here = shlex.join([sys.executable, "-m", "distruntime", "launch"])
    # There is one machine here, and no GPU.
    script = script.replace("distruntime launch", launch_here).replace(
        "--nodes=2 --gpus-per-node=4", "--ntasks=2"
    )
    (tmp_path / "job.sh").write_text(script, encoding="utf-8")
    options = ("--overcommit", "--output=job.log", "job.sh")
    log = tmp_path / "job.log"

    def count(text: str) -> int:
        return log.read_text(encoding="utf-8").count(text) if log.exists() else 0

    with Launch(tmp_path, *options, program=("sbatch",), **slurm.variables) as launch:
        assert launch.ended() == 0, launch.said()
        job = launch.out.rpartition(" ")[2].strip()
        try:
            until(lambda: count("computes") == 1, 90)
            # Slurm sends the signal so, minutes before the limit. Its clock of limits ticks each half minute.
            slurm.ask("scancel", "--batch", "--signal=USR1", job)
            until(lambda: count("saved") == 1, 30)
            assert count("the time is nearly over") == 1
            # Slurm lets a job that was queued again wait for two minutes.
            until(lambda: "JobState=PENDING" in slurm.ask("scontrol", "show", "job", job), 60)
            assert "Requeue=1 Restarts=1" in slurm.ask("scontrol", "show", "job", job)
        except AssertionError:
            print(log.read_text(encoding="utf-8") if log.exists() else "no log", slurm.said())
            raise
        finally:
            slurm.ask("scancel", job)
        launch.until_nothing_is_left()


@pytest.mark.slow(reason="starts Slurm's daemons, and two workers by srun")
def test_kill_9_of_a_launch_in_an_allocation_leaves_nothing(slurm: OneNodeSlurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS, encoding="utf-8")
    pid = tmp_path / "pid"
    inside = f"echo $$ > {pid}; exec {shlex.quote(sys.executable)} -m distruntime launch --slurm train.py"
    program = ("salloc", "--quiet", "--ntasks=2", "--overcommit")
    with Launch(tmp_path, "sh", "-c", inside, program=program, **slurm.variables) as launch:
        launch.until_said("computes")
        os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGKILL)
        launch.ended()
        launch.until_nothing_is_left()
