"""The primitives of partitioned tensors: each against plain local code, its gradients too, and the adjoint test; plans; errors; poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime import plans
from parts import Shape, Tensors, adjoint_error, cut, mates, numbers, places, sources, whole, with_halo

F = dr.primitives


@pytest.fixture(scope="module", autouse=True)
def four() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=4, simulate_cuda=2):
        yield


class Case:
    """A primitive on shards of these sizes, on these places (node numbers, or as `gpus` those of node 0); and the same here."""

    def __init__(self, sizes: list[Shape], on: Any, run: Callable[..., Any], formula: Callable[[Tensors], Tensors]) -> None:
        self.sizes, self.on, self.run, self.formula = sizes, on, run, formula

    def partition(self) -> dr.Partition:
        return part(*self.on)


def part(where: Any, shape: Shape) -> dr.Partition:
    gpus = [dr.Place(0, "cpu"), dr.Place(0, "cuda:0"), dr.Place(0, "cuda:1"), dr.Place(1, "cuda:0")]
    return dr.Partition([gpus[k] for k in range(int(where[4:]))] if isinstance(where, str) else places(*where), shape)


def sizes(size: Shape, shape: Shape) -> list[Shape]:
    return [tuple(s.shape) for s in cut(torch.empty(size), shape)]


def broadcast(x: Any, y: Any, size: Shape) -> Case:
    n = len(x[0]) if not isinstance(x[0], str) else int(x[0][4:])
    each = [(size[0] + k, *size[1:]) for k in range(n)] if size else [()] * n  # of any sizes
    return Case(each, x, lambda xs, p: F.broadcast(xs, p, part(*y)), lambda xs: [xs[k] * 1 for k in sources(x[1], y[1])])


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
    return Case(sizes(size, x[1]), x, lambda xs, p: F.repartition(xs, p, part(*y)), lambda xs: cut(whole(xs, x[1]), y[1]))


def halo(on: Any, widths: Any, size: Shape) -> Case:
    pairs = [(w, w) if isinstance(w, int) else w for w in widths]
    return Case(sizes(size, on[1]), on, lambda xs, p: F.halo_exchange(xs, p, widths), lambda xs: with_halo(whole(xs, on[1]), on[1], pairs))


N1, N2, N3, N4 = (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)
CASES = {
    "broadcast to itself": broadcast((N1, (1,)), (N1, (1,)), (3, 2)),
    "broadcast to another": broadcast((N1, (1,)), ((1,), (1,)), (3, 2)),
    "broadcast from one to three": broadcast((N1, (1,)), (N3, (3,)), (3, 2)),
    "broadcast of a number": broadcast((N1, (1,)), (N4, (2, 2)), ()),
    "broadcast from outside": broadcast(((3,), (1,)), (N3, (3,)), (3, 2)),
    "broadcast of rows": broadcast((N2, (2, 1)), (N4, (2, 2)), (3, 2)),
    "broadcast of columns": broadcast(((2, 1), (1, 2)), (N4, (2, 2)), (3, 2)),
    "broadcast padded on the left": broadcast((N2, (2,)), (N4, (2, 2)), (3, 2)),
    "broadcast crossed": broadcast((N4, (2, 2)), ((3, 2, 1, 0), (2, 2)), (3, 2)),
    "broadcast on one node": broadcast(("gpus1", (1,)), ("gpus4", (4,)), (3, 2)),
    "sum to itself": sum_reduce((N1, (1,)), (N1, (1,)), (3, 2)),
    "sum to another": sum_reduce(((1,), (1,)), (N1, (1,)), (3, 2)),
    "sum of three": sum_reduce(((1,), (1,)), (N3, (3,)), (3, 2)),
    "sum to outside": sum_reduce(((3,), (1,)), (N3, (3,)), (3, 2)),
    "sum of rows": sum_reduce((N2, (2, 1)), (N4, (2, 2)), (3, 2)),
    "sum of columns, crossed": sum_reduce(((3, 0), (2,)), (N4, (2, 2)), (3, 2)),
    "sum on one node": sum_reduce(("gpus1", (1,)), ("gpus3", (3,)), (3, 2)),
    "all_sum of one": all_sum((N1, (1,)), 0, (3, 2)),
    "all_sum of three": all_sum((N3, (3,)), 0, (3, 2)),
    "all_sum of numbers": all_sum((N4, (4,)), 0, ()),
    "all_sum along rows": all_sum((N4, (2, 2)), 1, (3, 2)),
    "all_sum along columns": all_sum((N4, (2, 2)), [-2], (3, 2)),
    "all_sum of all": all_sum((N4, (2, 2)), (0, 1), (3, 2)),
    "all_sum on one node": all_sum(("gpus4", (2, 2)), 1, (3, 2)),
    "gather of one": all_gather((N1, (1,)), 0, (3, 2)),
    "gather of two": all_gather((N2, (2,)), 0, (6, 2)),
    "gather of uneven three": all_gather((N3, (3,)), 0, (7, 2)),
    "gather of uneven columns": all_gather((N3, (1, 3)), 1, (2, 7)),
    "gather along rows": all_gather((N4, (2, 2)), 1, (5, 7)),
    "gather along columns": all_gather((N4, (2, 2)), 0, (5, 7)),
    "gather where some have nothing": all_gather((N4, (4,)), 0, (2, 3)),
    "gather on one node": all_gather(("gpus4", (4,)), 0, (5, 2)),
    "share of one": reduce_scatter((N1, (1,)), 0, (3, 2)),
    "share of two": reduce_scatter((N2, (2,)), 0, (6, 2)),
    "share of uneven three": reduce_scatter((N3, (3,)), 0, (7, 2)),
    "share of uneven columns": reduce_scatter((N3, (1, 3)), 1, (2, 7)),
    "share along rows": reduce_scatter((N4, (2, 2)), 1, (3, 7)),
    "share where some get nothing": reduce_scatter((N4, (4,)), 0, (2, 3)),
    "share on one node": reduce_scatter(("gpus4", (4,)), 0, (5, 2)),
    "rows to columns": repartition((N4, (4, 1)), (N4, (1, 4)), (7, 6)),
    "rows to a square": repartition((N4, (4, 1)), (N4, (2, 2)), (7, 6)),
    "rows to columns, elsewhere": repartition(((0, 1), (2, 1)), ((2, 1, 3), (1, 3)), (7, 5)),
    "two to three": repartition((N2, (2,)), (N3, (3,)), (7, 2)),
    "to others": repartition((N2, (2,)), ((2, 3), (2,)), (7, 2)),
    "shuffled": repartition((N4, (4,)), ((2, 0, 3, 1), (4,)), (7, 2)),
    "scattered": repartition((N1, (1, 1)), (N4, (2, 2)), (5, 3)),
    "gathered": repartition((N4, (2, 2)), ((2,), (1, 1)), (5, 3)),
    "some with nothing": repartition((N4, (4, 1)), (N4, (1, 4)), (3, 2)),
    "cut along the first two of three": repartition((N4, (2, 2)), (N3, (3, 1)), (5, 4, 3)),
    "columns on one node": repartition(("gpus4", (4, 1)), ("gpus4", (1, 4)), (7, 6)),
    "halo of two": halo((N2, (2,)), [1], (5, 2)),
    "halo of uneven three": halo((N3, (3,)), [(2, 1)], (8, 2)),
    "halo to the left": halo((N4, (4,)), [(1, 0)], (9,)),
    "halo with corners": halo((N4, (2, 2)), [1, 2], (5, 5)),
    "halo along one of two": halo((N4, (2, 2)), [(0, 0), (1, 2)], (5, 5)),
    "halo in rows of three": halo((N3, (1, 3)), [2, 1], (4, 7, 2)),
    "halo on one node": halo(("gpus4", (2, 2)), [1, (1, 0)], (4, 5)),
}


def there(xs: Tensors, partition: dr.Partition) -> Tensors:
    return [x.detach().to(home.device).requires_grad_() for x, home in zip(xs, partition.homes, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_a_primitive_is_the_formula_and_so_are_its_gradients(name: str) -> None:
    case = CASES[name]
    here = [numbers(size, k).requires_grad_() for k, size in enumerate(case.sizes)]
    leaves = there(here, case.partition())
    outs, expected = case.run(leaves, case.partition()), case.formula(here)
    assert len(outs) == len(expected)
    for out, want in zip(outs, expected):
        torch.testing.assert_close(out.detach().cpu(), want.detach(), check_stride=False)
    weights = [numbers(want.shape, 50 + k) for k, want in enumerate(expected)]
    sent = [w.to(out.device) for w, out in zip(weights, outs)]
    # Not the weights alone: a gradient that depends on the point, and a second one.
    firsts = torch.autograd.grad([(o * w).sin().sum() for o, w in zip(outs, sent)], leaves, create_graph=True)
    wanted = torch.autograd.grad([(o * w).sin().sum() for o, w in zip(expected, weights)], here, create_graph=True)
    for leaf, first, want in zip(leaves, firsts, wanted):
        assert first.place == leaf.place
        torch.testing.assert_close(first.detach().cpu(), want.detach(), check_stride=False)
    torch.autograd.backward([(g**2).sum() for g in firsts])
    torch.autograd.backward([(g**2).sum() for g in wanted])
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad, check_stride=False)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_the_adjoint(name: str, dtype: torch.dtype, bound: float) -> None:
    case = CASES[name]
    xs = there([numbers(size, k, dtype) for k, size in enumerate(case.sizes)], case.partition())
    fx = case.run(xs, case.partition())
    y = [numbers(t.shape, 70 + k, dtype).to(t.device) for k, t in enumerate(fx)]
    fy = torch.autograd.grad(fx, xs, y)
    assert {t.dtype for t in (*fx, *fy)} == {dtype}
    assert adjoint_error(xs, fx, y, list(fy)) < bound
