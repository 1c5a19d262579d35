"""From the command `distruntime launch` to the script's first remote result, and what memory its workers use.

The workers of one machine are forked from a process that has imported torch. The same launch whose workers
are each started anew is measured in turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .floors import import_torch
from .harness import ROOT, Figure

# It tells when its first value is there, then lets every worker compute, says who they are, and waits.
_SCRIPT = """
import signal
import torch
import distruntime as dr

with dr.init_master_worker(quiet=True):
    torch.ones(2, device="remote").sum().item()
    print("first", flush=True)
    pids = [node.pid for node in dr.nodes()]
    dr.fetch([torch.ones(2, device=dr.place(k)).sum() for k in range(len(pids))])
    print(*pids, flush=True)
    signal.pause()
"""
_FORKED = "import sys; from distruntime.__main__ import main; sys.exit(main(sys.argv[1:]))"
# Where no worker can be forked, each is started.
_ANEW = (
    "from distruntime.cluster import local_workers; local_workers.fork_worker = lambda *_, **__: None; "
    + _FORKED
)


@dataclass(frozen=True)
class _Launch:
    """What one launch took: seconds to the first value, seconds to a value of every worker, and bytes."""

    first: float
    all: float
    memory: int

    def __str__(self) -> str:
        return f"{self.first:.1f} s, all workers after {self.all:.1f} s"


def measure(quick: bool) -> list[Figure]:
    """Return the figures of starting."""
    rounds, few, many = (1, 2, 8) if quick else (5, 4, 64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.py").write_text(_SCRIPT, encoding="utf-8")
        # The first one reads files that the next ones find in memory.
        _launch(folder, few, _FORKED)
        floors: list[float] = []
        forked: list[_Launch] = []
        anew: list[_Launch] = []
        for _ in range(rounds):
            floors.append(import_torch())
            forked.append(_launch(folder, few, _FORKED))
            anew.append(_launch(folder, few, _ANEW))
        large = _launch(folder, many, _FORKED)
        after = import_torch()
    floor = statistics.median(floors)
    best, first = min(one.first for one in forked), statistics.median(one.first for one in forked)
    ratio = statistics.median(a.first / b.first for a, b in zip(forked, anew, strict=True))
    each = [one.memory / few for one in anew]
    return [
        Figure(
            f"launch -n {few} to the first remote result / import torch alone",
            statistics.median(one.first / alone for one, alone in zip(forked, floors, strict=True)),
            "x",
            2.0,
            f"{first:.1f} s, at best {best:.1f} s; a Python that only imports torch {floor:.1f} s",
        ),
        Figure(
            f"launch -n {few}, workers forked / each started anew",
            ratio,
            "x",
            1.0,
            f"{forked[0]}; anew {anew[0]}",
        ),
        Figure(
            f"launch -n {many} to a result of every worker / import torch alone",
            large.all / after,
            "x",
            10.0,
            f"{large}; a Python that only imports torch {after:.1f} s",
        ),
        Figure(
            f"memory of {many} workers, forked / each as one that is started anew",
            large.memory / many / statistics.median(each),
            "x",
            None,
            f"{large.memory / many / 2**20:.0f} MiB for each worker, in all {large.memory / 2**30:.1f} GiB; "
            f"started anew {statistics.median(each) / 2**20:.0f} MiB each (proportional set size)",
        ),
    ]


def _launch(folder: Path, count: int, program: str) -> _Launch:
    words = [sys.executable, "-c", program, "launch", "-n", str(count), "first.py"]
    began = time.perf_counter()
    with _running(words, folder) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        took = time.perf_counter() - began
        pids = [int(word) for word in process.stdout.readline().split()]
        assert first == "first\n" and len(pids) == count, f"the launch has not worked: {first} {pids}"
        all_there = time.perf_counter() - began
        return _Launch(took, all_there, sum(map(_proportional, {*pids, *_mothers(pids)})))


@contextlib.contextmanager
def _running(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _mothers(pids: list[int]) -> set[int]:
    """Return the processes that have forked these workers: one, or those that have started them."""
    found = {
        int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
        for pid in pids
    }
    return {
        pid for pid in found if b"distruntime_worker.nursery" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def _proportional(pid: int) -> int:
    """Return the bytes of a process; pages that several processes share count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
