"""Partitioned tensors here, by torch's and numpy's own words, to hold `distruntime.primitives` to; and the adjoint test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

import distruntime as dr

Tensors = list[torch.Tensor]
Shape = tuple[int, ...]


def places(*nodes: int, device: str = "cpu") -> list[dr.Place]:
    return [dr.place(node, device) for node in nodes]


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def cut(x: torch.Tensor, shape: Shape, dim: int = 0) -> Tensors:
    """The shards of a tensor, the last dimension varying fastest."""
    if dim == len(shape):
        return [x]
    return [shard for part in torch.tensor_split(x, shape[dim], dim) for shard in cut(part, shape, dim + 1)]


def whole(shards: Tensors, shape: Shape, dim: int = 0) -> torch.Tensor:
    """What has been cut, put together."""
    if dim == len(shape):
        return shards[0]
    each = len(shards) // shape[dim]
    return torch.cat([whole(shards[k * each : (k + 1) * each], shape, dim + 1) for k in range(shape[dim])], dim)


def order(shape: Shape) -> numpy.ndarray:
    return numpy.arange(int(numpy.prod(shape))).reshape(shape)


def sources(x: Shape, y: Shape) -> list[int]:
    """Whose shard each place of `y` gets in a broadcast from `x`."""
    return [int(k) for k in numpy.broadcast_to(order(x), y).ravel()]


def mates(k: int, shape: Shape, axes: Sequence[int]) -> list[int]:
    """Who differs from place k in the coordinates of `axes` only."""
    index = numpy.unravel_index(k, shape)
    return [int(m) for m in order(shape)[tuple(slice(None) if d in axes else c for d, c in enumerate(index))].ravel()]


def with_halo(x: torch.Tensor, shape: Shape, widths: Sequence[tuple[int, int]]) -> Tensors:
    """The shards of a tensor, each with as much around it as there is."""
    marks = [cut(torch.arange(n), (parts,)) for n, parts in zip(x.shape, shape)]
    shards = []
    for index in numpy.ndindex(*shape):
        shard = x
        for d, c in enumerate(index):
            span, (left, right) = marks[d][c], widths[d]
            start, stop = max(0, int(span[0]) - left), min(x.shape[d], int(span[-1]) + 1 + right)
            shard = shard.narrow(d, start, stop - start)
        shards.append(shard)
    return shards


def inner(xs: Tensors, ys: Tensors) -> float:
    return float(sum((x.detach().cpu().double() * y.detach().cpu().double()).sum() for x, y in zip(xs, ys, strict=True)))


def norm(xs: Tensors) -> float:
    return inner(xs, xs) ** 0.5


def adjoint_error(xs: Tensors, fx: Tensors, y: Tensors, fy: Tensors) -> float:
    """|<Fx, y> - <x, F*y>| / max(|Fx||y|, |x||F*y|)"""
    scale = max(norm(fx) * norm(y), norm(xs) * norm(fy))
    return abs(inner(fx, y) - inner(xs, fy)) / scale if scale else 0.0
