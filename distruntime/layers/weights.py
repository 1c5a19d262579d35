"""The weights of layers over partitioned tensors: they live whole on one place, as in the serial layer.

So a layer's names, its `state_dict`, its initialisation and its optimizer are those of the serial layer. Each
forward pass copies to the places what they need. The gradients come back as sums. sharded_weights.py has
weights that live in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plan import Size
from ..collectives.plans import balanced, coordinates, number
from ..errors import NotSupportedError, UsageError

T = TypeVar("T")


class Copies:
    """Copies of a value from where it lives to all places of a partition.

    It lives whole on the first place, or in parts, each on the first place that uses it.

    Args:
        along: for each dimension of the value, the dimension of the partition that cuts it, or None. A place
            then gets its balanced part.
        fused: so many values stand one after the other along dimension 0. Each of them is cut, and a place
            gets a part of each.
    """

    def __init__(self, on: Partition, along: Sequence[int | None], fused: int = 1) -> None:
        self.on, self._fused = on, fused
        used = [d if d is not None and d < on.dim else None for d in along]
        if fused > 1:
            used = [None, *used]
        self.cut = any(d is not None and on.shape[d] > 1 for d in used)
        first = on.places[:1]
        self._whole = Partition(first, (1,) * (len(used) if self.cut else on.dim))
        self.parts = self._whole
        if self.cut:
            self.parts, self._corner, self._order = _corner(on, used)

    def __call__(self, value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each place's copy, or its part, of a whole or of parts. Return at once."""
        if not self.cut:
            assert isinstance(value, torch.Tensor)
            return primitives.broadcast([value], self._whole, self.on)
        if isinstance(value, torch.Tensor):
            opened = [self._opened(value)]
            value = [self._closed(t) for t in primitives.repartition(opened, self._whole, self.parts)]
        return primitives.broadcast([value[k] for k in self._order], self._corner, self.on)

    def back(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value on the first place, of copies that are equal where they should be."""
        if not self.cut:
            return copies[0]
        return self.joined([copies[self.on.places.index(place)] for place in self.parts.places])

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole on the first place, of its parts."""
        opened = [self._opened(part) for part in parts]
        return self._closed(primitives.repartition(opened, self.parts, self._whole)[0])

    def split(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a whole that is here or on any place, where they live."""
        return [self._closed(part) for part in self.parts.scatter(self._opened(value))]

    def sizes(self, whole: torch.Size) -> list[torch.Size]:
        """Return the sizes of the parts."""
        if not self.cut:
            return [whole]
        if self._fused == 1:
            return self.parts.shapes(whole)
        opened = self.parts.shapes((self._fused, whole[0] // self._fused, *whole[1:]))
        return [torch.Size((size[0] * size[1], *size[2:])) for size in opened]

    def _opened(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._fused == 1 else value.unflatten(0, (self._fused, -1))

    def _closed(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._fused == 1 else value.flatten(0, 1)


def _corner(on: Partition, used: Sequence[int | None]) -> tuple[Partition, Partition, list[int]]:
    """Return the places that have a part first: as the value is cut, and as `on` is cut.

    The numbers say which part each place of the second has.
    """
    shape = tuple(1 if d is None else on.shape[d] for d in used)
    rest = tuple(n if d in used else 1 for d, n in enumerate(on.shape))
    parts = []
    for at in coordinates(shape):
        index = [0] * on.dim
        for d, c in zip(used, at):
            if d is not None:
                index[d] = c
        parts.append(number(tuple(index), on.shape))
    corner = sorted(parts)
    places = on.places
    return (
        Partition([places[k] for k in parts], shape),
        Partition([places[k] for k in corner], rest),
        [parts.index(k) for k in corner],
    )


def partition(value: object, name: str = "P") -> Partition:
    """Return `value`; raise `UsageError` if it is no partition."""
    if not isinstance(value, Partition):
        raise UsageError(
            f"{name}, the first argument of a layer, is a distruntime.mesh.Partition, "
            f"got {type(value).__name__}"
        )
    return value


def each(value: int | Sequence[int], count: int, name: str) -> Size:
    """Return a number for each dimension, of one for all or of one each."""
    found = (value,) * count if isinstance(value, int) else tuple(value)
    if len(found) != count or not all(type(n) is int for n in found):
        raise UsageError(f"{name} is a number, or {count} of them, got {value!r}")
    return found


def require_balanced(lengths: Size, layer: str, dim: int) -> None:
    """Raise `UsageError` for a dimension that is not cut as `P.scatter` cuts it."""
    if lengths != balanced(sum(lengths), len(lengths)):
        raise UsageError(
            f"{layer} cuts its weights as P.scatter cuts dimension {dim}, into "
            f"{balanced(sum(lengths), len(lengths))}; the shards are {lengths} long there: "
            "dr.primitives.repartition(xs, P, P) balances them"
        )


def require_dims(dims: int, layer: str, expected: int) -> None:
    """Raise `UsageError` for shards of other dimensions than a layer takes."""
    if dims != expected:
        raise UsageError(
            f"{layer} takes shards of {expected} dimensions (batch, channels and {expected - 2} of space), "
            f"got {dims}"
        )


def require_default(value: T, default: T, name: str, layer: str) -> None:
    """Raise `NotSupportedError` for an argument that only the serial layer takes."""
    if value != default:
        raise NotSupportedError(
            f"{layer} over a partition takes {name}={default!r} only, got {value!r}: "
            "gather the tensor on one place for the serial layer"
        )
