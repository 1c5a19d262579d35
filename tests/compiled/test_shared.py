"""Compiled functions whose arguments, or whose optimizer's parameters, lie in one memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from dynamo import DYNAMO_WARNS

# A graph that runs operator by operator says so, and warnings are errors.
pytestmark = DYNAMO_WARNS
SAYS = "operator by operator, as without it: {}its arguments share memory, and it writes to some"


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="distruntime", **options)


def _stepped(device: str, make: Callable[..., Any], when: int, apart: bool) -> list[float]:
    """Return two parameters behind some steps. From step `when` on they are in one memory, or lie beside."""
    flat = torch.ones(6, device=device)
    p, q = nn.Parameter(flat[:3]), nn.Parameter(torch.ones(3, device=device))
    step = make(torch.optim.SGD([p, q], lr=1.0, momentum=0.5).step)
    for k in range(6):
        if k == when:
            q.data = flat[3:] if apart else p.data
        p.grad, q.grad = torch.full_like(p, 0.25), torch.full_like(q, 0.5 + k)
        step()
    return [*p.tolist(), *q.tolist()]


@pytest.mark.parametrize("when", [0, 3])
def test_an_optimizer_steps_each_parameter_of_one_memory(when: int) -> None:
    said = SAYS.format("in this call " if when else "")
    with pytest.warns(UserWarning, match=said):
        found = _stepped(REMOTE, compiled, when, apart=False)
    assert found == _stepped("cpu", lambda step: step, when, apart=False)


@pytest.mark.parametrize("when", [0, 3])
def test_parameters_that_lie_beside_each_other_are_one_instruction(when: int) -> None:
    found = _stepped(REMOTE, compiled, when, apart=True)
    assert found == _stepped("cpu", lambda step: step, when, apart=True)
    assert dr.profiler.compiled_graphs()[-1].replays >= 1


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def test_a_call_with_shared_memory_says_so_once_and_others_go_on() -> None:
    step, told = compiled(_write, dynamic=False), []
    for k in range(12):
        base, twin = torch.zeros(16, 4, device=REMOTE), torch.zeros(16, 4)
        rows = slice(2, 7) if k % 3 == 2 else slice(5, 10)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = step(base[:5], base[rows]) if k > 1 else step(base[:5] + 0, base[rows] + 0)
        wanted = _write(twin[:5], twin[rows]) if k > 1 else torch.zeros(5, 4)
        assert torch.equal(found.cpu(), wanted)
        told += [str(one.message) for one in seen]
    assert len(told) == 1 and SAYS.format("in this call ") in told[0]
    assert dr.profiler.compiled_graphs()[-1].replays >= 3


def test_tensors_of_this_process_in_one_memory() -> None:
    def act(x: torch.Tensor, rate: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rate.mul_(2)
        return x * rate * other

    step = compiled(act)
    for k in range(6):
        rate = torch.tensor(3.0)
        other = rate.view(()) if k >= 4 else torch.tensor(3.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*" + SAYS.format("in this call "))
            found = step(torch.ones(2, device=REMOTE), rate, other)
        assert found.tolist() == [36.0 if k >= 4 else 18.0] * 2 and rate.item() == 6


def test_a_module_whose_buffers_are_written_beside_tied_weights_is_replayed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(REMOTE)
    model[2].weight = model[0].weight
    step = compiled(model)
    for _ in range(5):
        step(torch.ones(3, 4, device=REMOTE)).sum().backward()
    assert all(one.replays >= 2 for one in dr.profiler.compiled_graphs()[-2:])
