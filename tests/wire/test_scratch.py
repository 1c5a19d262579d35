"""Folders in the temporary folder: those whose owners have died go, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from distruntime.wire import scratch
from processes import Child

if sys.platform != "linux":
    pytest.skip("which start of the machine a folder is of is known on Linux only", allow_module_level=True)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_SHORT", str(tmp_path))


def left(folder: Path, machine: str = "", start: str = "") -> Path:
    """Make a folder as a process leaves it that was killed."""
    marks = scratch._marks()
    made = folder / f"distruntime-data-{machine or marks[0]}{start or marks[1]}-{os.urandom(4).hex()}"
    made.mkdir(mode=0o700)
    (made / "socket").touch()
    return made


def test_a_folder_is_private_and_its_owner_keeps_and_removes_it() -> None:
    made = scratch.scratch_folder("session", sockets=True)
    assert made.stat().st_mode & 0o777 == 0o700
    scratch.sweep()
    assert made.exists()
    scratch.remove(made)
    assert not made.exists() and made not in scratch._held


@pytest.mark.parametrize("of", ["this start", "an earlier start"])
def test_what_nobody_owns_goes(tmp_path: Path, of: str) -> None:
    found = left(tmp_path, start="" if of == "this start" else "aaaaaa")
    scratch.sweep()
    assert not found.exists()


def test_a_folder_that_was_just_being_removed_goes(tmp_path: Path) -> None:
    found = left(tmp_path)
    gone = found.rename(f"{found}.gone")
    scratch.sweep()
    assert not gone.exists()


def test_another_machines_folder_stays(tmp_path: Path) -> None:
    """It may have an owner there: locks of folders are each machine's own, on NFS too."""
    found = left(tmp_path, "aaaaaa", "bbbbbb")
    scratch.sweep()
    assert (found / "socket").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    found = left(tmp_path)
    os.chown(found, 65534, 65534)
    scratch.sweep()
    assert (found / "socket").exists() and not scratch.hold(found)


def test_links_files_and_other_names_stay(tmp_path: Path) -> None:
    target, name = tmp_path / "mine", left(tmp_path).name
    scratch.sweep()
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / name).symlink_to(target)
    (tmp_path / f"{name}.gone").write_text("a file", encoding="utf-8")
    others = [
        tmp_path / other for other in ("distruntime-things", f"{name}-2", "distruntime-data-abc-12345678")
    ]
    for other in others:
        other.mkdir()
    scratch.sweep()
    assert (target / "precious").exists() and (tmp_path / name).is_symlink()
    assert (tmp_path / f"{name}.gone").is_file() and all(other.exists() for other in others)
    assert not any(map(scratch.hold, [tmp_path / name, *others]))


def test_a_folder_stays_until_the_last_of_its_owners_has_died() -> None:
    made = scratch.scratch_folder("ssh", outlives=True)
    words = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[scratch.lock_of(made)])
    scratch.let_go(made)
    scratch.sweep()
    assert made.exists()
    assert scratch.hold(made)
    child.kill()
    child.communicate()
    scratch.sweep()
    assert made.exists()
    scratch.let_go(made)
    scratch.sweep()
    assert not made.exists()


def owner(folder: str, fork: bool) -> None:
    """Own two folders, one of which stays at an orderly end, and say which they are."""
    tempfile.tempdir = folder
    print(scratch.scratch_folder("run"))
    print(scratch.scratch_folder("ssh", outlives=True), flush=True)
    if fork and os.fork() == 0:
        # As a forked process ends that ends in an orderly way.
        scratch.remove_own()
        os._exit(0)
    if fork:
        os.wait()
        print("forked", flush=True)
    if input() == "wait":
        signal.pause()


def test_a_killed_owners_folders_go(tmp_path: Path) -> None:
    with Child(owner, str(tmp_path), True) as child:
        made = [Path(child.line(90)) for _ in range(2)]
        assert child.line() == "forked"
        scratch.sweep()
        assert all(folder.exists() for folder in made)
        os.kill(child.pid, signal.SIGKILL)
        assert child.gone(60)
    scratch.sweep()
    assert not any(folder.exists() for folder in made)


def test_an_owner_that_ends_removes_what_is_its_own(tmp_path: Path) -> None:
    with Child(owner, str(tmp_path), False) as child:
        made = [Path(child.line(90)) for _ in range(2)]
        child.tell("end")
        child.finish()
    assert [folder.exists() for folder in made] == [False, True]
    scratch.sweep()
    assert not made[1].exists()


def test_sweeps_take_no_folder_from_its_maker() -> None:
    """A sweep may come between a folder and its lock: the maker makes another one then."""
    over, taken = threading.Event(), list[Path]()

    def sweep() -> None:
        while not over.is_set():
            scratch.sweep()

    def make() -> None:
        for _ in range(200):
            made = scratch.scratch_folder("data")
            if not made.is_dir():
                taken.append(made)
            scratch.remove(made)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    makers = [threading.Thread(target=make) for _ in range(2)]
    for thread in [*sweepers, *makers]:
        thread.start()
    for thread in makers:
        thread.join()
    over.set()
    for thread in sweepers:
        thread.join()
    assert taken == []


def test_a_folder_for_sockets_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(scratch, "_SHORT", "/tmp")
    short, usual = scratch.scratch_folder("data", sockets=True), scratch.scratch_folder("data")
    try:
        assert short.parent == Path("/tmp") and usual.parent == deep
    finally:
        scratch.remove(short)
        scratch.remove(usual)


def test_where_there_are_no_locks_folders_are_made_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    made = scratch.scratch_folder("data")
    scratch.let_go(made)
    scratch.sweep()
    assert made.exists()


def owner_of(folder: str) -> None:
    """The child: own a folder that other machines see, and wait."""
    Path(folder).mkdir()
    scratch.own_shared(Path(folder))
    print("owns", flush=True)
    input()


def test_a_folder_that_machines_share_goes_once_its_owner_is_killed(tmp_path: Path) -> None:
    base = tmp_path / "launch"
    scratch.sweep_shared(base)
    base.mkdir()
    # A machine of an allocation sees the launches of others there, and what else is there.
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "owner").write_text("another machine", encoding="ascii")
    (base / "nobody's").mkdir()
    with Child(owner_of, str(base / "job")) as child:
        child.expect("owns")
        scratch.sweep_shared(base)
        assert (base / "job").is_dir()
        os.kill(child.pid, signal.SIGKILL)
        assert child.gone(60)
    scratch.sweep_shared(base)
    assert {path.name for path in base.iterdir()} == {"elsewhere", "nobody's"}


def test_a_folder_that_machines_share_goes_with_its_owner(tmp_path: Path) -> None:
    with Child(owner_of, str(tmp_path / "job")) as child:
        child.expect("owns")
        child.tell()
        child.finish()
    assert not (tmp_path / "job").exists()
