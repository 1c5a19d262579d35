"""`Partition`: places in a Cartesian shape, over which a tensor is cut up.

A partitioned tensor is a plain list, a shard for each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.autograd.function import FunctionCtx

from ..errors import PlacementError, UsageError, without_our_frames
from ..log.handle import Place
from ..session.session import active_session
from ..session.spelling import homes_of
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from .arguments import tensor
from .group import Where
from .plan import Cuts
from .plans import coordinates, cuts_of, measured, sizes_of, slices_of


class Partition:
    """Distinct places in a Cartesian shape, row by row: the last dimension varies fastest.

    Equal where places and shape are.

    Dimension d of a tensor is cut into `shape[d]` parts, the first ones longer by one where they cannot
    be equal; dimensions that the partition does not have are not cut. Shards may be empty.

    Args:
        nodes_or_places: node numbers (each its first GPU, or its CPU if it has none) or places; None: all
            nodes.
        shape: how many parts along each dimension; a number stands for one dimension.

    Raises:
        UsageError: a place given twice, or as many places as the shape does not have. PlacementError: no
        such place.
    """

    @without_our_frames
    def __init__(self, nodes_or_places: Sequence[Where] | None, shape: int | Sequence[int]) -> None:
        self.session = active_session()
        self.homes = homes_of(self.session, nodes_or_places, "a partition")
        given = [shape] if isinstance(shape, int) else list(shape) if isinstance(shape, Sequence) else []
        if not given or any(type(n) is not int or n < 1 for n in given):
            raise UsageError(
                f"the shape of a partition is a number of parts for each dimension, (2, 2), got {shape!r}"
            )
        self.shape: tuple[int, ...] = tuple(given)
        self.places: tuple[Place, ...] = tuple(home.place for home in self.homes)
        if prod(self.shape) != len(self.places):
            raise UsageError(
                f"a partition of shape {self.shape} has {prod(self.shape)} places, got {len(self.places)}"
            )

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.places == other.places and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((self.places, self.shape))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.places[:4])) + (
            f", and {len(self) - 4} more" if len(self) > 4 else ""
        )
        return f"<distruntime.mesh.Partition {self.shape}: {shown}>"

    def __deepcopy__(self, memo: object) -> Partition:
        # Modules that know their partition are copied. It never changes, and it knows its session.
        return self

    def index(self, k: int) -> tuple[int, ...]:
        """Return the coordinates of the k-th place."""
        return coordinates(self.shape)[k]

    @without_our_frames
    def shapes(self, global_size: Sequence[int]) -> list[torch.Size]:
        """Return the size of each place's shard of a tensor of this size."""
        return [torch.Size(size) for size in sizes_of(cuts_of(tuple(global_size), self.shape))]

    @without_our_frames
    def slices(self, global_size: Sequence[int]) -> list[tuple[slice[int, int, int | None], ...]]:
        """Return where each place's shard lies in a tensor of this size: `x[slices[k]]` is shard k."""
        return slices_of(cuts_of(tuple(global_size), self.shape))

    @without_our_frames
    def scatter(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards of a tensor that is here or on one place, copied to their places. Differentiable.

        Return at once, but for the time that it takes to hand over a local tensor.
        """
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"what is scattered is a tensor, local or remote, got {type(x).__name__}")
        self.session.require_open()
        shards = []
        for home, where in zip(self.homes, self.slices(x.shape)):
            part, here = x[where], isinstance(x, DistributedTensor) and x.place == home.place
            shards.append(part.clone() if here else part.to(home.device))
        return shards

    @without_our_frames
    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor, here.

        Block until all shards are. Differentiable: the gradient is scattered.

        Raises `UsageError` where the sizes of the shards do not fit each other, `PlacementError` for one
        on another place.
        """
        given = self.check(shards, "shards")
        whole: torch.Tensor = _Gather.apply(self, self.cuts(given), *given)  # type: ignore[no-untyped-call]
        return whole

    def check(self, value: object, name: str) -> list[DistributedTensor]:
        """Return the shards in a list that a caller gave.

        Raise what a list raises that is not one of this partition's.
        """
        if isinstance(value, torch.Tensor) or not isinstance(value, Sequence):
            raise UsageError(
                f"{name} must be a list with one shard for each place of {self!r}, got {type(value).__name__}"
            )
        if len(value) != len(self):
            raise UsageError(
                f"{name} must have one shard for each of the {len(self)} places of {self!r}, got {len(value)}"
            )
        self.session.require_open()
        shards = [tensor(t, f"{name}[{k}]") for k, t in enumerate(value)]
        for k, (shard, place) in enumerate(zip(shards, self.places)):
            if shard._handle.place.node.session is not self.session:
                raise UsageError(f"{name}[{k}] is of another session than {self!r}")
            if shard.place != place:
                raise PlacementError(
                    f"{name}[{k}] is on {shard.place}, where {self!r} has {place}: give the shards in the "
                    f"order of the places, or move it: x.to(dr.place({place.node}, {place.local_device!r}))"
                )
            if shard.dtype != shards[0].dtype:
                raise UsageError(
                    f"{name} must be of one dtype: [0] is {shards[0]._handle.spec}, [{k}] is "
                    f"{shard._handle.spec}"
                )
        return shards

    def cuts(self, shards: Sequence[torch.Tensor]) -> Cuts:
        """Return how shards cut up the whole that they are.

        Raise `UsageError` where they do not fit each other.
        """
        return measured(tuple(tuple(t.shape) for t in shards), self.shape)


class _GatherContext(FunctionCtx):
    partition: Partition
    cuts: Cuts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatherContext, partition: Partition, cuts: Cuts, *shards: torch.Tensor) -> torch.Tensor:
        ctx.partition, ctx.cuts = partition, cuts
        whole = torch.empty([sum(lengths) for lengths in cuts], dtype=shards[0].dtype, device="cpu")
        for where, value in zip(slices_of(cuts), fetch([t.detach() for t in shards])):
            whole[where] = value
        return whole

    @staticmethod
    def backward(ctx: _GatherContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [grad[where].to(home.device) for where, home in zip(slices_of(ctx.cuts), ctx.partition.homes)]
        return None, None, *parts
