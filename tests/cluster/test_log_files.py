"""The logs of workers that are started on this machine: where they are, and how long they stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.cluster import local_workers as log_files
from distruntime.cluster.local_workers import log_folder
from processes import until

REMOTE = "remote"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    dr.shutdown()
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    yield tmp_path / "state"
    dr.shutdown()


def test_the_log_of_a_worker_outlives_its_session(state: Path) -> None:
    for _ in range(2):
        dr.init_master_worker(world_size=2, session="day")
        torch.ones(3, device=REMOTE).sum().item()
        dr.shutdown()
    first, second = (state / "logs").glob("day-*")
    for folder in (first, second):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in folder.iterdir()) == ["worker-0.log", "worker-1.log"]
        until(
            lambda log=folder / "worker-0.log": "session of master day on" in log.read_text(encoding="utf-8")
        )  # type: ignore[misc]


def test_old_folders_go_and_those_of_sessions_that_run_stay(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_KEPT", 2)
    (state / "sessions").mkdir(parents=True)
    (state / "sessions" / "noted.json").write_text("", encoding="utf-8")
    # No process has the second number.
    names = ["noted-a", f"{os.getpid()}-ab-b", "999999999-ab-c", "old-d", "new-e", "newest-f"]
    for age, name in enumerate(reversed(names)):
        (state / "logs" / name).mkdir(parents=True)
        os.utime(state / "logs" / name, (1e9 - age, 1e9 - age))
    made = log_folder("mine", Path("distruntime-g"))
    assert made == state / "logs" / "mine-g"
    assert sorted(path.name for path in (state / "logs").iterdir()) == sorted(
        ["mine-g", "newest-f", f"{os.getpid()}-ab-b", "noted-a"]
    )


def test_without_a_directory_that_can_be_written_the_logs_go_with_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "file"))
    assert log_folder("mine", Path("distruntime-g")) is None
    dr.init_master_worker(world_size=1)
    assert torch.ones(3, device=REMOTE).sum().item() == 3.0
