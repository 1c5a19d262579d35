"""`torch.cond`, loops, scans and numbers that are read: what a value decides is decided anew at each call."""

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
from distruntime.compiled import backend
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


# -- numbers that are read in one graph ----------------------------------------------------------------------


def _numbers(x: torch.Tensor, counts: torch.Tensor) -> Any:
    whole, part = x.long().sum().item(), counts[0].item()
    return x * whole, whole, torch.ones(2, device=x.device) * part, part


def _pieces(x: torch.Tensor, counts: torch.Tensor) -> Any:
    return [one.sum() for one in torch.split(x, counts.tolist())]


def _chosen(x: torch.Tensor, counts: torch.Tensor) -> Any:
    return x[x > x.mean()] * 2, torch.nonzero(counts)


READS = {"numbers": _numbers, "sizes": _pieces, "what depends on data": _chosen}


def _reads(function: Callable[..., Any], device: str) -> list[Any]:
    found = []
    for k in range(1, 6):
        x = torch.arange(6.0) * k - 4
        results = function(x.to(device), torch.tensor([k, 6 - k], device=device))
        found.append([one.cpu().tolist() if isinstance(one, torch.Tensor) else one for one in results])
    return found


@pytest.mark.parametrize("name", READS)
def test_a_number_is_read_at_each_call(name: str) -> None:
    compiled = torch.compile(READS[name], backend="distruntime", fullgraph=True)
    assert _reads(compiled, REMOTE) == _reads(READS[name], "cpu")


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_that_is_read_has_a_say_in_gradients() -> None:
    found = []
    function = lambda x: (x * x.detach().sum().item()).sin().sum()  # noqa: E731
    for run, device in ((function, "cpu"), (torch.compile(function, backend="distruntime"), REMOTE)):
        for k in range(6):
            x = (torch.arange(3.0) + k).to(device).requires_grad_()
            run(x).backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
    for here, there in zip(found[:6], found[6:]):
        torch.testing.assert_close(there, here)


@pytest.mark.filterwarnings("default:a graph that torch.compile has traced runs operator by operator")
def test_a_graph_that_reads_a_number_says_so() -> None:
    compiled = torch.compile(lambda x: x.sum().item(), backend="distruntime", fullgraph=True)
    with pytest.warns(UserWarning, match=r"(?s)a value decides what it does.*x\.sum\(\)\.item\(\)"):
        compiled(torch.ones(3, device=REMOTE))


def test_a_wait_that_no_trace_shows_is_no_part_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_decides", lambda node: False)
    compiled = torch.compile(_pieces, backend="distruntime", fullgraph=True)
    assert _reads(compiled, REMOTE) == _reads(_pieces, "cpu")
    assert dr.profiler.compiled_graphs()[-1].why.startswith("it waits for a value")
