"""Shards of different shapes, padded to one shape where one instruction runs for all members.

Collectives are such instructions: the members of a line have one shape, and other lines have others. So is
what draws random numbers, as each member draws from its own generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..errors import UsageError
from ..log.handle import Residence
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, members_of, shapes_of, together
from .line_groups import Lines

Shape = tuple[int, ...]


def largest(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that all of these fit into."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def padded(t: UnevenTensor, parts: int = 1) -> DistributedTensor:
    """Return shards of one shape: zeros stand behind each of the `parts` of a shard's rows."""
    shards = [shard.unflatten(0, (parts, shard.shape[0] // parts)) for shard in t._shards]
    whole = largest([tuple(shard.shape) for shard in shards])
    found = [
        pad(shard, [n for size, own in zip(whole[::-1], shard.shape[::-1]) for n in (0, size - own)])
        for shard in shards
    ]
    even = together([shard.flatten(0, 1) for shard in found], t._residence)
    assert isinstance(even, DistributedTensor)
    return even


def cut(
    t: DistributedTensor, shapes: Sequence[Shape], home: Residence | None, parts: int = 1
) -> torch.Tensor:
    """Return what `padded` had put zeros behind: each of the `parts` of a shard's rows in its own shape."""
    found = []
    for shard, shape in zip(members_of(t), shapes):
        rows = shard.unflatten(0, (parts, shard.shape[0] // parts))
        for dim, size in enumerate(shape):
            rows = rows.narrow(dim + 1, 0, size)
        found.append(rows.flatten(0, 1))
    return together(found, home)


def require_alike(lines: Lines, t: UnevenTensor) -> None:
    """Raise `UsageError` unless the members of each line have shards of one shape."""
    for row in lines.rows:
        if len({t._shards[k].shape for k in row}) > 1:
            raise UsageError(
                f"a collective takes tensors of one shape from the members of a line, and members "
                f"{', '.join(map(str, row))} are a line: {shapes_of(t._shards)}. Pad them, or use lists of "
                "tensors, dr.functional"
            )
