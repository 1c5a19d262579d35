"""Files and folders that travel to a worker and from it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.python import files, sent_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with some files, one of them larger than two parts."""
    made = tmp_path / "data"
    (made / "below" / "deeper").mkdir(parents=True)
    (made / "large.bin").write_bytes(os.urandom(3 << 10) * 3000)
    (made / "below" / "empty").write_bytes(b"")
    (made / "below" / "deeper" / "run.sh").write_text("echo", encoding="utf-8")
    (made / "below" / "deeper" / "run.sh").chmod(0o755)
    (made / "linked").symlink_to(made / "below" / "deeper")
    (made / "below" / "up").symlink_to(made)
    return made


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = (Path(above) / name for above, _, names in os.walk(folder) for name in names)
    return {str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mode & 0o777) for f in found}


def test_a_folder_goes_to_a_worker_and_comes_back(session: object, folder: Path, tmp_path: Path) -> None:
    assert dr.data.push(folder, 1, tmp_path / "there") == str(tmp_path / "there")
    there = contents(tmp_path / "there")
    names = ["large.bin", "below/empty", "below/deeper/run.sh", "linked/run.sh"]
    assert sorted(there) == sorted(names)
    assert there == {name: contents(folder).get(name, there["below/deeper/run.sh"]) for name in names}
    assert there["linked/run.sh"] == (b"echo", 0o755)
    assert dr.data.pull(tmp_path / "there", dr.place(1, "cpu"), to=tmp_path / "back") == str(
        tmp_path / "back"
    )
    assert contents(tmp_path / "back") == there


def test_a_file_goes_under_a_name_of_its_own(session: object, folder: Path, tmp_path: Path) -> None:
    dr.data.push(folder / "large.bin", 0, tmp_path / "new" / "copy.bin")
    dr.data.pull(tmp_path / "new" / "copy.bin", 0, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == (folder / "large.bin").read_bytes()


@pytest.mark.parametrize("way", ["push", "pull"])
def test_what_is_there_does_not_travel_and_what_is_half_there_goes_on(
    session: object, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    moved: list[int] = []

    class Counting(sent_files.Incoming):
        def add(self, data):  # type: ignore[no-untyped-def]
            moved.append(data.numel())
            return super().add(data)

    def upload(part, *args, **kwargs):  # type: ignore[no-untyped-def]
        moved.append(part.numel())
        return real(part, *args, **kwargs)

    real, whole = files.upload, (folder / "large.bin").read_bytes()
    monkeypatch.setattr(files, "upload", upload)
    if way == "pull":
        monkeypatch.setattr(files, "Incoming", Counting)
    go = dr.data.push if way == "push" else dr.data.pull
    target, half = tmp_path / "target.bin", 5 << 20
    part = sent_files._part(str(target), hashlib.sha256(whole).hexdigest())
    Path(part).write_bytes(whole[:half])
    go(folder / "large.bin", 1, target)
    assert sum(moved) == len(whole) - half and target.read_bytes() == whole
    go(folder / "large.bin", 1, target)
    assert sum(moved) == len(whole) - half and not Path(part).exists()
    # A part that is damaged is found at the end, and nothing gets the name.
    target.write_bytes(b"older")
    Path(part).write_bytes(b"?" * half)
    with pytest.raises(OSError, match=r"expected 9216000 bytes with the SHA-256 .* Send it again"):
        go(folder / "large.bin", 1, target)
    assert target.read_bytes() == b"older" and not Path(part).exists()
    go(folder / "large.bin", 1, target)
    assert target.read_bytes() == whole


def test_what_cannot_be_done_says_why(session: object, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        dr.data.push(tmp_path / "nothing", 1)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        dr.data.pull(tmp_path / "nothing", 1)
    with pytest.raises(IsADirectoryError, match="name the file, to="):
        dr.data.push(folder / "large.bin", 1, tmp_path)
    with pytest.raises(OSError, match="/proc"):
        dr.data.push(folder / "large.bin", 1, "/proc/nowhere/large.bin")
    with pytest.raises(dr.errors.PlacementError, match="there is no node 9"):
        dr.data.push(folder, 9)
    with pytest.raises(dr.errors.PlacementError, match="expected the number of a node"):
        dr.data.push(folder, "one")
    with pytest.raises(dr.errors.UsageError, match="expected the path"):
        dr.data.pull(None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../x", "a\0"])
def test_a_worker_puts_no_file_elsewhere(name: str) -> None:
    with pytest.raises(dr.errors.ProtocolError):
        files._require_below((name, 1, 0o600, "0"))
