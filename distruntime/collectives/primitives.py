"""Linear maps of partitioned tensors, each with its adjoint as its gradient.

Layers that span several workers are made of them. Each adjoint stands on the right::

    broadcast       sum_reduce              all_gather      reduce_scatter
    all_sum_reduce  all_sum_reduce          repartition     repartition, the other way
    halo_exchange   halos are sent back and added to where they came from

A partitioned tensor is a list of shards, in the order of its partition's places. All return at once, but
for the first time that places have to do with each other, which waits until their workers are connected.
The results are new tensors, except where nothing moves at all. docs/primitives.md has pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..errors import UsageError, without_our_frames
from ..tensors.tensor import DistributedTensor
from . import plans
from .partition import Partition
from .plan import AllSum, Size, Spread, Widths
from .stages import Shards, applied

Width = int | tuple[int, int] | Sequence[tuple[int, int]]


def _partition(value: object, name: str) -> Partition:
    if not isinstance(value, Partition):
        raise UsageError(f"{name} must be a distruntime.mesh.Partition, got {type(value).__name__}")
    return value


def _two(first: object, second: object, names: tuple[str, str]) -> tuple[Partition, Partition]:
    one, two = _partition(first, names[0]), _partition(second, names[1])
    if one.session is not two.session:
        raise UsageError(f"{names[0]} and {names[1]} are of different sessions: make them in the same one")
    return one, two


def _sizes(shards: Sequence[DistributedTensor]) -> tuple[Size, ...]:
    return tuple(tuple(t.shape) for t in shards)


def _axis(axis: object, partition: Partition, shards: Sequence[DistributedTensor]) -> int:
    """Return a dimension of the shards that the partition has."""
    least = min(t.dim() for t in shards)
    found = axis + least if type(axis) is int and axis < 0 else axis
    if type(found) is not int or not 0 <= found < min(partition.dim, least):
        raise UsageError(
            f"axis must be a dimension along which {partition!r} and the shards, of {least} "
            f"dimensions, are cut, got {axis!r}"
        )
    return found


def _widths(widths: object, partition: Partition) -> Widths:
    if not isinstance(widths, Sequence) or len(widths) != partition.dim:
        raise UsageError(
            f"halo must have an entry for each of the {partition.dim} dimensions of {partition!r}, "
            f"got {widths!r}"
        )
    found = []
    for d, (entry, parts) in enumerate(zip(widths, partition.shape)):
        pairs = [(entry, entry)] * parts if isinstance(entry, int) else entry
        if isinstance(pairs, Sequence) and len(pairs) == 2 and all(isinstance(w, int) for w in pairs):
            pairs = [pairs] * parts
        if (
            not isinstance(pairs, Sequence)
            or len(pairs) != parts
            or not all(
                isinstance(pair, Sequence) and len(pair) == 2 and all(type(w) is int and w >= 0 for w in pair)
                for pair in pairs
            )
        ):
            raise UsageError(
                f"halo[{d}] must be a width, a pair (left, right), or such a pair for each of the {parts} "
                f"parts along dimension {d}, none below 0, got {entry!r}"
            )
        found.append(tuple((left, right) for left, right in pairs))
    return tuple(found)


@without_our_frames
def broadcast(xs: Shards, P_x: Partition, P_y: Partition) -> list[torch.Tensor]:
    """Return a copy of each shard for all places of `P_y` that stand behind it. Its adjoint is `sum_reduce`.

    The dimensions of `P_x`, counted from the last, must be as long as those of `P_y`, or 1, which is
    repeated. Shards may have any size. Raises `UsageError` for partitions that do not fit,
    `PlacementError` for a shard on another place.
    """
    source, target = _two(P_x, P_y, ("P_x", "P_y"))
    plan = plans.spread(source.places, source.shape, target.places, target.shape)
    return applied(plan, source, target, source.check(xs, "xs"))


@without_our_frames
def sum_reduce(ys: Shards, P_y: Partition, P_x: Partition) -> list[torch.Tensor]:
    """Return, for each place of `P_x`, the sum of the shards whose places `broadcast` would copy it to.

    It is the adjoint of `broadcast(…, P_x, P_y)`.

    Raises `UsageError` for partitions that do not fit and for summands of unequal sizes, `PlacementError`
    for a shard on another place.
    """
    source, target = _two(P_y, P_x, ("P_y", "P_x"))
    plan = plans.spread(target.places, target.shape, source.places, source.shape).adjoint
    given = source.check(ys, "ys")
    for stage in plan.stages:
        assert isinstance(stage, Spread)
        for _, many, _ in stage.rows:
            _summands(given, many, "ys")
    return applied(plan, source, target, given)


@without_our_frames
def all_sum_reduce(xs: Shards, P: Partition, axes: int | Sequence[int]) -> list[torch.Tensor]:
    """Return, for each place, the sum over the places that differ from it in the coordinates of `axes` only.

    Its own adjoint.

    Raises `UsageError` for axes that the partition does not have and for summands of unequal sizes,
    `PlacementError` for a shard on another place.
    """
    partition = _partition(P, "P")
    given = partition.check(xs, "xs")
    wanted = [axes] if isinstance(axes, int) else list(axes) if isinstance(axes, Sequence) else [None]
    if any(type(d) is not int or not -partition.dim <= d < partition.dim for d in wanted):
        raise UsageError(f"axes must be dimensions of {partition!r}, 0 to {partition.dim - 1}, got {axes!r}")
    plan = plans.all_sum(partition.shape, tuple(sorted({d % partition.dim for d in wanted if d is not None})))
    for stage in plan.stages:
        assert isinstance(stage, AllSum)
        for row in stage.rows:
            _summands(given, row, "xs")
    return applied(plan, partition, partition, given)


def _summands(given: Sequence[DistributedTensor], row: Size, name: str) -> None:
    for k in row[1:]:
        if given[k].shape != given[row[0]].shape:
            one, other = (
                f"{name}[{i}] (on {given[i].place}) is {tuple(given[i].shape)}" for i in (row[0], k)
            )
            raise UsageError(f"what is summed must be of one size: {one}, {other}")


@without_our_frames
def all_gather(xs: Shards, P: Partition, axis: int) -> list[torch.Tensor]:
    """Return, for each place, the joined shards of those that differ from it in coordinate `axis` only.

    They are joined along that dimension.

    Their lengths there may differ. Its adjoint is `reduce_scatter`, into those lengths. Raises as the
    others do.
    """
    partition = _partition(P, "P")
    given = partition.check(xs, "xs")
    plan = plans.join(_sizes(given), partition.shape, _axis(axis, partition, given))
    return applied(plan, partition, partition, given)


@without_our_frames
def reduce_scatter(xs: Shards, P: Partition, axis: int) -> list[torch.Tensor]:
    """Return, for each place, its part of the sum over those that differ in coordinate `axis` only.

    The parts are balanced, along that dimension.

    Its adjoint is `all_gather`. Raises as the others do.
    """
    partition = _partition(P, "P")
    given = partition.check(xs, "xs")
    plan = plans.share(_sizes(given), partition.shape, _axis(axis, partition, given))
    return applied(plan, partition, partition, given)


@without_our_frames
def repartition(xs: Shards, P_x: Partition, P_y: Partition) -> list[torch.Tensor]:
    """Return the shards that `P_y` cuts the same tensor into, balanced, however `P_x` has cut it.

    Its adjoint is the way back.

    From one place it scatters, to one place it gathers: `Partition([0], (1, 1))`. Where all is in its
    place, the shards themselves are returned. Raises `UsageError` for partitions of unlike dimensions and
    shards that do not fit each other, `PlacementError` for one on another place.
    """
    source, target = _two(P_x, P_y, ("P_x", "P_y"))
    if source.dim != target.dim:
        raise UsageError(
            f"P_x has {source.dim} dimensions, {source.shape}, and P_y {target.dim}, {target.shape}: "
            "give both as many, of 1 where nothing is cut"
        )
    given = source.check(xs, "xs")
    cuts = source.cuts(given)
    whole = tuple(sum(lengths) for lengths in cuts)
    plan = plans.transfer(
        source.places,
        cuts,
        target.places,
        plans.cuts_of(whole, target.shape),
        source.shape,
        target.shape,
        given[0].dtype.itemsize,
    )
    return applied(plan, source, target, given)


@without_our_frames
def halo_exchange(xs: Shards, P: Partition, halo: Sequence[Width]) -> list[torch.Tensor]:
    """Return each shard grown by the rims of its neighbours, in each dimension, corners included.


    The adjoint sends the gradients of the halos back and adds them to where the halos came from. At the
    edges of the whole nothing is
    added: padding there is `torch.nn.functional.pad`, on the places that have an edge.

    Args:
        halo: for each dimension of the partition a number, a pair (left, right), or such a pair for each
            part along it; what they say beyond an edge does not count.

    Raises `UsageError` for a halo that is wider than the neighbour, `PlacementError` for a shard on
    another place.
    """
    partition = _partition(P, "P")
    given = partition.check(xs, "xs")
    plan = plans.halo(_sizes(given), partition.shape, _widths(halo, partition))
    return applied(plan, partition, partition, given)


__all__ = [
    "all_gather",
    "all_sum_reduce",
    "broadcast",
    "halo_exchange",
    "reduce_scatter",
    "repartition",
    "sum_reduce",
]
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
