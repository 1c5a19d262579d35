"""`python -m benchmarks --against REV` measures two commits in turn. No time is asserted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.against import HEAD, Side, rows
from benchmarks.harness import Figure

ROOT = Path(__file__).resolve().parents[1]

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares commits: needs a clone with git")


@contextlib.contextmanager
def _against(scratch: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a comparison that makes its folder in `scratch`, and see that nothing is left there or in git."""
    process = subprocess.Popen(
        # A process that a shell has started in the background ignores Ctrl-C, and so would this one.
        [
            sys.executable,
            "-c",
            "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)",
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=90)
    assert list(scratch.glob("distruntime-bench-*")) == []
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert str(scratch) not in listed.stdout


def _side(*runs: list[Figure], failed: str = "") -> Side:
    return Side(ROOT, list(runs), failed)


def test_a_row_has_each_run_and_the_ratio_of_the_medians() -> None:
    first, second = Figure("copy", 2.0, "x", None), Figure("copy", 4.0, "x", 1.0)
    before, after = _side([first], [second]), _side([first], [first])
    assert list(rows("groups", before, after)) == [
        "| copy | 3.00 x (2.00, 4.00) | 2.00 x (2.00, 2.00) | 0.67 |"
    ]


def test_a_row_says_which_side_lacks_it_and_why() -> None:
    old, new = Figure("old", 1.0, "s", None), Figure("new", 2.0, "s", None)
    assert list(rows("scale", _side([old]), _side([new]))) == [
        "| new | no such figure | 2.00 s (2.00) |  |",
        "| old | 1.00 s (1.00) | no such figure |  |",
    ]
    assert list(rows("scale", _side(failed="ImportError: no x"), _side([new]))) == [
        "| new | cannot run: ImportError: no x | 2.00 s (2.00) |  |"
    ]
    assert list(rows("gpu", _side([]), _side([]))) == [
        "| gpu: nothing measured | no such figure | no such figure |  |"
    ]


def test_a_tree_that_cannot_run_a_benchmark_says_why_in_its_row(tmp_path: Path) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("from distruntime import nothing_of_this_name\n", encoding="utf-8")
    side = Side(tmp_path)
    side.measure("operation", True)
    (row,) = rows("operation", side, _side([Figure("operation", 2.0, "x", None)]))
    assert row.startswith("| operation | cannot run: ImportError: cannot import name 'nothing_of_this_name'")
    assert row.endswith(" | 2.00 x (2.00) |  |")


@in_git
@pytest.mark.slow(reason="starts the benchmarks, 3 s")
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with _against(tmp_path, "operation", "--quick", "--against", "HEAD") as process:
        assert process.stdout is not None
        # The table's head is printed once the other commit is there.
        assert any(line.rstrip() == HEAD.splitlines()[-1] for line in process.stdout)
        assert list(tmp_path.glob("distruntime-bench-*/before/distruntime"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors


@in_git
def test_what_is_no_commit_is_said(tmp_path: Path) -> None:
    with _against(tmp_path, "operation", "--against", "no-such-commit") as process:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 2
        assert "--against takes a commit of this repository, got 'no-such-commit'" in errors


@in_git
@pytest.mark.slow(reason="runs a benchmark four times, each with a worker of its own")
@pytest.mark.timeout(600)
def test_a_benchmark_is_measured_in_both_trees(tmp_path: Path) -> None:
    with _against(tmp_path, "operation", "--quick", "--against", "HEAD") as process:
        out, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
    _, before, empty, *table = out.splitlines()
    assert before.startswith("before: ") and before.endswith("; after: this tree") and not empty
    assert table[:2] == HEAD.splitlines()
    name, left, right, ratio = [cell.strip() for cell in table[2].strip("|").split("|")]
    assert name == "operation, drained / empty dispatch"
    for cell in (left, right):
        median, each = cell.split(" x ")
        assert float(median) > 0 and len(each.strip("()").split(", ")) == 2
    assert float(ratio) > 0
    assert len(table) == 3
