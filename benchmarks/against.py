"""Measure another commit and this tree in turn: `python -m benchmarks [NAME ...] --against REV`.

Both sides run this tree's benchmarks, since a row would compare two benchmarks otherwise. The product and its
workers are each side's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .harness import ROOT, Figure

TURNS = 2
# A full run of the longest benchmark takes some minutes on two cores.
DEADLINE = 3600.0
HEAD = "| figure | before | after | after / before |\n|---|---|---|---|"


@dataclass
class Side:
    """One side's tree and what was measured there: for each run its figures, or why it cannot run."""

    tree: Path
    runs: list[list[Figure]] = field(default_factory=list)
    failed: str = ""

    def measure(self, name: str, quick: bool) -> None:
        """Run a benchmark there once more, unless it has failed."""
        if self.failed:
            return
        try:
            self.runs.append(_figures(self.tree, name, quick))
        except RuntimeError as error:
            self.failed = str(error).replace("|", "/")

    def cell(self, figure: str) -> tuple[str, float | None]:
        """Return the cell of a figure and its median, None where there is none."""
        found = [one for run in self.runs for one in run if one.name == figure]
        if self.failed or not found:
            return (f"cannot run: {self.failed}" if self.failed else "no such figure"), None
        median = statistics.median(one.value for one in found)
        each = ", ".join(f"{one.value:.2f}" for one in found)
        return f"{median:.2f} {found[0].unit} ({each})", median


def rows(name: str, before: Side, after: Side) -> Iterator[str]:
    """Return a benchmark's rows, in this tree's order; those that only the other tree has are last."""
    figures = dict.fromkeys(one.name for side in (after, before) for run in side.runs for one in run)
    for figure in figures or {f"{name}: nothing measured": None}:
        (left, old), (right, new) = before.cell(figure), after.cell(figure)
        ratio = "" if new is None or not old else f"{new / old:.2f}"
        yield f"| {figure} | {left} | {right} | {ratio} |"


def compare(names: list[str], known: tuple[str, ...], revision: str, quick: bool) -> bool:
    """Print the rows as they are measured; return whether each benchmark has run in this tree."""
    failed = False
    with _beside(revision) as (tree, there):
        print(HEAD, flush=True)
        for name in names:
            before, after = Side(tree), Side(ROOT)
            for _ in range(TURNS):
                before.measure(name, quick)
                after.measure(name, quick)
            if name not in there:
                print(f"| {name}: this benchmark is new | not in {revision}, run with its product | | |")
            print("\n".join(rows(name, before, after)), flush=True)
            failed |= bool(after.failed)
        for name in sorted(there - set(known)):
            print(f"| {name}: this benchmark is gone | only in {revision}, not run | | |")
    return not failed


def commit(revision: str) -> str:
    """Return a revision's commit and subject; raises ValueError with git's words if there is none."""
    done = _git("log", "-1", "--format=%h, %s", "--end-of-options", revision, "--")
    if done.returncode:
        raise ValueError(
            f"--against takes a commit of this repository, got {revision!r}: {done.stderr.strip()}"
        )
    return done.stdout.strip()


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)


@contextlib.contextmanager
def _beside(revision: str) -> Iterator[tuple[Path, set[str]]]:
    """Check a commit out beside this tree, with this tree's benchmarks; give its folder and the names of the
    benchmarks that it had.
    """
    with tempfile.TemporaryDirectory(prefix="distruntime-bench-") as name:
        tree = Path(name).resolve() / "before"
        try:
            done = _git("worktree", "add", "--detach", "--quiet", str(tree), revision)
            if done.returncode:
                raise RuntimeError(f"git cannot check {revision} out at {tree}: {done.stderr.strip()}")
            folder = tree / "benchmarks"
            there = {
                one.stem
                for one in folder.glob("*.py")
                if "\ndef measure(quick: bool)" in one.read_text(encoding="utf-8")
            }
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(ROOT / "benchmarks", folder, ignore=shutil.ignore_patterns("__pycache__"))
            yield tree, there
        finally:
            if tree.exists():
                done = _git("worktree", "remove", "--force", str(tree))
                if done.returncode:
                    print(f"git worktree remove {tree}: {done.stderr.strip()}", file=sys.stderr)


def _figures(tree: Path, name: str, quick: bool) -> list[Figure]:
    """Run one benchmark with a tree's product in a process of its own; raises RuntimeError if it cannot."""
    path = os.pathsep.join([str(tree), str(tree / "worker"), os.environ.get("PYTHONPATH", "")])
    # Ctrl-C reaches this process only, and the child hears of it once: a second would cut its endings off.
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", name, "--json", *(["--quick"] if quick else [])],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {DEADLINE:.0f} s") from None
    finally:
        _end(process)
    lines = [line for line in out.splitlines() if line.startswith('{"benchmark"')]
    # A figure on the wrong side of its bar ends with status 1, too, so the line counts.
    if not lines:
        print(errors, file=sys.stderr)
        why = [line.strip() for line in errors.splitlines() if line.strip()]
        raise RuntimeError(why[-1] if why else f"ended with status {process.returncode}")
    found = json.loads(lines[-1])
    if Path(found["tree"]) != tree.resolve():
        raise RuntimeError(f"it measured the product in {found['tree']}, not the one in {tree}")
    return [Figure(**one) for one in found["figures"]]


def _end(process: subprocess.Popen[str]) -> None:
    """End a child that is still running, and its workers with it."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
