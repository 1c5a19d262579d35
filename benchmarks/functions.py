"""Functions and objects of the user's own: what a call costs, and Ray, dask and torch's RPC beside it.

The peers are measured where they are installed (`pip install distruntime[peers]`), each with one worker
process on this machine, in turn with ours.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import distruntime as dr
from distruntime.session.session import active_session

from . import floors
from .harness import ROOT, Figure, free_port

BURST = 400
# A float64 array of 64 MiB.
LARGE = 8 << 20
# After so many calls the memory of both processes is looked at.
MANY = 10_000

Work = Callable[[], object]


def add(x: Any, y: Any) -> Any:
    """Return a sum: the known function on two proxies."""
    return x + y


def nothing(x: Any, y: Any) -> None:
    """Do nothing, so that all that a call takes is what stands around it."""


class Counter:
    """An object with a state, as actors are."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, k: Any) -> Any:
        """Count."""
        self.count += k
        return self.count

    def same(self, x: Any) -> Any:
        """Return a tensor that was computed of another."""
        return x + 1

    def first(self, a: Any) -> float:
        """Take a large array."""
        return float(a[0])

    def make(self, n: int) -> Any:
        """Return a large array."""
        return np.ones(n)


def _issuing(work: Work) -> float:
    """Return the processor time of a call on the issuing thread, with nothing in flight before a burst."""
    found = []
    for _ in range(5):
        dr.synchronize()
        began = time.thread_time()
        for _ in range(BURST):
            work()
        found.append((time.thread_time() - began) / BURST)
    dr.synchronize()
    return min(found) * 1e6


def _whole(work: Work) -> float:
    dr.synchronize()
    began = time.perf_counter()
    for _ in range(4 * BURST):
        work()
    dr.synchronize()
    return (time.perf_counter() - began) / (4 * BURST) * 1e6


def _worker() -> int:
    return active_session().nodes[0].welcome.pid


def _there(work: Work) -> float:
    """Return the processor time of the worker's busiest thread for one of many calls."""

    def used() -> dict[str, int]:
        tasks = Path(f"/proc/{_worker()}/task").iterdir()
        return {task.name: int((task / "schedstat").read_text(encoding="utf-8").split()[0]) for task in tasks}

    dr.synchronize()
    before = used()
    for _ in range(4 * BURST):
        work()
    dr.synchronize()
    return max(total - before.get(name, 0) for name, total in used().items()) / (4 * BURST) / 1e3


def _resident(process: int) -> float:
    """Return the MiB that a process has in memory."""
    return (
        int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / (1 << 20)
    )


def _grown(work: Work, calls: int) -> tuple[float, float]:
    """Return by how many MiB so many calls have grown this process and the worker."""
    processes = os.getpid(), _worker()
    for _ in range(calls):
        work()
    dr.synchronize()
    before = [*map(_resident, processes)]
    for _ in range(calls):
        work()
    dr.synchronize()
    here, there = (_resident(process) - was for process, was in zip(processes, before))
    return here, there


def _held(what: str, found: list[float], empty: list[float]) -> Figure:
    """Return what a call takes beside an empty dispatch, both in microseconds."""
    ratio = statistics.median(a / b for a, b in zip(found, empty))
    note = f"{statistics.median(found):.1f} us, floor {statistics.median(empty):.1f} us"
    return Figure(f"{what} / empty dispatch", ratio, "x", 5.0, note)


def _calls(rounds: int) -> list[Figure]:
    known: Any = dr.remote(add)
    empty: Any = dr.remote(nothing)
    counter: Any = dr.remote(Counter)()
    x, y = torch.ones(20, 20, device="remote"), torch.ones(20, 20, device="remote")
    works: dict[str, Work] = {
        "add": lambda: torch.add(x, y),
        "function": lambda: known(x, y),
        "method": lambda: counter.same(x),
        "nothing": lambda: empty(x, y),
    }
    with torch.no_grad():
        for work in works.values():
            work(), work()
        times: dict[str, list[float]] = {name: [] for name in works}
        apart: list[float] = []
        dispatched: list[float] = []
        beside: dict[str, list[float]] = {"function": [], "method": []}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(_issuing(work))
            apart.append(_whole(works["nothing"]))
            dispatched.append(floors.operation() * 1e6)
            instruction = _there(works["add"])
            for name, found in beside.items():
                found.append(_there(works[name]) - instruction)
        grown = {name: _grown(works[name], MANY if rounds > 1 else BURST) for name in beside}
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["add"]))
        for name in ("function", "method")
    }
    against = {"a call from end to end, with an empty body": apart}
    for name, found in beside.items():
        against[f"the worker's thread, a {name} with a tensor as its result, beside torch.add"] = found
    note = f"{statistics.median(times['add']):.1f} us for torch.add; processor time of the issuing thread"
    return [
        Figure("call of a known function on two proxies / torch.add", ratios["function"], "x", 1.5, note),
        Figure("call of a method on a proxy / torch.add", ratios["method"], "x", 1.5, note),
        *(_held(what, found, dispatched) for what, found in against.items()),
        *(
            Figure(
                f"{MANY:,} calls of a {name}: what both processes have grown by",
                sum(found),
                "MiB",
                8,
                f"this one by {found[0]:.1f}, the worker by {found[1]:.1f}",
            )
            for name, found in grown.items()
        ),
    ]


# -- beside others -------------------------------------------------------------------------------------------

# One call and its result; the same of an actor; 500 calls under way at once, each; 64 MiB there; and back.
NAMES = ("a call and its result", "an actor's call and its result", "one of 500 calls under way")
LARGE_NAMES = ("64 MiB as an argument", "64 MiB as a result")


@contextmanager
def ours() -> Iterator[dict[str, Work]]:
    """Yield what this project does."""
    increment: Any = dr.remote(_increment)
    counter: Any = dr.remote(Counter)()
    large = np.ones(LARGE)
    yield {
        NAMES[0]: lambda: dr.fetch(increment(1)),
        NAMES[1]: lambda: dr.fetch(counter.add(1)),
        NAMES[2]: lambda: dr.fetch([counter.add(1) for _ in range(500)]),
        LARGE_NAMES[0]: lambda: dr.fetch(counter.first(large)),
        LARGE_NAMES[1]: lambda: dr.fetch(counter.make(LARGE)),
    }


def _increment(k: int) -> int:
    return k + 1


@contextmanager
def rays() -> Iterator[dict[str, Work]]:
    """Yield what Ray does; raise `ImportError` where it is not installed."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=1, logging_level="ERROR", include_dashboard=False)
    increment = ray.remote(_increment)
    counter = ray.remote(num_cpus=0)(Counter).remote()
    large = np.ones(LARGE)
    try:
        yield {
            NAMES[0]: lambda: ray.get(increment.remote(1)),
            NAMES[1]: lambda: ray.get(counter.add.remote(1)),
            NAMES[2]: lambda: ray.get([counter.add.remote(1) for _ in range(500)]),
            LARGE_NAMES[0]: lambda: ray.get(counter.first.remote(large)),
            LARGE_NAMES[1]: lambda: ray.get(counter.make.remote(LARGE)),
        }
    finally:
        ray.shutdown()


@contextmanager
def dasks() -> Iterator[dict[str, Work]]:
    """Yield what dask.distributed does; raise `ImportError` where it is not installed."""
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            counter = client.submit(Counter, actor=True).result()
            large = np.ones(LARGE)
            yield {
                NAMES[0]: lambda: client.submit(_increment, 1, pure=False).result(),
                NAMES[1]: lambda: counter.add(1).result(),
                NAMES[2]: lambda: [future.result() for future in [counter.add(1) for _ in range(500)]],
                LARGE_NAMES[0]: lambda: counter.first(large).result(),
                LARGE_NAMES[1]: lambda: counter.make(LARGE).result(),
            }


@contextmanager
def rpcs() -> Iterator[dict[str, Work]]:
    """Yield what torch's RPC does."""
    from torch.distributed import rpc

    port = str(free_port())
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    other = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.functions import rpc_worker; rpc_worker()"],
        env={**environment, "PYTHONPATH": path},
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    rpc.init_rpc("master", rank=0, world_size=2)
    counters = [rpc.remote("worker", Counter)]
    large = torch.ones(LARGE, dtype=torch.float64)
    try:
        yield {
            NAMES[0]: lambda: rpc.rpc_sync("worker", _increment, args=(1,)),
            NAMES[1]: lambda: counters[0].rpc_sync().add(1),
            NAMES[2]: lambda: [f.wait() for f in [counters[0].rpc_async().add(1) for _ in range(500)]],
            LARGE_NAMES[0]: lambda: counters[0].rpc_sync().first(large),
            LARGE_NAMES[1]: lambda: rpc.rpc_sync("worker", _ones, args=(LARGE,)),
        }
    finally:
        # RPC ends when nothing is held any more.
        counters.clear()
        rpc.shutdown()
        other.wait(30)


def _ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.float64)


def rpc_worker() -> None:
    """Be the other process of torch's RPC."""
    from torch.distributed import rpc

    rpc.init_rpc("worker", rank=1, world_size=2)
    rpc.shutdown()


PEERS = {"Ray": rays, "dask": dasks, "torch RPC": rpcs}


def _beside(rounds: int) -> list[Figure]:
    found = []
    for name, peer in PEERS.items():
        try:
            with ours() as mine, peer() as theirs:
                for what, work in theirs.items():
                    work(), mine[what]()
                    times = 1 if what in LARGE_NAMES or what == NAMES[2] else 20
                    pairs = [(_seconds(mine[what], times), _seconds(work, times)) for _ in range(rounds)]
                    ratio = statistics.median(a / b for a, b in pairs)
                    own = statistics.median(a for a, _ in pairs)
                    each = 500 if what == NAMES[2] else 1
                    note = f"{own / each * 1e3:.2f} ms"
                    found.append(Figure(f"{what} / {name}", ratio, "x", 1.0, note))
        except ImportError as error:
            print(f"{name} is not measured: {error}; pip install 'distruntime[peers]'", file=sys.stderr)
    return found


def _seconds(work: Work, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def measure(quick: bool) -> list[Figure]:
    """Return the figures of this page."""
    rounds = 3 if quick else 11
    with dr.init_master_worker(world_size=1, quiet=True):
        return [*_calls(rounds), *_beside(rounds)]
