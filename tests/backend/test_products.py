"""Linear layers and products have a node of their own: gradients are torch's, in one instruction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from agree import REMOTE
from counting import instructions
from distruntime.session.session import Session

Call = Callable[..., torch.Tensor]

# Each has the sizes of its operands, and the product of them.
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Call]] = {
    "two dimensions": (((4, 5), (6, 5), (6,)), F.linear),
    "three": (((2, 4, 5), (6, 5), (6,)), F.linear),
    "four, no bias": (((2, 3, 4, 5), (6, 5)), F.linear),
    "two, no bias": (((4, 5), (6, 5)), F.linear),
    "one row": (((1, 5), (6, 5), (6,)), F.linear),
    "one column": (((4, 1), (6, 1), (6,)), F.linear),
    "one element": (((1, 1), (6, 1), (6,)), F.linear),
    "one result": (((2, 4, 5), (1, 5), (1,)), F.linear),
    "a bias of one": (((2, 4, 5), (6, 5), (1,)), F.linear),
    "a vector": (((5,), (6, 5), (6,)), F.linear),
    "nothing": (((0, 5), (6, 5), (6,)), F.linear),
    "rows apart": (((5, 4, 2), (6, 5), (6,)), lambda x, w, b: F.linear(x.transpose(0, 2), w, b)),
    "columns of a weight": (((2, 4, 5), (5, 6)), lambda x, w: F.linear(x, w.t())),
    "half of a weight": (((2, 4, 5), (6, 10)), lambda x, w: F.linear(x, w[:, :5])),
    "a bias of two dimensions": (((4, 5), (6, 5), (4, 6)), F.linear),
    "scores": (((2, 3, 4, 5), (2, 3, 6, 5)), lambda q, k: q @ k.transpose(-2, -1)),
    "batches": (((3, 4, 5), (3, 5, 6)), torch.matmul),
    "heads apart": (((2, 4, 3, 5), (2, 5, 3, 6)), lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2)),
    "heads that are expanded": (
        ((2, 4, 4, 5), (2, 2, 5, 6)),
        lambda a, b: a @ b[:, :, None].expand(2, 2, 2, 5, 6).reshape(2, 4, 5, 6),
    ),
    "a batch that is expanded": (((2, 4, 5), (5, 6)), lambda a, b: a @ b.expand(2, 5, 6)),
    "other batches": (((2, 3, 4, 5), (3, 5, 6)), torch.matmul),
    "folded": (((2, 3, 5), (5, 6)), torch.matmul),
    "folded columns": (((2, 3, 5), (6, 5)), lambda a, b: a @ b.t()),
    "folded, rows apart": (((3, 2, 5), (5, 6)), lambda a, b: a.transpose(0, 1) @ b),
    "folded, one column": (((2, 3, 1), (1, 6)), torch.matmul),
    "a row is added": (((4, 5), (5, 6), (6,)), lambda a, b, c: torch.addmm(c, a, b)),
    "a number is added": (((4, 5), (5, 6), (1,)), lambda a, b, c: torch.addmm(c, a, b)),
    "a matrix is added": (((4, 5), (5, 6), (4, 6)), lambda a, b, c: torch.addmm(c, a, b)),
    "half a row is added": (((4, 5), (5, 6), (6,)), lambda a, b, c: torch.addmm(c, a, b, alpha=2, beta=0.5)),
    "columns and a row": (((4, 5), (6, 5), (6,)), lambda a, b, c: torch.addmm(c, a, b.t())),
    "two by two": (((4, 5), (5, 6)), torch.matmul),
    "tied": (((2, 4, 5), (5, 5)), lambda x, w: F.linear(F.linear(x, w), w) @ w.t()),
}
# What the gradient of a result is made of: the last one is not contiguous, and the first has no strides.
ENDS: dict[str, Call] = {
    "sum": lambda y: y.sum(),
    "square": lambda y: y.square().sum(),
    "turned": lambda y: (
        y.transpose(0, -1).contiguous() * torch.arange(float(y.numel())).view(y.transpose(0, -1).shape).to(y)
    ).sum(),
}


def operands(sizes: tuple[tuple[int, ...], ...], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(len(sizes))
    return [torch.randn(size, dtype=dtype).to(device).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_equal_to_the_last_bit(session: object, name: str, dtype: torch.dtype) -> None:
    sizes, call = CALLS[name]
    # Every choice of what wants a gradient. All of them do with each end.
    every = (1 << len(sizes)) - 1
    choices = [*((wanted, "sum") for wanted in range(1, every)), *((every, end) for end in ENDS)]
    for wanted, end in choices:
        found = []
        for device in ("cpu", REMOTE):
            given = operands(sizes, device, dtype)
            for k, one in enumerate(given):
                one.requires_grad_(bool(wanted >> k & 1))
            out = call(*given)
            ENDS[end](out).backward()
            grads = [(one.grad.cpu(), one.grad.stride()) for one in given if one.grad is not None]
            found.append((out.detach().cpu(), out.stride(), grads))
        (here, its_stride, grads), (there, stride, others) = found
        assert torch.equal(here, there) and its_stride == stride and len(grads) == len(others)
        for (grad, its_stride), (other, stride) in zip(grads, others):
            assert torch.equal(grad, other) and its_stride == stride


@pytest.mark.parametrize(
    ("name", "count"),
    [("three", 2), ("four, no bias", 2), ("batches", 2), ("folded", 2), ("scores", 3), ("a row is added", 2)],
)
def test_two_instructions_with_gradients(session: Session, name: str, count: int) -> None:
    sizes, call = CALLS[name]
    given = operands(sizes, REMOTE, torch.float32)
    grad = torch.ones_like(call(*given))

    def both() -> object:
        return torch.autograd.grad(call(*given), given, grad)

    both()
    dr.synchronize()
    # A transposed operand is one more, and its gradient too.
    assert instructions(session, both) == count + (name == "scores")


@pytest.mark.parametrize(
    "name", ["three", "four, no bias", "scores", "folded", "folded columns", "batches", "a row is added"]
)
def test_gradients_of_gradients(session: object, name: str) -> None:
    sizes, call = CALLS[name]
    found = []
    for device in ("cpu", REMOTE):
        given = operands(sizes, device, torch.float64)
        first = torch.autograd.grad(call(*given).sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum((one.square().sum() for one in first), torch.tensor(0.0)), given)
        third = torch.autograd.functional.hvp(
            lambda *args: call(*args).sin().sum(), tuple(given), tuple(torch.ones_like(t) for t in given)
        )[1]
        found.append([one.detach().cpu() for one in (*first, *second, *third)])
    for here, there in zip(*found):
        torch.testing.assert_close(there, here)


def test_it_saves_what_a_wanted_gradient_is_made_of(session: object) -> None:
    weight = torch.randn(6, 5).to(REMOTE).requires_grad_()
    x = torch.randn(4, 5).to(REMOTE)
    frozen = weight.detach()
    # A frozen weight needs no input, and an input that wants nothing no weight.
    source = x.clone().requires_grad_()
    middle = source * 2
    out = F.linear(middle, frozen)
    held = weakref.ref(middle)
    del middle
    gc.collect()
    assert held() is None
    frozen.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = F.linear(x, weight)
    with torch.no_grad():
        weight.mul_(1)
    out.sum().backward()
    out = F.linear(x, weight)
    x.mul_(1)
    with pytest.raises(RuntimeError, match=r"at version 1; expected version 0 instead"):
        out.sum().backward()


def test_what_looks_at_saved_tensors_and_nodes(session: object) -> None:
    x, w, b = operands(((2, 4, 5), (6, 5), (6,)), REMOTE, torch.float32)
    packed: list[torch.Size] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = F.linear(x, w, b)
    out.sum().backward(retain_graph=True)
    assert sorted(packed) == [torch.Size([2, 4, 5]), torch.Size([6, 5])]
    first, w.grad = w.grad, None
    out.sum().backward()
    assert first is not None and w.grad is not None and torch.equal(first, w.grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        again = torch.autograd.grad(F.linear(x, w, b).sum(), w)[0]
    kept = torch.autograd.grad(checkpoint(F.linear, x, w, b, use_reentrant=False).sum(), w)[0]
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        watched = torch.autograd.grad(F.linear(x, w, b).sum(), w)[0]
    assert torch.equal(again, first) and torch.equal(kept, first) and torch.equal(watched, first)


def test_batches_of_gradients_and_transforms(session: object) -> None:
    def of_all(device: str) -> list[torch.Tensor]:
        x, w, b = operands(((2, 4, 5), (6, 5), (6,)), device, torch.float64)
        out = F.linear(x, w, b)
        many = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape).to(device)
        batched = torch.autograd.grad(out, (x, w, b), many, is_grads_batched=True)
        by_func = torch.func.grad(lambda w: F.linear(x, w, b).sin().sum())(w)
        jacobian = torch.func.jacrev(lambda x: x @ w.t())(x[0])
        mapped = torch.func.vmap(torch.func.grad(lambda x: (x @ x.transpose(0, 1)).sum()))(x)
        return [t.detach().cpu() for t in (*batched, by_func, jacobian, mapped)]

    for here, there in zip(of_all("cpu"), of_all(REMOTE)):
        torch.testing.assert_close(there, here)


def test_a_program_holds_the_formula(session: object) -> None:
    """So the worker's compiler sees what it can fuse, and a backward pass may be in another call."""
    layer = nn.Linear(5, 6).to(REMOTE)
    x = torch.randn(2, 4, 5).to(REMOTE)
    plain = torch.autograd.grad(layer(x).sum(), layer.weight)[0]

    @dr.program
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(layer(x).sum(), layer.weight)[0]

    for _ in range(4):
        assert torch.equal(step(x), plain)
    assert step.replays == 2


@pytest.mark.parametrize("call", [F.linear, torch.matmul])
def test_operands_apart_are_told(session: object, call: Any) -> None:
    x, w = torch.ones(2, 3, 4, device="remote:0"), torch.ones(4, 4, device="remote:1", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"remote:0.*remote:1|node 0.*node 1"):
        call(x, w)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        call(x, torch.ones(5, 5, device="remote:0", requires_grad=True))
