"""A compiled function in a program runs as it was written, so the program guards what its Python reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from dynamo import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS
compiled: Callable[..., Any] = functools.partial(torch.compile, backend="distruntime")


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def x() -> torch.Tensor:
    return torch.arange(3.0).to(REMOTE)


def _agree(inner: Callable[[torch.Tensor], torch.Tensor], change: Callable[[], object]) -> None:
    """Call a function compiled in a program, and as it is, before a change and behind it."""
    step = compiled(inner)
    program = dr.program(lambda x: step(x) + 1)
    for k in range(10):
        if k == 5:
            change()
        assert torch.equal(program(x()).cpu(), inner(x()).cpu() + 1)
    assert program.replays >= 5


def test_what_the_function_reads_changes() -> None:
    settings = SimpleNamespace(factor=2)
    _agree(lambda x: x * settings.factor, lambda: setattr(settings, "factor", 5))


def test_a_module_changes_its_mode() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Dropout(1.0)).to(REMOTE)
    _agree(lambda x: norm(x.expand(2, 3)), norm.eval)


def test_a_module_of_torch_itself_changes_its_mode() -> None:
    """All of its Python is torch's, and the call of it is this package's."""
    layer = nn.Dropout(1.0)
    step = compiled(layer)
    program = dr.program(lambda x: step(x) + 1)
    found = []
    for k in range(10):
        layer.train(k < 5)
        found.append(program(x()).tolist())
    assert found == [[1.0, 1.0, 1.0]] * 5 + [[1.0, 2.0, 3.0]] * 5
    assert program.replays >= 5


def test_a_function_gets_another_default() -> None:
    def inner(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
        return x * factor

    _agree(inner, lambda: setattr(inner, "__defaults__", (5,)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_optimizer_has_another_rate(kind: Any) -> None:
    outcomes, replays = [], 0
    for compiles in (False, True):
        weight = nn.Parameter(torch.ones(3, device=REMOTE))
        optimizer = kind([weight], lr=0.5)
        update = compiled(optimizer.step) if compiles else optimizer.step

        def step(
            x: torch.Tensor, weight: Any = weight, optimizer: Any = optimizer, update: Any = update
        ) -> None:
            optimizer.zero_grad()
            (weight * x).sin().sum().backward()
            update()

        program = dr.program(step)
        for k in range(10):
            optimizer.param_groups[0]["lr"] = 0.5 if k < 6 else 0.125
            (program if compiles else step)(x())
        outcomes.append(weight.detach().cpu())
        replays = program.replays
    assert torch.equal(*outcomes)
    assert replays >= 5


def test_a_float_that_changes_is_a_number_of_the_instruction() -> None:
    made = compiled(lambda x, rate: x * rate + rate * 2.0)
    program = dr.program(lambda x, rate: made(x, rate) + 1)
    for rate in (1.0, 0.2, 0.3, 0.3, -0.0, float("inf")):
        assert torch.equal(program(x() + 1, rate).cpu(), (torch.arange(3.0) + 1) * rate + rate * 2.0 + 1)
    assert program.replays == 4
