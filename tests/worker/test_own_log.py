"""The log of a worker that its master has started is cut where it has grown large, and no other file is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distruntime_worker.machine.own_log import cut

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where output goes to is seen on Linux only")


def written(path: Path, mode: str = "ab", lines: int = 1000) -> tuple[bool, list[bytes]]:
    """Write lines of 10 bytes, cut at 5,000 to 100, and write one more."""
    with path.open(mode, buffering=0) as file:
        for k in range(lines):
            file.write(f"line {k:04}\n".encode())
        was_cut = cut(file.fileno(), 5000, 100)
        file.write(b"after\n")
    return was_cut, path.read_bytes().splitlines()


def test_the_last_lines_stay_and_writing_goes_on(tmp_path: Path) -> None:
    was_cut, lines = written(tmp_path / "worker-3.log")
    assert was_cut and lines[0] == b"(what was before this was removed: 0 MiB)"
    assert lines[1:] == [*(f"line {k:04}".encode() for k in range(991, 1000)), b"after"]


@pytest.mark.parametrize(("name", "mode", "lines"), [
    ("worker-3.log", "ab", 400), ("mine.log", "ab", 1000), ("worker-3.log", "wb", 1000),
])  # fmt: skip
def test_other_files_are_left_alone(tmp_path: Path, name: str, mode: str, lines: int) -> None:
    was_cut, found = written(tmp_path / name, mode, lines)
    assert not was_cut and len(found) == lines + 1
