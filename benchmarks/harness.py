"""What every benchmark shares: figures with their bars, interleaved measurements, daemons.

A figure is a ratio within one run, against a floor or against the same work done locally; the two sides are
measured in turn and the median of the ratios counts, since a shared machine's mood changes more between
minutes than the two differ.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Figure:
    """One measured figure. `bar` is the limit it is held to, None where it is shown only; `most` says on
    which side of it is good.
    """

    name: str
    value: float
    unit: str
    bar: float | None
    note: str = ""
    most: bool = True

    @property
    def passed(self) -> bool:
        """Whether the figure is on the good side of its bar."""
        return self.bar is None or (self.value <= self.bar if self.most else self.value >= self.bar)


def row(figure: Figure) -> str:
    """Return a figure as a row of the table."""
    bar = "" if figure.bar is None else f"{'at most' if figure.most else 'at least'} {figure.bar:g}"
    verdict = "" if figure.bar is None else "yes" if figure.passed else "**no**"
    return f"| {figure.name} | {figure.value:.2f} {figure.unit} | {bar} | {verdict} | {figure.note} |"


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the mean seconds of one call."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Measure the two in turn; return the median of the ratios and both medians."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return (
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def daemon(*options: str, address: str = "") -> Iterator[str]:
    """Run `distruntime-worker --listen` on this machine; give its address."""
    where = address or f"tcp://127.0.0.1:{free_port()}"
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "distruntime_worker",
        "--listen",
        where,
        "--threads",
        "1",
        "--log-level",
        "error",
        *options,
    ]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    try:
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        while process.poll() is None:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection((host, int(port)), timeout=10),
            ):
                break
        yield where
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def delayed(address: str, delay: float) -> Iterator[str]:
    """Run the proxy of `benchmarks.delay` before `address`, in a process of its own; give its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.delay", address, str(delay)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(10)
