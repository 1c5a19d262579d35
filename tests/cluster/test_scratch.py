"""Folders of local workers: those of killed masters go when the next one is made, and nobody else's."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from distruntime.cluster import scratch
from distruntime.wire.identity import process
from processes import Child, until


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))


def left(folder: Path, owner: object, age: float = 3600.0) -> Path:
    """Make a folder as a master leaves it."""
    made = folder / f"distruntime-{os.urandom(4).hex()}"
    made.mkdir(mode=0o700)
    (made / "owner.json").write_text(json.dumps(owner))
    (made / "worker-0.log").write_text("what it said")
    os.utime(made, (time.time() - age, time.time() - age))
    return made


def dead() -> list[object]:
    machine, pid, _ = process()
    return [machine, pid, "1"]  # another process has its number now


def test_the_folder_of_a_dead_master_goes(tmp_path: Path) -> None:
    gone = left(tmp_path, dead())
    made = scratch.scratch_folder()
    assert not gone.exists() and made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("owner", [process(), ["another machine", 1, "1"], [], "nonsense", {"a": 1}, None])
def test_a_folder_stays_whose_master_is_not_known_to_be_dead(tmp_path: Path, owner: object) -> None:
    kept = left(tmp_path, owner)
    scratch.scratch_folder()
    assert (kept / "worker-0.log").exists()


def test_a_folder_stays_that_has_just_changed_or_is_no_masters(tmp_path: Path) -> None:
    young = left(tmp_path, dead(), age=1.0)
    other = tmp_path / "distruntime-things"
    other.mkdir()
    os.utime(other, (0, 0))
    (tmp_path / "distruntime-notes").write_text("a file")
    scratch.scratch_folder()
    assert young.exists() and other.exists() and (tmp_path / "distruntime-notes").exists()


def test_a_folder_stays_where_a_worker_of_a_named_session_listens(tmp_path: Path) -> None:
    kept = left(tmp_path, dead())
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(kept / "worker-0"))
        worker.listen()
        os.utime(kept, (0, 0))
        scratch.scratch_folder()
        assert kept.exists()
    os.utime(kept, (0, 0))
    scratch.scratch_folder()
    assert not kept.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    kept = left(tmp_path, dead())
    os.chown(kept, 65534, 65534)
    scratch.scratch_folder()
    assert kept.exists()


def master() -> None:
    """Start workers, and wait to be killed."""
    import distruntime as dr

    dr.init_master_worker(world_size=1, quiet=True)
    print("ready")
    signal.pause()


def test_what_a_killed_master_leaves_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    child = Child(master)
    assert child.line(90) == "ready"
    (folder,) = tmp_path.glob("distruntime-*")
    os.kill(child.pid, signal.SIGKILL)
    with child:
        pass
    assert folder.exists()
    os.utime(folder, (0, 0))

    def gone() -> bool:
        scratch.scratch_folder()
        os.utime(folder, (0, 0)) if folder.exists() else None
        return not folder.exists()

    until(gone)
