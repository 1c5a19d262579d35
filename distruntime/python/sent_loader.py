"""torch's `DataLoader` on a worker: it can begin an epoch at any batch.

This class travels to workers.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distruntime.errors import NotSupportedError, UsageError

# A process may die so many seconds before Python knows it.
_DYING = 0.5
# A user's dataset and torch's samplers share no type, and neither do a data loader's arguments.
_Own = Any  # type: ignore[explicit-any]


class Loader:
    """A data loader, and the epoch that it is in. `share` is (rank, number of ranks) of a mesh's member."""

    def __init__(
        self,
        given: object,
        device: torch.device,
        share: tuple[int, int] | None,
        seed: int,
        options: Mapping[str, _Own],
    ) -> None:
        is_dataset = isinstance(given, Dataset) or hasattr(given, "__getitem__") or hasattr(given, "__iter__")
        # A class is a factory, too.
        if callable(given) and (isinstance(given, type) or not is_dataset):
            given = given()
        self._device, self._seed = device, seed
        self._generator = torch.Generator()
        left = dict(options)
        self._epochs: list[_Own] = []
        if not isinstance(given, IterableDataset) and not hasattr(given, "__getitem__"):
            if not hasattr(given, "__iter__"):
                raise UsageError(
                    f"dr.data.data_loader got {type(given).__name__}: expected a dataset of torch, anything "
                    "with items and a length, or a function that returns one"
                )
            given = _Iterating(given)
        self._from: _From | None = None
        if isinstance(given, IterableDataset):
            if share is not None:
                raise NotSupportedError(
                    "an IterableDataset has no parts for a mesh's members, as only a dataset with items and "
                    "a length has: make one loader for each member, dr.data.data_loader(factory, node=place)"
                )
        else:
            self._sample(given, share, left)
        if left.get("num_workers") and _forks():
            left.setdefault("multiprocessing_context", "fork")
        self._loader: DataLoader[object] = DataLoader(given, generator=self._generator, **left)  # type: ignore[arg-type]
        self._batches: Iterator[object] = iter(())
        # The processes of this epoch.
        self._processes: list[BaseProcess] = []

    def _sample(self, dataset: _Own, share: tuple[int, int] | None, left: dict[str, _Own]) -> None:
        """Put a sampler into the options that can begin anywhere."""
        batches = left.pop("batch_sampler", None)
        sampler, shuffle = left.pop("sampler", None), bool(left.pop("shuffle", False))
        if share is not None:
            if batches is not None or sampler is not None:
                raise UsageError(
                    "a mesh's members get parts of the data as DistributedSampler cuts it: leave sampler= "
                    "and batch_sampler= out, and give shuffle= and batch_size="
                )
            sampler = DistributedSampler(
                dataset,
                num_replicas=share[1],
                rank=share[0],
                shuffle=shuffle,
                seed=self._seed & 0x7FFFFFFF,
                drop_last=bool(left.get("drop_last", False)),
            )
        elif sampler is None and batches is None:
            sampler = (
                RandomSampler(dataset, generator=self._generator) if shuffle else SequentialSampler(dataset)
            )
        elif shuffle:
            raise UsageError("shuffle=True is for data without sampler= and batch_sampler=")
        for one in (sampler, batches, getattr(batches, "sampler", None)):
            if hasattr(one, "set_epoch"):
                self._epochs.append(one)
        size = left.pop("batch_size", 1)
        if batches is not None:
            self._from = left["batch_sampler"] = _From(batches)
        elif size is None:
            self._from = left["sampler"] = _From(sampler)
            left["batch_size"] = None
        else:
            made = BatchSampler(sampler, size, bool(left.pop("drop_last", False)))
            self._from = left["batch_sampler"] = _From(made)

    def length(self) -> int | None:
        """Return the number of batches of an epoch; None where nobody knows it."""
        if self._from is not None:
            return self._from.whole()
        try:
            return len(self._loader)
        except TypeError:
            return None

    def begin(self, epoch: int, first: int) -> None:
        """Begin an epoch at one of its batches."""
        # The epoch before may still have processes.
        self._batches, self._processes = iter(()), []
        self._generator.manual_seed((self._seed + epoch) & 0x7FFFFFFFFFFFFFFF)
        for sampler in self._epochs:
            sampler.set_epoch(epoch)
        if self._from is not None:
            self._from.first = first
        batches = iter(self._loader)
        self._processes = getattr(batches, "_workers", [])
        self._batches = batches if self._from is not None else islice(batches, first, None)

    def next(self) -> object:
        """Return the next batch on the device, in a tuple, or () at the end."""
        try:
            for batch in self._batches:
                return (_on(batch, self._device),)
        # A process that dies while a batch is read of it shows in any of these, as torch may look too early.
        except (EOFError, OSError, RuntimeError) as error:
            self._explain(error)
            raise
        self._batches = iter(())
        return ()

    def _explain(self, error: Exception) -> None:
        """Raise how a process of the loader has ended, if one has."""
        gone = wait([one.sentinel for one in self._processes], _DYING)
        for one in self._processes:
            # The system closes what it holds open before it can be asked how it has ended.
            if one.sentinel in gone:
                one.join(_DYING)
        ended = [one for one in self._processes if one.exitcode]
        if not ended:
            return
        # Who asks for the next batch would wait until torch looks again.
        self._batches, self._processes = iter(()), []
        raise RuntimeError(
            f"DataLoader worker (pid(s) {', '.join(str(one.pid) for one in ended)}) exited unexpectedly: "
            f"this process of the node {_end_of(ended[0].exitcode or 0)}"
        ) from error


def _end_of(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), as what takes too much memory is: take fewer, or smaller batches"
    how = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    return f"{how}: num_workers=0 makes the batches in the worker itself, which tells of the line"


def _forks() -> bool:
    """Whether the processes of a loader are forked, unless it is given another way.

    Python 3.14 starts processes from a server by default, and pickles for them. What has come to this worker
    by value has no module that such a process could import it from. Who has chosen another way keeps it.
    """
    default = multiprocessing.get_all_start_methods()[0]
    chosen = multiprocessing.get_start_method(allow_none=True) or default
    return sys.platform == "linux" and default == "forkserver" and chosen == default


class _Iterating(IterableDataset[object]):
    """Whatever can be iterated, as a dataset."""

    def __init__(self, items: _Own) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)


class _From:
    """A sampler that begins at one of its items."""

    def __init__(self, own: _Own) -> None:
        self._own, self.first = own, 0

    def __iter__(self) -> Iterator[_Own]:
        return islice(iter(self._own), self.first, None)

    def whole(self) -> int | None:
        """Return the number of all items; None where nobody knows it."""
        return len(self._own) if isinstance(self._own, Sized) else None

    def __len__(self) -> int:
        return max(0, len(self._own) - self.first)


def _on(batch: object, device: torch.device) -> object:
    """Return a batch with its tensors on a device. Dicts that torch's pytree does not know become plain."""

    def moved(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        # What the pytree does not know would stay one object there, as the batches of a tokenizer are.
        if isinstance(leaf, Mapping):
            return {key: _on(item, device) for key, item in leaf.items()}
        to: _Own = getattr(leaf, "to", None)
        return leaf if to is None or isinstance(leaf, type) else to(device)

    return tree_map(moved, batch)


def begun(loader: Loader, epoch: int, first: int) -> Loader:
    """Begin an epoch; return the loader."""
    loader.begin(epoch, first)
    return loader


def next_of(loader: Loader) -> object:
    """Return the next batch in a tuple, or () at the end."""
    return loader.next()


def length_of(loader: Loader) -> int | None:
    """Return the number of batches of an epoch; None where nobody knows it."""
    return loader.length()
