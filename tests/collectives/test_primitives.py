"""The primitives of partitioned tensors: each against plain local code, its gradients too, and the adjoint
test; plans; errors; poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.collectives import plans
from distruntime.collectives.groups import groups_of
from fewer import fewer
from parts import (
    Shape,
    Tensors,
    adjoint_error,
    all_gather,
    all_sum,
    broadcast,
    failed,
    halo,
    numbers,
    ones,
    part,
    readable,
    reduce_scatter,
    repartition,
    sum_reduce,
    there,
)

F = dr.primitives


@pytest.fixture(scope="module", autouse=True)
def four() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=4, simulate_cuda=2):
        yield


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


@pytest.mark.parametrize("name", fewer(CASES, 4, "the formula in other cases"))
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
    wanted = torch.autograd.grad(
        [(o * w).sin().sum() for o, w in zip(expected, weights)], here, create_graph=True
    )
    for leaf, first, want in zip(leaves, firsts, wanted):
        assert first.place == leaf.place
        torch.testing.assert_close(first.detach().cpu(), want.detach(), check_stride=False)
    torch.autograd.backward([(g**2).sum() for g in firsts])
    torch.autograd.backward([(g**2).sum() for g in wanted])
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad, check_stride=False)


@pytest.mark.parametrize("name", fewer(CASES, 4, "the adjoint in other cases"))
def test_the_gradient_is_the_adjoint(name: str) -> None:
    case, on = CASES[name], CASES[name].partition()
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        xs = there([numbers(size, k, dtype) for k, size in enumerate(case.sizes)], on)
        fx = case.run(xs, on)
        y = [numbers(t.shape, 70 + k, dtype).to(t.device) for k, t in enumerate(fx)]
        fy = torch.autograd.grad(fx, xs, y)
        assert {t.dtype for t in (*fx, *fy)} == {dtype}
        assert adjoint_error(xs, fx, y, list(fy)) < bound


def test_the_adjoint_of_one_is_the_other() -> None:
    one, four, outs = part((1,), (1,)), part(N4, (4,)), [numbers((3,), k) for k in range(4)]
    for there_, back in (
        (lambda xs: F.broadcast(xs, one, four), lambda ys: F.sum_reduce(ys, four, one)),
        (lambda xs: F.repartition(xs, one, four), lambda ys: F.repartition(ys, four, one)),
    ):
        x = numbers((12,), 9).to(one.homes[0].device).requires_grad_()
        fx = there_([x])
        ys = [numbers(t.shape, k).to(t.device) for k, t in enumerate(fx)]
        torch.testing.assert_close(torch.autograd.grad(fx, [x], ys)[0].cpu(), back(ys)[0].cpu())
    for forth, back in (
        (lambda xs: F.all_gather(xs, four, 0), lambda ys: F.reduce_scatter(ys, four, 0)),
        (lambda xs: F.all_sum_reduce(xs, four, 0), lambda ys: F.all_sum_reduce(ys, four, 0)),
    ):
        xs = there(outs, four)
        fx = forth(xs)
        ys = [numbers(t.shape, k).to(t.device) for k, t in enumerate(fx)]
        for got, want in zip(torch.autograd.grad(fx, xs, ys), back(ys)):
            torch.testing.assert_close(got.cpu(), want.cpu())


def test_a_convolution_over_three_workers_is_the_serial_one() -> None:
    on = part(N3, (1, 1, 3))
    x, weight, target = (
        numbers((2, 3, 14), 0).requires_grad_(),
        numbers((4, 3, 5), 1).requires_grad_(),
        numbers((2, 4, 14), 2),
    )
    loss = ((torch.nn.functional.conv1d(x, weight, padding=2).tanh() - target) ** 2).sum()
    loss.backward()

    x_, weight_ = (t.detach().clone().requires_grad_() for t in (x, weight))
    shards, targets = on.scatter(x_), on.scatter(target)
    weights = F.broadcast([weight_.to(on.homes[0].device)], part(N1, (1, 1, 1)), on)
    wide = F.halo_exchange(shards, on, [0, 0, 2])
    assert [tuple(t.shape) for t in wide] == [(2, 3, 7), (2, 3, 9), (2, 3, 6)]
    wide = [torch.nn.functional.pad(t, (2 * (k == 0), 2 * (k == 2))) for k, t in enumerate(wide)]
    outs = [torch.nn.functional.conv1d(t, w).tanh() for t, w in zip(wide, weights)]
    parts = [((out - t) ** 2).sum() for out, t in zip(outs, targets)]
    total = F.sum_reduce(parts, part(N3, (3,)), part(N1, (1,)))[0]
    total.backward()
    torch.testing.assert_close(total.detach().cpu(), loss.detach())
    torch.testing.assert_close(x_.grad, x.grad)
    torch.testing.assert_close(weight_.grad, weight.grad)


def test_halos_of_a_width_for_each_part() -> None:
    on, x = part(N3, (3,)), torch.arange(10.0)  # 0-3, 4-6, 7-9
    outs = F.halo_exchange(on.scatter(x), on, [[(5, 1), (2, 0), (3, 7)]])
    assert [t.tolist() for t in outs] == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9]]


def test_shards_need_not_be_balanced_and_repartition_balances_them() -> None:
    on = part(N3, (3,))
    xs = there([numbers((n, 2), n) for n in (5, 1, 1)], on)
    x = torch.cat([t.detach().cpu() for t in xs])
    for outs, want in (
        (F.repartition(xs, on, on), list(torch.tensor_split(x, 3))),
        (F.all_gather(xs, on, 0), [x, x, x]),
        (F.halo_exchange(xs, on, [1]), [x[:6], x[4:7], x[5:]]),
    ):
        for got, expected in zip(outs, want):
            torch.testing.assert_close(got.detach().cpu(), expected)
    grads = torch.autograd.grad(F.all_gather(xs, on, 0)[1].pow(2).sum(), xs)
    for got, t in zip(grads, xs):
        torch.testing.assert_close(got.cpu(), 2 * t.detach().cpu())


def test_dtypes_and_strides() -> None:
    two, rows, columns = part(N2, (2,)), part(N4, (4, 1)), part(N4, (1, 4))
    x = torch.arange(40).reshape(5, 8)
    outs = F.repartition(rows.scatter(x.t().contiguous().t() > 7), rows, columns)
    assert torch.equal(columns.gather(outs), x > 7)
    wide = [
        torch.view_as_complex(numbers((6, 4, 2), k)).to(home.device).t().conj()
        for k, home in enumerate(two.homes)
    ]
    total = sum(t.cpu() for t in wide)
    for out in F.all_sum_reduce(wide, two, 0):
        torch.testing.assert_close(out.cpu(), total)
    for k, out in enumerate(F.reduce_scatter([w.cfloat() for w in wide], two, 0)):
        torch.testing.assert_close(out.cpu(), total.cfloat().chunk(2)[k])


def test_results_are_new_tensors_and_what_is_in_its_place_is_returned_itself() -> None:
    for name, case in CASES.items():
        on = case.partition()
        xs = [x.detach() for x in there([numbers(size, k) for k, size in enumerate(case.sizes)], on)]
        before = dr.fetch(xs)
        for out in case.run(xs, on):
            out.add_(1)
        assert all(torch.equal(a, b) for a, b in zip(before, dr.fetch(xs))), name
    assert all(a is b for a, b in zip(F.repartition(xs, on, on), xs))
    assert all(a is b for a, b in zip(F.halo_exchange(xs, on, [0, (0, 0)]), xs))


def test_a_result_that_nobody_uses_and_a_shard_that_wants_no_gradient() -> None:
    on = part(N3, (3,))
    xs = there([numbers((4,), k) for k in N3], on)
    xs[1] = xs[1].detach()
    for run in (F.all_gather, F.reduce_scatter, F.all_sum_reduce):
        outs = run(xs, on, 0)
        first, last = torch.autograd.grad((outs[2] ** 2).sum(), [xs[0], xs[2]])
        assert first.place == xs[0].place and last.place == xs[2].place
    with torch.no_grad():
        assert not any(t.requires_grad for t in F.halo_exchange(xs, on, [1]))


# Plans


def test_plans_are_made_once_and_so_are_groups() -> None:
    def everything() -> None:
        for name in CASES:
            case = CASES[name]
            xs = there([numbers(size, k) for k, size in enumerate(case.sizes)], case.partition())
            torch.autograd.backward([t.sum() for t in case.run(xs, case.partition())])

    cached: list[Any] = [function for function in vars(plans).values() if hasattr(function, "cache_info")]

    def state() -> tuple[int, int]:
        return sum(f.cache_info().misses for f in cached), len(groups_of(part(N1, (1,)).session)._groups)

    for function in cached:
        function.cache_clear()
    start = state()[0]
    everything()
    first, hits = state(), sum(f.cache_info().hits for f in cached)
    assert first[0] > start
    everything()
    assert state() == first
    assert sum(f.cache_info().hits for f in cached) > hits
    assert all(f.cache_info().maxsize for f in cached)


def test_as_one_all_to_all_where_copies_would_be_more_than_places() -> None:
    def exchanged(x: dr.mesh.Partition, y: dr.mesh.Partition, size: Shape) -> bool:
        cuts = [plans.cuts_of(size, p.shape) for p in (x, y)]
        plan = plans.transfer(x.places, cuts[0], y.places, cuts[1], x.shape, y.shape, 4)
        (stage,), (back,) = plan.stages, plan.adjoint.stages
        assert (stage.exchange is None) == (back.exchange is None)
        return stage.exchange is not None

    assert exchanged(part(N4, (4, 1)), part(N4, (1, 4)), (8, 8))
    assert not exchanged(part(N4, (4, 1)), part(N4, (1, 4)), (1, 8))
    assert not exchanged(part(N4, (4,)), part((1, 2, 3, 0), (4,)), (8,))
    assert not exchanged(part(N1, (1,)), part(N4, (4,)), (8,))


# Failures


def test_what_does_not_depend_on_a_failed_shard_is_whole() -> None:
    def shards(bad: int) -> Tensors:
        return [
            failed((2, 2), k) if k == bad else torch.ones(2, 2).to(home.device)
            for k, home in enumerate(part(N4, (4,)).homes)
        ]

    four = part(N4, (4,))
    assert readable(F.halo_exchange(shards(3), four, [1])) == [True, True, False, False]
    assert readable(F.repartition(shards(1), four, part((2, 3, 0, 1), (4,)))) == [True, False, True, True]
    assert readable(F.repartition(shards(0), four, part(N2, (2,)))) == [False, True]
    crossed = part((3, 2, 1, 0), (2, 2))
    assert readable(F.repartition(shards(0), part(N4, (4, 1)), crossed)) == [False] * 4  # one all_to_all
    square = part(N4, (2, 2))
    # The last two are of other groups.
    assert readable(F.all_sum_reduce(shards(0), square, 1)) == [False, False, True, True]


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too few shards": (
        lambda: F.all_gather(ones(N2), part(N3, (3,)), 0),
        dr.errors.UsageError,
        "one shard for each of the 3 places .* got 2",
    ),
    "no list": (
        lambda: F.all_gather(ones(N2)[0], part(N2, (2,)), 0),
        dr.errors.UsageError,
        "must be a list with one shard .*Tensor",
    ),
    "another place": (
        lambda: F.halo_exchange(ones((1, 0)), part(N2, (2,)), [1]),
        dr.errors.PlacementError,
        r"xs\[0\] is on node 1 cpu, .*node 0",
    ),
    "a local shard": (
        lambda: F.all_sum_reduce([torch.ones(2)] * 2, part(N2, (2,)), 0),
        dr.errors.PlacementError,
        r"xs\[0\] is a local tensor",
    ),
    "no tensor": (
        lambda: F.all_sum_reduce([1, 2], part(N2, (2,)), 0),
        dr.errors.UsageError,
        "must be a remote tensor, got int",
    ),
    "no partition": (
        lambda: F.all_sum_reduce(ones(N2), [0, 1], 0),
        dr.errors.UsageError,
        "P must be a distruntime.mesh.Partition, got list",
    ),
    "dtypes": (
        lambda: F.all_gather([ones(N2)[0], ones(N2)[1].double()], part(N2, (2,)), 0),
        dr.errors.UsageError,
        r"one dtype: \[0\] is .*float32.*\[1\] is .*float64",
    ),
    "summands": (
        lambda: F.all_sum_reduce(ones(N2, (2,), (3,)), part(N2, (2,)), 0),
        dr.errors.UsageError,
        r"xs\[0\] \(on node 0 cpu\) is \(2,\), xs\[1\] \(on node 1 cpu\) is \(3,\)",
    ),
    "summands to one": (
        lambda: F.sum_reduce(ones(N2, (2,), (3,)), part(N2, (2,)), part(N1, (1,))),
        dr.errors.UsageError,
        r"ys\[0\] .* is \(2,\), ys\[1\] .* is \(3,\)",
    ),
    "parts that differ": (
        lambda: F.all_gather(ones(N2, (2, 3), (2, 4)), part(N2, (2,)), 0),
        dr.errors.UsageError,
        r"shard 0 is \(2, 3\), shard 1 is \(2, 4\), expected alike in all dimensions but 0",
    ),
    "wholes that differ": (
        lambda: F.reduce_scatter(ones(N2, (2, 3), (1, 3)), part(N2, (2,)), 0),
        dr.errors.UsageError,
        r"shard 0 is \(2, 3\), shard 1 is \(1, 3\), expected alike in all dimensions",
    ),
    "a ragged whole": (
        lambda: F.repartition(ones(N4, (2, 2), (2, 2), (2, 2), (3, 2)), part(N4, (2, 2)), part(N1, (1, 1))),
        dr.errors.UsageError,
        r"along dimension 0 shard 2 of \(2, 2\) is 2 long and shard 3 of \(3, 2\) is 3, "
        r"expected the same, as both are part 1 of 2",
    ),
    "ragged where it is not cut": (
        lambda: F.halo_exchange(ones(N2, (2, 2), (2, 3)), part(N2, (2,)), [1]),
        dr.errors.UsageError,
        "along dimension 1 .* as both are whole there",
    ),
    "shards of other dimensions": (
        lambda: F.repartition(ones(N2, (2,), (2, 1)), part(N2, (2,)), part(N1, (1,))),
        dr.errors.UsageError,
        r"as many dimensions each: shard 0 is \(2,\), shard 1 is \(2, 1\)",
    ),
    "shards of too few dimensions": (
        lambda: F.repartition(ones(N2), part(N2, (2, 1)), part(N1, (1, 1))),
        dr.errors.UsageError,
        "shard 0 has 1 dimensions, .* and the partition 2",
    ),
    "partitions of other dimensions": (
        lambda: F.repartition(ones(N2), part(N2, (2,)), part(N1, (1, 1))),
        dr.errors.UsageError,
        r"P_x has 1 dimensions, \(2,\), and P_y 2, \(1, 1\)",
    ),
    "a broadcast that does not fit": (
        lambda: F.broadcast(ones(N2), part(N2, (2,)), part(N3, (3,))),
        dr.errors.UsageError,
        r"shape \(2,\) cannot be broadcast to one of shape \(3,\)",
    ),
    "a broadcast to fewer dimensions": (
        lambda: F.broadcast(ones(N1), part(N1, (1, 1)), part(N3, (3,))),
        dr.errors.UsageError,
        "more dimensions",
    ),
    "a sum that does not fit": (
        lambda: F.sum_reduce(ones(N3), part(N3, (3,)), part(N2, (2,))),
        dr.errors.UsageError,
        "cannot be broadcast",
    ),
    "an axis that is not cut": (
        lambda: F.all_gather(ones(N2, (2, 2), (2, 2)), part(N2, (2,)), -1),
        dr.errors.UsageError,
        "axis must be .* got -1",
    ),
    "no axis": (lambda: F.all_gather(ones(N2), part(N2, (2,)), "0"), dr.errors.UsageError, "axis must be"),
    "axes that are not there": (
        lambda: F.all_sum_reduce(ones(N2), part(N2, (2,)), (0, 1)),
        dr.errors.UsageError,
        r"0 to 0, got \(0, 1\)",
    ),
    "a halo too wide": (
        lambda: F.halo_exchange(ones(N3, (2,), (1,), (2,)), part(N3, (3,)), [2]),
        dr.errors.UsageError,
        "along dimension 0 shard 0 wants 2 from shard 1, which is 1 long there",
    ),
    "a halo of other dimensions": (
        lambda: F.halo_exchange(ones(N2), part(N2, (2,)), [1, 1]),
        dr.errors.UsageError,
        "each of the 1 dimensions",
    ),
    "a halo below zero": (
        lambda: F.halo_exchange(ones(N2), part(N2, (2,)), [-1]),
        dr.errors.UsageError,
        r"halo\[0\] must be .* got -1",
    ),
    "a halo for other parts": (
        lambda: F.halo_exchange(ones(N2), part(N2, (2,)), [[(1, 1)] * 3]),
        dr.errors.UsageError,
        "each of the 2 parts",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_says_what(name: str) -> None:
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
