"""What every benchmark shares: figures with their bars, interleaved measurements, daemons.

A figure is a ratio within one run, against a floor or against the same work done locally; the two sides are
measured in turn and the median of the ratios counts, since a shared machine's mood changes more between
minutes than the two differ.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

ROOT = Path(__file__).parent.parent
P = ParamSpec("P")
T = TypeVar("T")


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


class Beside:
    """A process beside this one that opens no session: functions of modules are called there, one at a time.

    A session gives torch a second kind of accelerator, and then torch computes no gradients on local CUDA
    tensors in that process (issue 161129 of PyTorch). So local training needs another process.
    """

    def __enter__(self) -> Beside:
        # A forked process cannot use CUDA where its parent has.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *raised: object) -> None:
        # It ends by itself when the pipe is closed.
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function there and block for its result, which has no CUDA tensors in it."""
        self._pipe.send_bytes(pickle.dumps((function, args, kwargs)))
        worked, result = pickle.loads(self._pipe.recv_bytes())
        if not worked:
            raise RuntimeError(f"in the process beside this one:\n{result}")
        found: T = result
        return found


def _answer(pipe: Connection) -> None:
    # It ends when the other process does.
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = pipe.recv_bytes()
            try:
                function, args, kwargs = pickle.loads(asked)
                answer = pickle.dumps((True, function(*args, **kwargs)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)


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
