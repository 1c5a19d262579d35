"""Training from a worker's data loader, against the same training from batches that are there already."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
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


class Training:
    """A model on a device, and what trains it."""

    def __init__(self, width: int, device: str) -> None:
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, _CLASSES),
        ).to(device)
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

    The same stands beside it of torch's own loader in this process.
    """
    steps, width, rounds = (10, 256, 2) if quick else (60, 1024, 7)
    data, figures = Images(steps * _BATCH), []

    def compared(
        name: str, training: Training, loader: Iterable[Any], there: list[Any], bar: float | None
    ) -> None:
        training.epoch(loader)
        training.epoch(there)
        ratio, ours, theirs = in_turn(lambda: training.epoch(loader), lambda: training.epoch(there), rounds)
        note = f"{ours * 1e3 / steps:.1f} ms a step, {theirs * 1e3 / steps:.1f} ms from tensors there"
        figures.append(Figure(name, ratio, "x", bar, note))

    def options(processes: int) -> dict[str, Any]:
        kept = {"num_workers": processes, "persistent_workers": bool(processes)}
        return {"batch_size": _BATCH, "shuffle": True, **kept}

    with daemon() as address, dr.init_master_worker(workers=[address], quiet=True):
        remote = Training(width, "remote")
        there = list(dr.data_loader(data, node=0, batch_size=_BATCH))
        for processes in (1, 0):
            loader = dr.data_loader(data, node=0, **options(processes))
            bar = 1.05 if processes else None
            compared(f"an epoch from a worker's loader, num_workers={processes}", remote, loader, there, bar)
    # The worker's kernels have one thread.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    local, here = Training(width, "cpu"), list(DataLoader(data, batch_size=_BATCH))
    for processes in (1, 0):
        own: DataLoader[Any] = DataLoader(data, **options(processes))
        compared(f"the same in this process, num_workers={processes}", local, own, here, None)
    torch.set_num_threads(threads)
    return figures
