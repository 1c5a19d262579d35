"""Gradients of collectives: each functional form against the same formula on local tensors, and torch's own
numerical check, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from fewer import fewer
from processes import STARTING

F = dr.functional
Tensors = list[torch.Tensor]
SHAPE = (6, 2)


@pytest.fixture(scope="module")
def three() -> Any:
    dr.shutdown()
    with dr.init_master_worker(world_size=3, timeout=STARTING):
        yield dr.distributed.new_group()


def there(value: torch.Tensor, node: int = 0) -> torch.Tensor:
    with dr.node(node):
        return value.detach().to(REMOTE).requires_grad_(value.requires_grad)


def numbers(*seeds: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(
        tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(hash(seeds) & 0xFFFF)
    ).requires_grad_()


def reduced(op: str) -> Callable[[Tensors], torch.Tensor]:
    by = {
        "SUM": lambda s: s.sum(0),
        "PRODUCT": lambda s: s.prod(0),
        "MIN": lambda s: s.amin(0),
        "MAX": lambda s: s.amax(0),
    }[op]
    return lambda xs: by(torch.stack(xs))


# By name: how many tensors and where, what runs on workers, and the formula.
Form = tuple[list[int], Callable[[Tensors, dr.distributed.ProcessGroup], Any], Callable[[Tensors], Any]]
EACH = [0, 1, 2]
FORMS: dict[str, Form] = {
    **{
        f"all_reduce {op}": (
            EACH,
            lambda xs, g, op=op: F.all_reduce(xs, getattr(dr.distributed.ReduceOp, op), g),
            lambda xs, op=op: [reduced(op)(xs) for _ in xs],
        )
        for op in ("SUM", "PRODUCT", "MIN", "MAX")
    },
    "broadcast": ([1], lambda xs, g: F.broadcast(xs[0], g), lambda xs: [xs[0] * 1 for _ in EACH]),
    "reduce": (EACH, lambda xs, g: [F.reduce(xs, 2, group=g)], lambda xs: [reduced("SUM")(xs)]),
    "all_gather": (EACH, lambda xs, g: F.all_gather(xs, g), lambda xs: [torch.cat(xs) for _ in xs]),
    "gather": (EACH, lambda xs, g: F.gather(xs, 1, g), lambda xs: [x * 1 for x in xs]),
    "scatter": ([2, 2, 2], lambda xs, g: F.scatter(xs, g), lambda xs: [x * 1 for x in xs]),
    "reduce_scatter": (
        EACH,
        lambda xs, g: F.reduce_scatter(xs, group=g),
        lambda xs: list(reduced("SUM")(xs).chunk(3)),
    ),
    "all_to_all": (
        EACH,
        lambda xs, g: [t for row in F.all_to_all([list(x.split([1, 2, 3])) for x in xs], g) for t in row],
        lambda xs: [x.split([1, 2, 3])[j] for j in EACH for x in xs],
    ),
    "all_to_all_single": (
        EACH,
        lambda xs, g: F.all_to_all_single(xs, [[1, 2, 3], [6, 0, 0], [2, 2, 2]], g),
        lambda xs: [
            torch.cat([x.split(s)[j] for x, s in zip(xs, ([1, 2, 3], [6, 0, 0], [2, 2, 2]))]) for j in EACH
        ],
    ),
}


def weigh(outs: Tensors, used: Sequence[int]) -> torch.Tensor:
    """A scalar, at the first output, that depends on those outputs in ways of their own, not on all elements
    alike.
    """
    total = None
    for k in used:
        weight = numbers(50, k, shape=outs[k].shape).detach()
        weight = weight.to(outs[k].device) if isinstance(outs[k], dr.DistributedTensor) else weight
        term = (outs[k] * weight).sin().sum()
        term = term.to(outs[used[0]].device)
        total = term if total is None else total + term
    assert total is not None
    return total


def both(
    name: str,
    group: dr.distributed.ProcessGroup,
    used: Sequence[int] | None = None,
    xs: Tensors | None = None,
) -> list[tuple[Any, Any]]:
    """The gradients on workers and of the formula."""
    nodes, run, formula = FORMS[name]
    here = [numbers(k) for k, _ in enumerate(nodes)] if xs is None else xs
    leaves = [there(x, node) for x, node in zip(here, nodes)]
    outs, expected = run(leaves, group), formula(here)
    picked = range(len(expected)) if used is None else used
    weigh(outs, picked).backward()
    weigh(expected, picked).backward()
    for got, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(got.detach().cpu(), wanted.detach())
    assert all(leaf.grad is None or leaf.grad.place == leaf.place for leaf in leaves)
    return [(None if leaf.grad is None else leaf.grad.cpu(), x.grad) for leaf, x in zip(leaves, here)]


def alike(pairs: list[tuple[Any, Any]]) -> None:
    nothing = torch.zeros(SHAPE, dtype=torch.float64)
    for got, wanted in pairs:
        torch.testing.assert_close(nothing if got is None else got, nothing if wanted is None else wanted)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_the_formulas_gradient(three: dr.distributed.ProcessGroup, name: str) -> None:
    alike(both(name, three))


@pytest.mark.parametrize("name", FORMS)
def test_also_where_only_one_member_uses_its_result(three: dr.distributed.ProcessGroup, name: str) -> None:
    alike(both(name, three, used=[0]))


@pytest.mark.parametrize("name", fewer(FORMS, 3, "another collective, 1 s"))
def test_torchs_numerical_check(three: dr.distributed.ProcessGroup, name: str) -> None:
    nodes, run, _ = FORMS[name]
    leaves = [there(numbers(k), node) for k, node in enumerate(nodes)]

    def local(
        *xs: torch.Tensor,
    ) -> torch.Tensor:  # gradcheck perturbs and compares here; the collective runs there
        with_nodes = [x.to(leaf.device) for x, leaf in zip(xs, leaves)]
        return torch.cat([out.cpu().reshape(-1) for out in run(with_nodes, three)])

    assert torch.autograd.gradcheck(
        local, [leaf.detach().cpu().requires_grad_() for leaf in leaves], fast_mode=True
    )


@pytest.mark.parametrize(
    "name",
    ["all_reduce SUM", "all_reduce PRODUCT", "all_reduce MAX", "all_gather", "reduce", "all_to_all_single"],
)
def test_double_backward(three: dr.distributed.ProcessGroup, name: str) -> None:
    nodes, run, formula = FORMS[name]
    here = [numbers(k) for k, _ in enumerate(nodes)]
    leaves = [there(x, node) for x, node in zip(here, nodes)]
    picked = range(len(formula(here)))
    firsts = torch.autograd.grad(weigh(run(leaves, three), picked), leaves, create_graph=True)
    expected = torch.autograd.grad(weigh(formula(here), picked), here, create_graph=True)
    sum((g**2).sum().to(firsts[0].device) for g in firsts).backward()
    sum((g**2).sum() for g in expected).backward()
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad)


def test_a_product_with_zeros_and_a_tie_of_extremes(three: dr.distributed.ProcessGroup) -> None:
    values = [
        torch.tensor([0.0, 2.0, 3.0, 0.0]),
        torch.tensor([5.0, 0.0, 3.0, 0.0]),
        torch.tensor([5.0, 2.0, 3.0, 1.0]),
    ]
    for name in ("all_reduce PRODUCT", "all_reduce MAX", "all_reduce MIN"):
        xs = [v.double().requires_grad_() for v in values]
        for got, wanted in both(name, three, xs=xs):
            torch.testing.assert_close(got, wanted)


def test_strided_and_complex_inputs(three: dr.distributed.ProcessGroup) -> None:
    here = [numbers(k, dtype=torch.complex128) for k in EACH]
    leaves = [there(x, k) for k, x in enumerate(here)]
    outs = F.all_reduce([x.t().conj() for x in leaves], group=three)
    expected = torch.stack([x.t().conj() for x in here]).sum(0)
    torch.testing.assert_close(outs[1].detach().cpu(), expected.detach())
    (outs[1].abs() ** 3).sum().backward()
    (expected.abs() ** 3).sum().backward()
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad)


# Forms that write


def test_a_leaf_is_not_written_as_in_torch(three: dr.distributed.ProcessGroup) -> None:
    leaves = [there(numbers(k), k) for k in EACH]
    with pytest.raises(
        RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"
    ):
        dr.distributed.all_reduce(leaves, group=three)
    with torch.no_grad():
        dr.distributed.all_reduce(leaves, group=three)
    torch.testing.assert_close(leaves[0].detach().cpu(), sum(numbers(k).detach() for k in EACH))


def test_forms_that_write_are_differentiated(three: dr.distributed.ProcessGroup) -> None:
    here = [numbers(k) for k in EACH]
    leaves = [there(x, k) for k, x in enumerate(here)]
    squares = [x * x for x in leaves]
    dr.distributed.all_reduce(squares, group=three)
    expected = sum(x * x for x in here)
    wide = [there(torch.zeros(18, 2, dtype=torch.float64), k) for k in EACH]
    dr.distributed.all_gather_into_tensor(wide, squares, three)
    parts = [there(torch.zeros(SHAPE, dtype=torch.float64), k) for k in EACH]
    dr.distributed.scatter(parts, list(wide[0].chunk(3)), 0, three)
    dr.distributed.broadcast(parts, 2, three)
    dr.distributed.reduce(parts, 0, group=three)
    (parts[0] ** 2).sum().backward()
    ((3 * expected) ** 2).sum().backward()
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad)


def test_what_was_saved_and_then_written_is_noticed(three: dr.distributed.ProcessGroup) -> None:
    leaves = [there(numbers(k), k) for k in EACH]
    tripled = [x * 3 for x in leaves]
    saved = tripled[0] ** 2
    with torch.no_grad():
        dr.distributed.all_reduce(tripled, group=three)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_no_grad_and_detached_record_nothing(three: dr.distributed.ProcessGroup) -> None:
    leaves = [there(numbers(k), k) for k in EACH]
    with torch.no_grad():
        assert not any(t.requires_grad for t in F.all_reduce(leaves, group=three))
    assert not any(t.requires_grad for t in F.all_reduce([x.detach() for x in leaves], group=three))
    assert all(
        t.requires_grad
        for t in F.all_reduce([leaves[0].detach(), leaves[1], leaves[2].detach()], group=three)
    )


@pytest.mark.parametrize("op", ["PRODUCT", "MIN", "MAX"])
def test_what_has_no_gradient_says_so(three: dr.distributed.ProcessGroup, op: str) -> None:
    leaves = [there(numbers(k), k) for k in EACH]
    out = F.reduce(leaves, 0, getattr(dr.distributed.ReduceOp, op), three)
    with pytest.raises(NotImplementedError, match=f"gradient of reduce by ReduceOp.{op} is not defined"):
        out.sum().backward()


def test_asynchronous_forms_are_differentiated_too(three: dr.distributed.ProcessGroup) -> None:
    here = [numbers(k) for k in EACH]
    leaves = [there(x, k) for k, x in enumerate(here)]
    values = [x * 2 for x in leaves]
    work = dr.distributed.all_reduce(values, group=three, async_op=True)
    assert work is not None
    work.wait()
    (values[1] ** 2).sum().backward()
    ((2 * sum(here)) ** 2).sum().backward()
    for leaf, x in zip(leaves, here):
        torch.testing.assert_close(leaf.grad.cpu(), x.grad)
