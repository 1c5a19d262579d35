"""The weights of layers over partitioned tensors: they live whole on one place, as in the serial layer.

So a layer's names, its `state_dict`, its initialisation and its optimizer are those of the serial layer. Each
forward pass copies to the places what they need. The gradients come back as sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plans import Size, balanced
from ..errors import NotSupportedError, UsageError

T = TypeVar("T")


class Copies:
    """Copies of a value from the first place of a partition to all of them.

    Args:
        along: for each dimension of the value, the dimension of the partition that cuts it, or None. A place
            then gets its balanced part.
    """

    def __init__(self, on: Partition, along: Sequence[int | None]) -> None:
        self.on = on
        used = [d if d is not None and d < on.dim else None for d in along]
        self._cut = any(d is not None and on.shape[d] > 1 for d in used)
        first = on.places[:1]
        self._whole = Partition(first, (1,) * (len(along) if self._cut else on.dim))
        if self._cut:
            beside = [d for d in range(on.dim) if d not in used]
            corner = [k for k in range(len(on)) if not any(on.index(k)[d] for d in beside)]
            places = [on.places[k] for k in corner]
            self._parts = Partition(places, tuple(1 if d is None else on.shape[d] for d in used))
            self._corner = Partition(places, tuple(1 if d in beside else n for d, n in enumerate(on.shape)))

    def __call__(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return each place's copy, or its part. Return at once."""
        if not self._cut:
            return primitives.broadcast([value], self._whole, self.on)
        parts = primitives.repartition([value], self._whole, self._parts)
        return primitives.broadcast(parts, self._corner, self.on)

    def back(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value on the first place, of copies that are equal where they should be."""
        if not self._cut:
            return copies[0]
        parts = [copies[self.on.places.index(place)] for place in self._parts.places]
        return primitives.repartition(parts, self._parts, self._whole)[0]


def partition(value: object, name: str = "P") -> Partition:
    """Return `value`; raise `UsageError` if it is no partition."""
    if not isinstance(value, Partition):
        raise UsageError(
            f"{name}, the first argument of a layer, is a distruntime.Partition, got {type(value).__name__}"
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
