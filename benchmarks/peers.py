"""What others do with the same work: `python -m benchmarks.peers [--rounds 3] [--picture FILE]`.

Each system has one worker process on this machine, and a process of its own here, one after the other, in
rounds; the median of the rounds counts. The systems come with `pip install distruntime[peers]`. One that is
not installed, or that cannot do a row, says so in its cell.

Each does as many as take a quarter of a second, and waits for the last one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .harness import ROOT
from .peer_systems import ROWS, SYSTEMS, Row

# A figure is made of so many seconds at least, and the rows of one system take so many at most.
_LONG, _PATIENCE = 0.25, 300


def _seconds(work: Callable[[int], object]) -> float:
    """Return the seconds of one, of so many as take long enough."""
    times = 1
    while True:
        began = time.perf_counter()
        work(times)
        took = time.perf_counter() - began
        if took >= _LONG:
            return took / times
        times *= 2


def child(name: str) -> None:
    """Print one system's seconds by row, or why it has none: a line for each row."""
    torch.set_num_threads(1)
    with SYSTEMS[name]() as works:
        for row in ROWS:
            if row not in works:
                continue
            try:
                # A program is recorded three times before it is replayed.
                for _ in range(4):
                    works[row](1)
                found: object = _seconds(works[row])
            except Exception as error:  # whatever another system raises is its cell
                found = f"{type(error).__name__}: {error}"
            print(json.dumps([row.name, found]), flush=True)


def _measured(name: str) -> dict[str, float | str]:
    # Monarch's workers import this package by its path.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # torch's RPC sends a class by its module's name.
    command = [sys.executable, "-c", "import sys, benchmarks.peers as p; p.child(sys.argv[1])", name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        printed, complaint = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        printed = output.decode() if isinstance(output, bytes) else output
        complaint = f"not done after {_PATIENCE} s"
    rows = dict(json.loads(line) for line in printed.splitlines() if line.startswith("["))
    if not rows:
        lines = complaint.strip().splitlines() or ["nothing printed"]
        print(f"{name} is not measured: {lines[-1]}", file=sys.stderr)
    return rows


def _middle(found: Sequence[dict[str, float | str]], row: Row) -> float | str:
    cells = [rows[row.name] for rows in found if row.name in rows]
    figures = [cell for cell in cells if isinstance(cell, float)]
    if figures:
        return statistics.median(figures)
    return str(cells[0]) if cells else ""


def _figure(value: float) -> str:
    """Return three digits of a figure, with no exponent."""
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def _table(cells: dict[str, dict[Row, float | str]]) -> str:
    def shown(row: Row, value: float | str) -> str:
        if isinstance(value, str):
            return "fails" if value else ""
        return f"{_figure(value * row.scale)} {row.unit}"

    lines = ["| | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for row in ROWS:
        lines.append(f"| {row.name} | " + " | ".join(shown(row, by[row]) for by in cells.values()) + " |")
    return "\n".join(lines)


def _draw(cells: dict[str, dict[Row, float | str]], file: Path, caption: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, (len(ROWS) + 1) // 2, figsize=(10, 5.2), layout="constrained")
    for axis, row in zip(axes.flat, ROWS):
        bars = {name: by[row] for name, by in cells.items() if isinstance(by[row], float)}
        names, values = [*reversed(bars)], [float(bars[name]) * row.scale for name in reversed(bars)]
        colors = ["#d1495b" if name in ("distruntime", "as a program") else "#8d99ae" for name in names]
        drawn = axis.barh(names, values, color=colors)
        axis.bar_label(drawn, [*map(_figure, values)], padding=3, fontsize=8)
        axis.set(xscale="log", title=row.name, xlabel=row.unit)
        axis.set_xlim(min(values) / 2, max(values) * 8)
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> int:
    """Measure what is installed, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="also draw the table into this file")
    parser.add_argument("--only", nargs="*", choices=[*SYSTEMS], help="measure these systems only")
    asked = parser.parse_args()
    from .__main__ import machine

    caption = f"{datetime.date.today()}, {machine()}, load {os.getloadavg()[0]:.1f}, {asked.rounds} rounds"
    print(caption + "\n", flush=True)
    names = asked.only or [*SYSTEMS]
    found: dict[str, list[dict[str, float | str]]] = {name: [] for name in names}
    for _ in range(asked.rounds):
        for name in names:
            found[name].append(_measured(name))
    cells = {name: {row: _middle(rows, row) for row in ROWS} for name, rows in found.items() if any(rows)}
    print(_table(cells))
    for name, by in cells.items():
        for row, value in by.items():
            if isinstance(value, str) and value:
                print(f"\n{name} cannot do {row.name!r}: {value.splitlines()[0]}")
    if asked.picture:
        _draw(cells, asked.picture, caption)
    return 0


if __name__ == "__main__":
    sys.exit(main())
