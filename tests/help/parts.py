"""Partitioned tensors here, by torch's and numpy's own words, to hold `distruntime.primitives` to: cases of
each, and the adjoint test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

import distruntime as dr

Tensors = list[torch.Tensor]
Shape = tuple[int, ...]
F = dr.primitives


def places(*nodes: int, device: str = "cpu") -> list[dr.types.Place]:
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
    return torch.cat(
        [whole(shards[k * each : (k + 1) * each], shape, dim + 1) for k in range(shape[dim])], dim
    )


def order(shape: Shape) -> numpy.ndarray:
    return numpy.arange(int(numpy.prod(shape))).reshape(shape)


def sources(x: Shape, y: Shape) -> list[int]:
    """Whose shard each place of `y` gets in a broadcast from `x`."""
    return [int(k) for k in numpy.broadcast_to(order(x), y).ravel()]


def mates(k: int, shape: Shape, axes: Sequence[int]) -> list[int]:
    """Who differs from place k in the coordinates of `axes` only."""
    index = numpy.unravel_index(k, shape)
    return [
        int(m)
        for m in order(shape)[tuple(slice(None) if d in axes else c for d, c in enumerate(index))].ravel()
    ]


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
    return float(
        sum(
            (x.detach().cpu().double() * y.detach().cpu().double()).sum() for x, y in zip(xs, ys, strict=True)
        )
    )


def norm(xs: Tensors) -> float:
    return inner(xs, xs) ** 0.5


def adjoint_error(xs: Tensors, fx: Tensors, y: Tensors, fy: Tensors) -> float:
    """|<Fx, y> - <x, F*y>| / max(|Fx||y|, |x||F*y|)"""
    scale = max(norm(fx) * norm(y), norm(xs) * norm(fy))
    return abs(inner(fx, y) - inner(xs, fy)) / scale if scale else 0.0


# -- on workers -----------------------------------------------------------------------------------


def there(xs: Tensors, partition: dr.mesh.Partition) -> Tensors:
    return [x.detach().to(home.device).requires_grad_() for x, home in zip(xs, partition.homes, strict=True)]


def ones(nodes: tuple[int, ...], *shapes: Shape) -> Tensors:
    return [
        torch.ones(size).to(home.device)
        for size, home in zip(
            shapes or [(2,)] * len(nodes), dr.mesh.Partition(places(*nodes), len(nodes)).homes
        )
    ]


def failed(size: Shape, node: int) -> Any:
    """A tensor that its worker could not make."""
    on = dr.mesh.Partition(places(node), 1).homes[0].device
    return torch.ones(size, device=on)[torch.full((size[0],), 9).to(on)]


def readable(ts: Tensors) -> list[bool]:
    found = []
    for t in ts:
        try:
            t.cpu()
            found.append(True)
        except IndexError:
            found.append(False)
    return found


# -- cases ----------------------------------------------------------------------------------------


class Case:
    """A primitive on shards of these sizes, on these places (node numbers, or as `gpus` those of node 0); and
    the same here.
    """

    def __init__(
        self, sizes: list[Shape], on: Any, run: Callable[..., Any], formula: Callable[[Tensors], Tensors]
    ) -> None:
        self.sizes, self.on, self.run, self.formula = sizes, on, run, formula

    def partition(self) -> dr.mesh.Partition:
        return part(*self.on)


def part(where: Any, shape: Shape) -> dr.mesh.Partition:
    gpus = [
        dr.types.Place(0, "cpu"),
        dr.types.Place(0, "cuda:0"),
        dr.types.Place(0, "cuda:1"),
        dr.types.Place(1, "cuda:0"),
    ]
    return dr.mesh.Partition(
        [gpus[k] for k in range(int(where[4:]))] if isinstance(where, str) else places(*where), shape
    )


def sizes(size: Shape, shape: Shape) -> list[Shape]:
    return [tuple(s.shape) for s in cut(torch.empty(size), shape)]


def broadcast(x: Any, y: Any, size: Shape) -> Case:
    n = len(x[0]) if not isinstance(x[0], str) else int(x[0][4:])
    # The sizes may be any.
    each = [(size[0] + k, *size[1:]) for k in range(n)] if size else [()] * n
    return Case(
        each,
        x,
        lambda xs, p: F.broadcast(xs, p, part(*y)),
        lambda xs: [xs[k] * 1 for k in sources(x[1], y[1])],
    )


def sum_reduce(x: Any, y: Any, size: Shape) -> Case:
    whose = sources(x[1], y[1])
    each = [(size[0] + k, *size[1:]) for k in whose] if size else [()] * len(whose)
    return Case(
        each,
        y,
        lambda ys, p: F.sum_reduce(ys, p, part(*x)),
        lambda ys: [sum(t for t, s in zip(ys, whose) if s == k) for k in range(max(whose) + 1)],
    )


def all_sum(on: Any, axes: Any, size: Shape) -> Case:
    row = [axes] if isinstance(axes, int) else [d % len(on[1]) for d in axes]
    count = len(sources(on[1], on[1]))
    return Case(
        [size] * count,
        on,
        lambda xs, p: F.all_sum_reduce(xs, p, axes),
        lambda xs: [sum(xs[m] for m in mates(k, on[1], row)) for k in range(count)],
    )


def all_gather(on: Any, axis: int, size: Shape) -> Case:
    def formula(xs: Tensors) -> Tensors:
        return [torch.cat([xs[m] for m in mates(k, on[1], [axis])], axis) for k in range(len(xs))]

    return Case(sizes(size, on[1]), on, lambda xs, p: F.all_gather(xs, p, axis), formula)


def reduce_scatter(on: Any, axis: int, size: Shape) -> Case:
    """`size` is each shard's, whole along the axis."""

    def formula(xs: Tensors) -> Tensors:
        outs = []
        for k in range(len(xs)):
            row = mates(k, on[1], [axis])
            outs.append(torch.tensor_split(sum(xs[m] for m in row), len(row), axis)[row.index(k)])
        return outs

    count = len(sources(on[1], on[1]))
    return Case([size] * count, on, lambda xs, p: F.reduce_scatter(xs, p, axis), formula)


def repartition(x: Any, y: Any, size: Shape) -> Case:
    return Case(
        sizes(size, x[1]),
        x,
        lambda xs, p: F.repartition(xs, p, part(*y)),
        lambda xs: cut(whole(xs, x[1]), y[1]),
    )


def halo(on: Any, widths: Any, size: Shape) -> Case:
    pairs = [(w, w) if isinstance(w, int) else w for w in widths]
    return Case(
        sizes(size, on[1]),
        on,
        lambda xs, p: F.halo_exchange(xs, p, widths),
        lambda xs: with_halo(whole(xs, on[1]), on[1], pairs),
    )
