"""The systems that `benchmarks.peers` holds against each other, and what each does for each row.

Two rows are training steps. distruntime and Monarch issue their operators from here, and rpyc the step's
calls. With the others, an actor holds the model, and each step is one call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .harness import ROOT, free_port
from .training_step import stepper

_BYTES = 64 << 20


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
        there = connection.modules["benchmarks.peer_systems"]
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
