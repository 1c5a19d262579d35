"""Training from a worker's data loader, against the same training from batches that are there already."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import distruntime as dr

from .harness import Figure, daemon, in_turn

_BATCH, _FEATURES, _CLASSES = 128, 784, 10


class Images(Dataset[Any]):
    """Images as bytes, which become floats when they are taken out, and their classes."""

    def __init__(self, count: int) -> None:
        made = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (count, _FEATURES), dtype=torch.uint8, generator=made)
        self.classes = torch.randint(_CLASSES, (count,), generator=made)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[k].float().div_(255), self.classes[k]


def perceptron(width: int) -> nn.Module:
    """Return a model whose step takes little longer than to load its batch."""
    return nn.Sequential(
        nn.Linear(_FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _CLASSES),
    )


def convolutions() -> nn.Module:
    """Return the network of torch's example for handwritten digits, without its dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, _CLASSES),
    )


@contextmanager
def busy() -> Iterator[None]:
    """Keep another process of this machine busy, which touches no memory to speak of."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


class Training:
    """A model on a device, and what trains it."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.device = device
        self.model = model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch(self, batches: Iterable[Any]) -> float:
        """Return the seconds of an epoch."""
        started = time.perf_counter()
        loss = torch.zeros((), device=self.device)
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        loss.item()
        return time.perf_counter() - started


def measure(quick: bool = False) -> list[Figure]:
    """Train in turn from a loader with a process, from one without, and from what is there.

    Beside it stand torch's own loader in this process, and what a busy process costs the training on this
    machine, which loads nothing.
    """
    steps, width, rounds = (10, 256, 2) if quick else (60, 1024, 7)
    data, figures = Images(steps * _BATCH), []

    def compared(
        name: str, one: Callable[[], float], other: Callable[[], float], count: int, bar: float | None
    ) -> None:
        one(), other()
        ratio, ours, theirs = in_turn(one, other, rounds)
        note = f"{ours * 1e3 / count:.1f} ms a step, {theirs * 1e3 / count:.1f} ms from tensors there"
        figures.append(Figure(name, ratio, "x", bar, note))

    def options(processes: int) -> dict[str, Any]:
        kept = {"num_workers": processes, "persistent_workers": bool(processes)}
        return {"batch_size": _BATCH, "shuffle": True, **kept}

    def beside(training: Training, there: list[Any]) -> float:
        with busy():
            return training.epoch(there)

    # The network of convolutions takes some ten times as long for a step.
    models: list[tuple[str, Callable[[], nn.Module], Images, int]] = [
        ("an MLP's", lambda: perceptron(width), data, steps),
        ("a CNN's", convolutions, Images(max(2, steps // 6) * _BATCH), max(2, steps // 6)),
    ]
    with daemon() as address, dr.init_master_worker(workers=[address], quiet=True):
        for name, make, images, count in models:
            remote = Training(make(), "remote")
            there = list(dr.data.data_loader(images, node=0, batch_size=_BATCH))
            known = partial(remote.epoch, there)
            for processes in (1, 0):
                loader = dr.data.data_loader(images, node=0, **options(processes))
                what = f"{name} epoch from a worker's loader, num_workers={processes}"
                compared(what, partial(remote.epoch, loader), known, count, 1.05 if processes else None)
            what = f"{name} epoch from tensors there, beside a busy process"
            compared(what, partial(beside, remote, there), known, count, None)
    # The worker's kernels have one thread.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    local, here = Training(perceptron(width), "cpu"), list(DataLoader(data, batch_size=_BATCH))
    for processes in (1, 0):
        own: DataLoader[Any] = DataLoader(data, **options(processes))
        what = f"an MLP's epoch in this process, from torch's loader, num_workers={processes}"
        compared(what, partial(local.epoch, own), partial(local.epoch, here), steps, None)
    torch.set_num_threads(threads)
    return figures
