"""`dr.profiler.detect_nan` names the operator that was the first to give NaN, its module and its line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from traces import line_of

pytestmark = pytest.mark.usefixtures("session")
at = partial(line_of, __file__)


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.log(-y.square() - 1)  # the NaN


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), Bad()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_the_operator_the_module_and_the_line(session: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.ReLU()).to(REMOTE)
    x = torch.randn(2, 4).to(REMOTE)
    with pytest.raises(dr.errors.NonFiniteError) as caught, dr.profiler.detect_nan():
        model(x)
    text = str(caught.value)
    assert text.startswith("aten.log.default was the first to give NaN, and ")
    assert "in Sequential.1.parts.1 (Bad)" in text and at("the NaN") in text


def test_the_backward_pass_names_the_line_of_the_forward_one(session: Any) -> None:
    x = torch.zeros(3).to(REMOTE).requires_grad_()
    with pytest.raises(dr.errors.NonFiniteError) as caught, dr.profiler.detect_nan():
        y = (x * x).sqrt()  # forward
        y.sum().backward()  # backward
    text = str(caught.value)
    assert "SqrtBackward0" in text or "MulBackward0" in text
    assert at("backward") in text and "it is the gradient of aten." in text and at("forward") in text


def test_nothing_is_said_where_there_is_none(session: Any) -> None:
    model = nn.Linear(4, 4).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.detach().cpu().clone() for p in model.parameters()]
    with dr.profiler.detect_nan() as watch:
        for _ in range(3):
            model(torch.ones(2, 4, device=REMOTE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.check()
        # What was allocated only may have any values.
        torch.empty(1000, device=REMOTE)
    assert any(not torch.equal(p.detach().cpu(), b) for p, b in zip(model.parameters(), before))


def test_overflow_is_an_infinity_of_finite_numbers(session: Any) -> None:
    x = torch.full((3,), 60000.0, dtype=torch.float16).to(REMOTE)
    with dr.profiler.detect_nan(overflow=True):
        mask = torch.zeros(3, 3).to(REMOTE).masked_fill(torch.eye(3).bool().to(REMOTE), float("-inf"))
        (mask + 1).softmax(-1)
        torch.full((2,), float("inf"), device=REMOTE)
    with dr.profiler.detect_nan():
        x * 2
    with pytest.raises(
        dr.errors.NonFiniteError, match=r"aten.mul.Tensor was the first to give NaN or an infinity"
    ):
        with dr.profiler.detect_nan(overflow=True):
            (x + 1) * 2


def test_meshes_streams_and_programs(session: Any) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    whole = dr.from_shards([torch.ones(2), -torch.ones(2)], mesh)
    with pytest.raises(dr.errors.NonFiniteError, match=r"aten.sqrt.default was"), dr.profiler.detect_nan():
        whole.sqrt()
    side = dr.Stream()

    @dr.program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.log().sum()

    good, bad = torch.ones(3).to(REMOTE), -torch.ones(3).to(REMOTE)
    for _ in range(3):
        step(good)
    assert step.replays
    with pytest.raises(dr.errors.NonFiniteError, match=r"aten.log.default was"), dr.profiler.detect_nan():
        with dr.stream(side):
            step(bad)
    assert step.why == "a dispatch mode was on, so it ran op by op"


def test_an_error_of_the_block_is_not_covered(session: Any) -> None:
    with pytest.raises(KeyError), dr.profiler.detect_nan():
        torch.tensor([-1.0]).to(REMOTE).log()
        raise KeyError


@pytest.mark.parametrize("options", [dict(foreach=True), dict(fused=True), dict(foreach=False)], ids=str)
def test_the_step_of_an_optimizer(session: Any, options: dict[str, Any]) -> None:
    model = nn.Linear(4, 4).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("inf"))
    with (
        pytest.raises(dr.errors.NonFiniteError, match=r"aten\.\S+ was the first to give NaN"),
        dr.profiler.detect_nan(),
    ):
        optimizer.step()


def test_an_operator_that_writes_over_what_it_is_given(session: Any) -> None:
    for write in (
        lambda x: x.mul_(1e30),
        lambda x: torch._foreach_mul_([x], 1e30),
        lambda x: torch.mul(x, 1e30, out=x),
    ):
        x = torch.full((3,), 1e30).to(REMOTE)
        with (
            pytest.raises(dr.errors.NonFiniteError, match=r"mul\S* was the first"),
            dr.profiler.detect_nan(overflow=True),
        ):
            write(x)
        with dr.profiler.detect_nan(overflow=True):
            write(x)  # it has infinities before
