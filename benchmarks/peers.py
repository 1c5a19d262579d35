"""What others do with the same work: `python -m benchmarks.peers [--rounds 3] [--picture FILE]`.

Each system has one worker process on this machine, and a process of its own here, one after the other, in
rounds; the median of the rounds counts. The systems come with `pip install distruntime[peers]`. One that is
not installed, or that cannot do a row, says so in its cell.

Two rows are training steps. distruntime and Monarch issue their operators from here, and rpyc the step's
calls. With the others, an actor holds the model, and each step is one call. Each does as many as take a
quarter of a second, and waits for the last one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .harness import ROOT, free_port
from .training_step import stepper

_BYTES = 64 << 20
_LONG = 0.25  # seconds that a figure is made of, at least
_PATIENCE = 300  # seconds for one system's rows


@dataclass(frozen=True)
class Row:
    """One thing to do, and how its figure is shown."""

    name: str
    unit: str
    scale: float


_OPERATOR = Row("an operator on two tensors there", "us", 1e6)
_READ = Row("reading one number", "us", 1e6)
_UP = Row("64 MiB there", "ms", 1e3)
_DOWN = Row("64 MiB back", "ms", 1e3)
_MLP = Row("a step of an MLP", "ms", 1e3)
_GPT = Row("a step of a small GPT", "ms", 1e3)
ROWS = (_OPERATOR, _READ, _UP, _DOWN, _MLP, _GPT)
# Each does its row so many times, and returns when all of it is done.
Works = dict[Row, Callable[[int], object]]


# -- the steps -----------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        split = (n, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.first(x)).split(width, dim=2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        wide: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second(x))))
        return x + wide


class _GPTModel(nn.Module):
    def __init__(self, words: int = 256, length: int = 64, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(tokens) + self.places(places))
        scores: torch.Tensor = self.head(self.last(x))
        return scores


def gpt_stepper(device: str, width: int = 128, samples: int = 8) -> Callable[[], torch.Tensor]:
    """Return a function that makes one step of a GPT, of 0.9 million parameters by default, on `device`."""
    torch.manual_seed(0)
    model = _GPTModel(width=width).to(device)
    tokens, places = torch.randint(0, 256, (samples, 64)).to(device), torch.arange(64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(tokens, places)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


STEPPERS = {_MLP: stepper, _GPT: gpt_stepper}


class Trainer:
    """What an actor holds: both steps, and one tensor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._steps = {row.name: make("cpu") for row, make in STEPPERS.items()}
        self.held = torch.ones(20, 20)
        # torch's RPC runs the calls that are under way at once.
        self._one = threading.Lock()

    def step(self, name: str) -> float:
        """Make one step, and return its loss."""
        with self._one:
            return self._steps[name]().item()

    def add(self) -> None:
        """Do what an operator does."""
        self.held = self.held + 1

    def number(self) -> float:
        """Return one number."""
        return self.held[0, 0].item()

    def take(self, x: Any) -> int:
        """Take a large tensor."""
        return len(x)

    def make(self) -> torch.Tensor:
        """Return a large tensor."""
        return torch.ones(_BYTES // 4)


def _steps(
    work: Callable[[], torch.Tensor], read: Callable[[torch.Tensor], object]
) -> Callable[[int], object]:
    def run(times: int) -> None:
        for _ in range(times):
            loss = work()
        read(loss)

    return run


def _repeated(work: Callable[[], object]) -> Callable[[int], object]:
    def run(times: int) -> None:
        for _ in range(times):
            work()

    return run


# -- the systems ---------------------------------------------------------------------------------------------


@contextmanager
def here() -> Iterator[Works]:
    """Yield the work on tensors of this process: nothing is remote."""
    x, large = torch.ones(20, 20), torch.ones(_BYTES // 4)
    yield {
        _OPERATOR: _repeated(lambda: x + x),
        _READ: _repeated(lambda: x[0, 0].item()),
        _UP: _repeated(large.clone),
        _DOWN: _repeated(large.clone),
        **{row: _steps(make("cpu"), torch.Tensor.item) for row, make in STEPPERS.items()},
    }


@contextmanager
def ours(program: bool = False) -> Iterator[Works]:
    """Yield what this project does, with steps op by op, or recorded and replayed."""
    import distruntime as dr

    with dr.init_master_worker(world_size=1, quiet=True):
        x, one, large = (
            torch.ones(20, 20, device="remote"),
            torch.ones((), device="remote"),
            torch.ones(_BYTES // 4),
        )
        there = large.to("remote")

        def add(times: int) -> None:
            for _ in range(times):
                x + x
            dr.synchronize()

        def up(times: int) -> None:
            for _ in range(times):
                large.to("remote")
                dr.synchronize()

        steps = {row: make("remote") for row, make in STEPPERS.items()}
        yield {
            _OPERATOR: add,
            _READ: _repeated(one.item),
            _UP: up,
            _DOWN: _repeated(there.cpu),
            **{
                row: _steps(dr.program(step) if program else step, torch.Tensor.item)
                for row, step in steps.items()
            },
        }


@contextmanager
def programs() -> Iterator[Works]:
    """Yield this project's rows that a program changes."""
    with ours(program=True) as works:
        yield {row: works[row] for row in STEPPERS}


def _by_calls(call: Callable[..., Any], wait: Callable[[Any], Any], large: Any) -> Works:
    """Return the rows of a system with actors: `call` begins a call, and `wait` waits for its result."""

    def many(name: str, *args: object) -> Callable[[int], object]:
        def run(times: int) -> None:
            for begun in [call(name, *args) for _ in range(times)]:
                wait(begun)

        return run

    return {
        _OPERATOR: many("add"),
        _READ: _repeated(lambda: wait(call("number"))),
        _UP: _repeated(lambda: wait(call("take", large))),
        _DOWN: _repeated(lambda: wait(call("make"))),
        **{row: many("step", row.name) for row in STEPPERS},
    }


@contextmanager
def rays() -> Iterator[Works]:
    """Yield what Ray does, with an actor."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=1, logging_level="ERROR", include_dashboard=False)
    try:
        actor = ray.remote(num_cpus=0)(Trainer).remote()
        yield _by_calls(
            lambda name, *args: getattr(actor, name).remote(*args), ray.get, torch.ones(_BYTES // 4)
        )
    finally:
        ray.shutdown()


@contextmanager
def dasks() -> Iterator[Works]:
    """Yield what dask.distributed does, with an actor."""
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            actor = client.submit(Trainer, actor=True).result()
            yield _by_calls(
                lambda name, *args: getattr(actor, name)(*args),
                lambda begun: begun.result(),
                torch.ones(_BYTES // 4),
            )


@contextmanager
def rpcs() -> Iterator[Works]:
    """Yield what torch's RPC does, with an RRef."""
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    other = _other("from benchmarks.functions import rpc_worker; rpc_worker()")
    rpc.init_rpc("master", rank=0, world_size=2)
    held = [rpc.remote("worker", Trainer)]
    try:
        yield _by_calls(
            lambda name, *args: getattr(held[0].rpc_async(), name)(*args),
            lambda begun: begun.wait(),
            torch.ones(_BYTES // 4),
        )
    finally:
        # RPC ends when nothing is held any more.
        held.clear()
        rpc.shutdown()
        other.wait(30)


@contextmanager
def rpycs() -> Iterator[Works]:
    """Yield what rpyc does, with references to the objects of another process."""
    import rpyc

    port = free_port()
    other = _other(
        "from rpyc.core import SlaveService; from rpyc.utils.server import ThreadedServer; "
        f"ThreadedServer(SlaveService, hostname='127.0.0.1', port={port}).start()"
    )
    try:
        until = time.monotonic() + 30
        while True:
            try:
                connection = rpyc.classic.connect("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until and other.poll() is None
                time.sleep(0.05)
        there = connection.modules["benchmarks.peers"]
        trainer = there.Trainer()
        x, large = connection.modules.torch.ones(20, 20), rpyc.classic.obtain(torch.ones(_BYTES // 4))
        steps = {row: there.STEPPERS[there_row]("cpu") for row, there_row in zip(STEPPERS, there.STEPPERS)}
        yield {
            _OPERATOR: _repeated(lambda: x + x),
            _READ: _repeated(lambda: x[0, 0].item()),
            _UP: _repeated(lambda: rpyc.classic.deliver(connection, large)),
            _DOWN: _repeated(lambda: rpyc.classic.obtain(trainer.make())),
            **{row: _steps(step, lambda loss: loss.item()) for row, step in steps.items()},
        }
    finally:
        other.kill()
        other.wait(30)


@contextmanager
def monarchs() -> Iterator[Works]:
    """Yield what Monarch's tensor engine does."""
    from monarch import fetch_shard
    from monarch.actor import this_host

    procs = this_host().spawn_procs({"gpus": 1})
    with procs.activate():
        x, one, there = torch.ones(20, 20), torch.ones(()), torch.ones(_BYTES // 4)

        def add(times: int) -> None:
            for _ in range(times):
                y = x + x
            fetch_shard(y[0, 0]).get()

        def steps(make: Callable[[str], Callable[[], torch.Tensor]]) -> Callable[[int], object]:
            made: list[Callable[[], torch.Tensor]] = []

            def run(times: int) -> None:
                if not made:
                    made.append(make("cpu"))
                for _ in range(times):
                    loss = made[0]()
                fetch_shard(loss.detach()).get()

            return run

        yield {
            _OPERATOR: add,
            _READ: _repeated(lambda: fetch_shard(one).get()),
            _DOWN: _repeated(lambda: fetch_shard(there).get()),
            **{row: steps(make) for row, make in STEPPERS.items()},
        }
    procs.stop().get()


def _other(code: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    limits = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **limits})


SYSTEMS = {
    "here": here,
    "distruntime": ours,
    "as a program": programs,
    "Monarch": monarchs,
    "rpyc": rpycs,
    "torch RPC": rpcs,
    "Ray": rays,
    "dask": dasks,
}


# -- the run -------------------------------------------------------------------------------------------------


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
