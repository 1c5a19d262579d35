"""The processes that `mpirun` starts: rank 0 runs the script, and the others are its workers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.launching.job import Meeting
from distruntime.launching.ranks import (
    Rank,
    become_worker,
    join_meeting,
    meeting_folder,
    open_meeting,
    this_rank,
)
from distruntime.wire.keys import KeyPair
from distruntime_worker.options import parser
from launches import Launch
from processes import free_port

_OMPI = "OMPI_COMM_WORLD_RANK"
OPEN_MPI = {
    _OMPI: "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "5",
    "PMIX_NAMESPACE": "395051009",
}


@pytest.mark.parametrize(
    "variables, size, rank",
    [
        (OPEN_MPI, None, Rank(3, 5, True, "395051009", _OMPI)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            None,
            Rank(3, 5, False, "395051009", _OMPI),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None, Rank(0, 2, False, "", "PMI_RANK")),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"},
            None,
            Rank(1, 4, False, "7-2", "SLURM_PROCID"),
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, 3, Rank(2, 3, False, "", "JOB_COMPLETION_INDEX")),
    ],
)
def test_a_rank_is_what_its_starter_says(variables: dict[str, str], size: int | None, rank: Rank) -> None:
    assert this_rank(variables, size) == rank


def test_what_is_no_rank_is_said() -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="nobody has numbered this process"):
        this_rank({})
    with pytest.raises(dr.errors.ConfigurationError, match="got an unknown number of processes"):
        this_rank({"JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(dr.errors.ConfigurationError, match="got 1 processes, expected two or more"):
        this_rank({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"})


def test_ranks_meet_in_a_folder(tmp_path: Path) -> None:
    first = Rank(0, 3, False, "job/1", "PMI_RANK")
    folder = meeting_folder(None, first, tmp_path)
    assert folder == tmp_path / "launch" / "job_1"
    assert meeting_folder(tmp_path / "named", first, tmp_path) == tmp_path / "named"
    with pytest.raises(dr.errors.ConfigurationError, match="nothing that names the job"):
        meeting_folder(None, Rank(0, 3, False, "", "PMI_RANK"), tmp_path)
    other = Rank(1, 3, False, "job/1", "PMI_RANK")
    with pytest.raises(dr.errors.ConnectionFailed, match=r"rank 1 on .* has not found .*address within 0 s"):
        join_meeting(folder, other, 0.0)
    opened = open_meeting(folder, first)
    joined = join_meeting(folder, other, 0.0)
    assert opened.listen.startswith("tcp://0.0.0.0:") and opened.count == 2
    assert (joined.master, joined.key) == (opened.master, opened.key) and joined.key is not None
    assert KeyPair.load(joined.key)
    # All ranks are on this machine, which no other one need reach then.
    alone = open_meeting(folder, Rank(0, 3, True, "job/1", "PMI_RANK"))
    assert alone.listen == alone.master and alone.master.startswith("tcp://127.0.0.1:")


def test_a_worker_takes_its_number_from_its_starter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--master", "tcp://a:1", "--node", "rank"]
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        parser().parse_args(words)
    assert "got 'rank', and none of $OMPI_COMM_WORLD_RANK, $PMI_RANK," in capsys.readouterr().err
    monkeypatch.setenv("PMI_RANK", "4")
    assert parser().parse_args(words).node == 4


def test_a_worker_is_no_rank_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI begins in all ranks or in none, and rank 0 is a script that knows nothing of it."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    got = list[dict[str, str]]()
    monkeypatch.setattr(os, "execve", lambda path, words, environment: got.append(environment))
    become_worker(Meeting("", "tcp://a:1", None, 2), Rank(1, 3, False, "job", _OMPI), [])
    assert "PATH" in got[0] and not OPEN_MPI.keys() & got[0].keys()


SCRIPT = """
import sys, torch
import distruntime as dr

for number in range(2):
    with dr.init_master_worker(quiet=True):
        places = [dr.place(node) for node in range(len(dr.nodes()))]
        values = [torch.full((2,), float(place.node), device=place).sum().item() for place in places]
        print("session", number, values, flush=True)
sys.exit(0)
"""
WAITS = """
import signal
import distruntime as dr

session = dr.init_master_worker(quiet=True)
print("computes", flush=True)
signal.pause()
"""
_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
MPIRUN = (
    "mpirun",
    *_ROOT,
    "--oversubscribe",
    "-n",
    "3",
    sys.executable,
    "-m",
    "distruntime",
    "launch",
    "--mpi",
)

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")


@needs_mpirun
@pytest.mark.slow(reason="two launches of three processes each import torch for themselves")
def test_mpirun_starts_a_script_and_its_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    KeyPair.generate().save(tmp_path / "key")
    where = ("--master", f"tcp://127.0.0.1:{free_port()}", "--key", str(tmp_path / "key"))
    for options in ((), where):
        with Launch(tmp_path, *options, "train.py", program=MPIRUN) as launch:
            assert launch.ended() == 0, launch.said()
            assert launch.out.splitlines() == ["session 0 [0.0, 2.0]", "session 1 [0.0, 2.0]"], launch.said()
            launch.until_nothing_is_left()
    # The key of a launch goes with it.
    assert [path.name for path in (tmp_path / "state" / "launch").iterdir()] == []


@needs_mpirun
@pytest.mark.slow(reason="three processes import torch, each for itself")
def test_kill_9_of_mpirun_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS, encoding="utf-8")
    with Launch(tmp_path, "train.py", program=MPIRUN) as launch:
        launch.until_said("computes")
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.until_nothing_is_left()
