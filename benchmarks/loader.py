"""Training from a worker's data loader, against the same training from batches that are there already."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

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
    """A model at a worker, and what trains it."""

    def __init__(self, width: int) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, _CLASSES),
        ).to("remote")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def epoch(self, batches: Iterable[Any]) -> float:
        """Return the seconds of an epoch."""
        started = time.perf_counter()
        loss = torch.zeros((), device="remote")
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        loss.item()
        return time.perf_counter() - started


def measure(quick: bool = False) -> list[Figure]:
    """Train in turn from a loader without processes, from one with a process, and from what is there."""
    steps, width, rounds = (10, 256, 2) if quick else (60, 1024, 7)
    figures = []
    with daemon() as address, dr.init_master_worker(workers=[address], quiet=True):
        training, data = Training(width), Images(steps * _BATCH)
        there = [(x, y) for x, y in dr.data_loader(data, node=0, batch_size=_BATCH)]
        for processes in (1, 0):
            loader = dr.data_loader(
                data,
                node=0,
                batch_size=_BATCH,
                shuffle=True,
                num_workers=processes,
                persistent_workers=bool(processes),
            )
            training.epoch(loader)
            training.epoch(there)
            ratio, ours, theirs = in_turn(
                lambda loader=loader: training.epoch(loader),  # type: ignore[misc]
                lambda: training.epoch(there),
                rounds,
            )
            figures.append(
                Figure(
                    f"an epoch from a worker's loader, num_workers={processes}",
                    ratio,
                    "x",
                    1.05 if processes else None,
                    f"{ours * 1e3 / steps:.1f} ms a step, {theirs * 1e3 / steps:.1f} ms from tensors there",
                )
            )
    return figures
