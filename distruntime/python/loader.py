"""`dr.data.data_loader`: batches that are made at a worker, asked for ahead of need."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch

from ..errors import (
    DistruntimeError,
    NotSupportedError,
    ProtocolError,
    UsageError,
    drop_frames,
    without_our_frames,
)
from ..guards.captured import Captured
from ..log.handle import Residence
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.trees import joined
from ..tensors.uneven import together
from .ahead import Ahead
from .callee import warn
from .results import shards_of
from .sent import ask_ahead, run_at
from .sent_loader import Loader, begun, length_of, next_of
from .weights import Mesh, is_mesh, where

# So many batches are asked for ahead, unless the user says how many.
_AHEAD = 4

# A batch is what the user's dataset and `collate_fn` make.
Batch = Any  # type: ignore[explicit-any]
# What blocks for each member's batch, batch by batch.
Asked = deque[list[Ahead]]


@final
class DataLoader:
    """Batches of a data loader on a worker, or on a mesh's members: see `data_loader`.

    Each `iter` begins the next epoch. `state_dict` says where it is, so `dr.save` saves it.
    """

    def __init__(
        self,
        given: object,
        node: object,
        ahead: int,
        seed: int,
        mesh_dim: int | str | None,
        options: Mapping[str, object],
    ) -> None:
        self._seed, self._ahead, self._mesh = seed, ahead, node if is_mesh(node) else None
        self._epoch, self._batch = 0, 0
        # It is True if the next `iter` goes on with this epoch.
        self._fresh = True
        self._length: int | None = None
        # The user was told that these have changed.
        self._told: set[str] = set()
        # What is passed is copied, and may change here. Its code, and what that names, is the same there.
        code: list[object] = [one if callable(one) else type(one) for one in (given, *options.values())]
        self._captured = Captured(code, "dataset")
        self._made = [
            run_at(home, Loader, "dr.data.data_loader", given, home.place, share, seed, dict(options))
            for home, share in _shares(node, mesh_dim)
        ]
        self._homes = [home for home, _ in _shares(node, mesh_dim)]
        # What the current epoch has asked for ahead: the answers of all members, batch by batch.
        self._asked: Asked = deque()

    def __repr__(self) -> str:
        where = self._mesh if self._mesh is not None else self._homes[0].place
        return f"<data loader on {where}, epoch {self._epoch}, batch {self._batch}>"

    @without_our_frames
    def __len__(self) -> int:
        """Return the number of batches of an epoch. Block for one round trip, the first time."""
        if self._length is None:
            # All members are asked, so that nobody's failure stays unread.
            asked = [
                run_at(home, length_of, "dr.data.data_loader", made)
                for home, made in zip(self._homes, self._made)
            ]
            found, *_ = fetch(asked)
            if not isinstance(found, int):
                raise TypeError("an IterableDataset without __len__ does not say how many batches it has")
            self._length = found
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or go on where `load_state_dict` says.

        Warn where the code of the dataset has changed, or what that names: the worker has what it was then.
        Return at once, unless the epoch before was left half-way: then block for what was asked ahead there.
        """
        return self._begin()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        """Do as `iter`. Other tasks of the event loop run until a batch is there.

        A task that is cancelled while it waits takes no batch.
        """
        epoch = self._begin()
        while True:
            for asked in epoch.ask():
                # The future of a task that is cancelled must not cancel what the next one waits for.
                await asyncio.shield(asyncio.wrap_future(asked.came))
            try:
                batch = next(epoch)
            except StopIteration:
                return
            yield batch

    def _begin(self) -> _Epoch:
        changed = self._captured.changed()
        if changed and changed not in self._told:
            self._told.add(changed)
            warn(
                f"`{changed}` has changed since this data loader was made, and its worker goes on with what "
                "it was then: make another loader, dr.data.data_loader(...), whose load_state_dict goes on "
                "here"
            )
        drop(self._asked)
        self._asked = deque()
        if self._fresh:
            self._fresh = False
        else:
            self._epoch, self._batch = self._epoch + 1, 0
        return _Epoch(self, self._epoch, self._batch)

    @without_our_frames
    def close(self) -> None:
        """Drop what was asked ahead, where an epoch was left half-way. Block until it has come."""
        drop(self._asked)

    def state_dict(self) -> dict[str, int]:
        """Return where it is: the next batch of which epoch. What is asked ahead does not count."""
        return {"epoch": self._epoch, "batch": self._batch, "seed": self._seed}

    @without_our_frames
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a batch that `state_dict` has told of: the next `iter` begins there."""
        if {*state} != {"epoch", "batch", "seed"}:
            raise UsageError(f"not the state of a data loader: it has {sorted(state)}")
        if state["seed"] != self._seed:
            raise UsageError(
                f"the state belongs to a data loader with seed={state['seed']}, and this one has "
                f"{self._seed}: make it with that seed"
            )
        self._epoch, self._batch, self._fresh = state["epoch"], state["batch"], True


def _shares(node: object, mesh_dim: int | str | None) -> list[tuple[Residence, tuple[int, int] | None]]:
    """Return each place that loads, with its rank and the number of ranks."""
    if not is_mesh(node):
        if mesh_dim is not None:
            raise UsageError(f"mesh_dim={mesh_dim!r} is for a mesh: expected node=mesh with it")
        return [(where(node), None)]
    places = node._mesh_log.session.places
    homes = [places.residence(place, numbered=False) for place in node._mesh_log.members]
    if mesh_dim is None:
        return [(home, (k, len(homes))) for k, home in enumerate(homes)]
    dim = node._dim(mesh_dim)
    return [(home, (at[dim], node.shape[dim])) for home, at in zip(homes, node.coordinates())]


@final
class _Epoch:
    """The batches of one epoch."""

    def __init__(self, loader: DataLoader, epoch: int, first: int) -> None:
        self._of, self._epoch = loader, epoch
        self._begun = [
            run_at(home, begun, "dr.data.data_loader", made, epoch, first)
            for home, made in zip(loader._homes, loader._made)
        ]
        self._asked = loader._asked
        self._ended = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Batch:
        try:
            return self._next()
        except BaseException as error:
            drop_frames(error)
            raise

    def _next(self) -> object:
        of = self._of
        if not self.ask():
            raise StopIteration
        found = self._answers()
        if not all(found):
            self._end()
            if self._of._epoch == self._epoch:
                of._epoch, of._batch, of._fresh = self._epoch + 1, 0, True
            raise StopIteration
        batches = [one[0] for one in found]
        if of._epoch == self._epoch:
            of._batch += 1
        return batches[0] if of._mesh is None else joined(batches, partial(_joined, of._mesh))

    def ask(self) -> Sequence[Ahead]:
        """Ask ahead for as many as the loader may. Return what was asked first, nothing at the end."""
        while not self._ended and len(self._asked) <= self._of._ahead:
            self._ask()
        return [] if self._ended else self._asked[0]

    def _ask(self) -> None:
        """Ask each member for its next batch. Return at once."""
        # What makes batches is no part of what is trained.
        with torch.no_grad():
            self._asked.append(
                [
                    ask_ahead(home, next_of, "dr.data.data_loader", loader, own=True)
                    for home, loader in zip(self._of._homes, self._begun)
                ]
            )

    def _answers(self) -> list[Sequence[object]]:
        found: list[Sequence[object]] = []
        try:
            for answer in self._asked[0]:
                one = answer()
                if not isinstance(one, tuple):
                    raise ProtocolError(f"a worker sent {one!r:.60} for a batch")
                found.append(one)
        except DistruntimeError:
            # The other members' answers are dropped with it.
            self._end()
            raise
        self._asked.popleft()
        return found

    def _end(self) -> None:
        self._ended = True
        drop(self._asked)


def drop(asked: Asked) -> None:
    """Let go of what was asked ahead. Nobody is told of its failures, as nobody has used it."""
    while asked:
        for answer in asked.popleft():
            with suppress(DistruntimeError):
                answer()


def _joined(mesh: Mesh, found: list[object]) -> object:
    """Return the members' parts of their batches as one: a tensor of the mesh, or a list by member."""
    if not isinstance(found[0], DistributedTensor):
        return found
    shards = shards_of(found)
    if shards is None:
        raise NotSupportedError(
            "the members' batches differ in their dtypes or dimensions: return alike ones from "
            "collate_fn=, or make one loader for each member"
        )
    return together(shards, mesh._home)


@without_our_frames
def data_loader(
    dataset: object,
    *,
    node: object,
    ahead: int = _AHEAD,
    seed: int | None = None,
    mesh_dim: int | str | None = None,
    **options: object,
) -> DataLoader:
    """Return a data loader that works at a worker, with processes of that worker's. Return at once.

    Iteration gives batches of remote tensors, in the structure that `collate_fn` makes. Each is asked for
    with its structure before it is needed, so the last one may be smaller.

    Args:
        dataset: a dataset, which travels there (its remote tensors stay); a function or a class that returns
            one there; or a remote object.
        node: the number of a node, or a place, to whose device the batches go; or a mesh, whose members get
            parts as `DistributedSampler` cuts them, and whose batches are tensors on the mesh.
        ahead: how many batches are asked for before they are needed.
        seed: decides about the order of `shuffle=True`, with the number of the epoch. None draws one from
            torch's generator here.
        mesh_dim: the dimension of the mesh along which the data is cut. None means that each member gets its
            own part.
        options: those of `torch.utils.data.DataLoader`: `batch_size`, `shuffle`, `num_workers`, `collate_fn`
            and so on, besides `generator`.

    Raises:
        UsageError: options that do not fit. NotSupportedError: the worker was started with `--no-functions`.
    """
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise UsageError(f"ahead={ahead!r:.60}: expected a number of batches, 0 or more")
    if "generator" in options:
        raise UsageError("generator= cannot travel: expected seed=, which decides about the order")
    if seed is None:
        seed = int(torch.randint(1 << 31, (), device="cpu"))
    return DataLoader(dataset, node, ahead, seed, mesh_dim, options)
