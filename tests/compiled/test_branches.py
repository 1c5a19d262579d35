"""`torch.cond`, loops and scans of remote tensors: what a value decides is decided anew at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import distruntime as dr
from agree import REMOTE
from dynamo import DYNAMO_WARNS

pytestmark = [
    pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator"),
    *DYNAMO_WARNS,
]


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _branch(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() - 1, (x,))


def _loop(x: torch.Tensor) -> Any:
    steps = (x.abs().sum() * 2).long()
    return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 1.5 + 1), (steps, x))


def _scanned(x: torch.Tensor) -> Any:
    rows = torch.stack([x, x + 1, x * 2])
    return (
        *scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x), rows),
        associative_scan(torch.add, rows, 0, combine_mode="generic"),
        map_over(lambda row, x: row * x, rows, x),
    )


@pytest.mark.parametrize("function", [_branch, _loop, _scanned])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_decides_at_each_call(function: Callable[[torch.Tensor], Any], compiled: bool) -> None:
    remote = torch.compile(function, backend="distruntime") if compiled else function
    for k in range(6):
        x = torch.tensor([0.3, -0.2, 1.0]) * (-1) ** k
        expected, found = function(x), remote(x.to(REMOTE))
        for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (expected, found)), strict=True):
            assert other.device.type == "remote"
            torch.testing.assert_close(other.cpu(), one)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_branch_has_its_gradient(compiled: bool) -> None:
    remote = torch.compile(_branch, backend="distruntime") if compiled else _branch
    for k in range(5):
        gradients = []
        for function, place in ((_branch, "cpu"), (remote, REMOTE)):
            x = torch.tensor([0.3, -0.2, 1.0], device=place) * (-1) ** k
            x.requires_grad_()
            function(x).square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad.cpu())
        torch.testing.assert_close(*gradients)


def test_a_program_refuses_a_branch() -> None:
    x = torch.ones(3, device=REMOTE)
    with pytest.raises(dr.errors.NotSupportedError, match="read a value"):
        dr.program(_branch)(x)
