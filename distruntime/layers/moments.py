"""Means and variances over dimensions that are cut: one sum over the places that share them.

A sum of squares loses all digits where the mean is large. So each place computes its own count, mean and
variance, all places get all of these by one all-reduce, and each merges them as Chan, Golub and LeVeque do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plans import coordinates, number

Tensors = list[torch.Tensor]


def moments(xs: Sequence[torch.Tensor], on: Partition, dims: Sequence[int]) -> tuple[Tensors, Tensors]:
    """Return means and variances over `dims`, at each place, with these dimensions kept as 1.

    Differentiable, and so is the all-reduce. Places whose shards are empty count for nothing.
    """
    cut = [d for d in dims if d < on.dim and on.shape[d] > 1]
    own = [_own(x, dims) for x in xs]
    if not cut:
        return [mean for _, mean, _ in own], [variance for _, _, variance in own]
    parts = tuple(on.shape[d] for d in cut)
    # Each place has a row of its own among those that it shares the cut dimensions with.
    rows = [number(tuple(index[d] for d in cut), parts) for index in coordinates(on.shape)]
    stacks = [
        _row(torch.stack([mean.new_full(mean.shape, count), mean, variance]), row, prod(parts))
        for (count, mean, variance), row in zip(own, rows)
    ]
    merged = [_merged(stack) for stack in primitives.all_sum_reduce(stacks, on, cut)]
    return [mean for mean, _ in merged], [variance for _, variance in merged]


def mean_square(xs: Sequence[torch.Tensor], on: Partition, dims: Sequence[int], count: int) -> Tensors:
    """Return the mean of squares over `dims`, which have `count` elements as wholes, at each place."""
    cut = [d for d in dims if d < on.dim and on.shape[d] > 1]
    parts = [x.square().sum(list(dims), keepdim=True) / count for x in xs]
    return primitives.all_sum_reduce(parts, on, cut) if cut else parts


def _own(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    count = 1
    for d in dims:
        count *= x.shape[d]
    if count == 0:
        zero = x.sum(list(dims), keepdim=True)
        return 0, zero, zero
    variance, mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    return count, mean, variance


def _row(values: torch.Tensor, at: int, total: int) -> torch.Tensor:
    """Return zeros for all places but one, whose values these are."""
    before = values.new_zeros([at, *values.shape])
    behind = values.new_zeros([total - at - 1, *values.shape])
    return torch.cat([before, values.unsqueeze(0), behind])


def _merged(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts, means, variances = stack.unbind(1)
    shares = counts / counts.sum(0)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)
