"""Operators that the user's own program defines: their kernels travel to workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

pytestmark = pytest.mark.usefixtures("session")

factor = 2.0


@torch.library.custom_op("own_operators::scaled", mutates_args=())
def scaled(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@scaled.register_fake
def _(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.k = inputs[1]


scaled.register_autograd(lambda ctx, grad: (scaled(grad, ctx.k), None), setup_context=_setup)


# Nothing tells what these return.
@torch.library.custom_op("own_operators::process", mutates_args=())
def process(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((), os.getpid(), dtype=torch.int64)


@torch.library.custom_op("own_operators::above", mutates_args=())
def above(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x[x > limit], scaled(x, factor)


@torch.library.custom_op("own_operators::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("own_operators::add_all_", mutates_args=("x",))
def add_all_(x: torch.Tensor, others: list[torch.Tensor]) -> None:
    for other in others:
        x.add_(other)


def test_the_kernel_runs_on_the_worker(session: object) -> None:
    assert process(torch.ones(2, device=REMOTE)).item() != os.getpid()


def test_the_gradient_is_what_the_program_has_registered() -> None:
    found = []
    for device in ("cpu", REMOTE):
        x = torch.arange(3.0).to(device).requires_grad_()
        (scaled(x, 3.0) * x).sum().backward()
        found.append(x.grad)
    assert found[0] is not None and torch.equal(found[0], found[1].cpu())


def test_a_fake_kernel_spares_the_wait() -> None:
    x = torch.ones(3, device=REMOTE)
    scaled(x, 1.0)
    before = sum(stall.count for stall in dr.profiler.stalls())
    results = [scaled(x, float(k)) for k in range(5)]
    assert sum(stall.count for stall in dr.profiler.stalls()) == before
    assert [result.sum().item() for result in results] == [0.0, 3.0, 6.0, 9.0, 12.0]


def test_sizes_that_depend_on_data_and_numbers() -> None:
    x = torch.arange(4.0, device=REMOTE)
    for limit in (0.5, 1.5):
        some, twice = above(x, limit)
        assert some.tolist() == [k for k in range(4) if k > limit] and twice.tolist() == [0, 2, 4, 6]
    assert count(x) == 3 and type(count(x)) is int


def test_what_it_writes_is_written_and_counts_as_written() -> None:
    x, y = torch.ones(3, device=REMOTE), torch.arange(3.0, device=REMOTE)
    version = x._version
    assert add_all_(x, [y, y]) is None  # type: ignore[func-returns-value]
    assert x.tolist() == [1.0, 3.0, 5.0] and x._version > version


def test_a_global_that_changes_and_a_definition_that_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, device=REMOTE)
    assert above(x, 0.0)[1].item() == 2.0
    monkeypatch.setitem(globals(), "factor", 5.0)
    assert above(x, 0.0)[1].item() == 5.0

    def define(body: Any) -> Any:
        return torch.library.custom_op("own_operators::anew", body, mutates_args=())

    def first(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def second(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    for body, expected in ((first, 2.0), (second, 3.0)):
        assert define(body)(x).item() == expected
        assert torch.ops.own_operators.anew(x).item() == expected


def test_an_operator_of_a_library(session: object) -> None:
    library = torch.library.Library("own_operators_of_a_library", "FRAGMENT")
    operators = torch.ops.own_operators_of_a_library
    x = torch.ones(2, device=REMOTE)
    for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        library.define(f"by_{key}(Tensor x, *, int by=2) -> Tensor")
        library.impl(f"by_{key}", lambda x, *, by=2: x + by, key)
        assert getattr(operators, f"by_{key}")(x, by=5).tolist() == [6.0, 6.0]
        assert getattr(operators, f"by_{key}")(x).tolist() == [3.0, 3.0]
    library.impl("by_CPU", lambda x, *, by=2: x - by, "CPU")
    assert operators.by_CPU(x).tolist() == [-1.0, -1.0]


def test_an_operator_of_a_library_may_return_its_operand(session: object) -> None:
    library = torch.library.Library("own_operators_of_a_library", "FRAGMENT")
    operators = torch.ops.own_operators_of_a_library
    library.define("itself(Tensor x) -> Tensor")
    library.impl("itself", lambda x: x, "CPU")
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x[:1], "CPU")
    library.define("sine_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("sine_", lambda x: x.sin_(), "CPU")
    for grad in (False, True):
        for device in ("cpu", REMOTE):
            x = torch.ones(2, device=device, requires_grad=grad)
            assert operators.itself(x) is x
            y = x * 1
            z, version = operators.sine_(y), y._version
            assert z is y and version == 1 and y.tolist() == torch.ones(2).sin().tolist()
            with torch.no_grad():
                operators.half(y).zero_()
            assert y[0].item() == 0.0


def test_it_runs_in_functions_and_compiled_graphs() -> None:
    x = torch.arange(3.0, device=REMOTE)
    assert dr.remote(lambda x: scaled(x, 3.0) + 1)(x).tolist() == [1.0, 4.0, 7.0]
    compiled = torch.compile(lambda x: scaled(x, 3.0) * 2, backend="distruntime")
    assert all(compiled(x).tolist() == [0.0, 6.0, 12.0] for _ in range(4))
    with pytest.raises(dr.errors.NotSupportedError, match="call it outside"):
        dr.program(lambda x: scaled(x, 3.0) * 2)(x)


def test_its_failure_names_the_line() -> None:
    @torch.library.custom_op("own_operators::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing") as failed:
        fails(torch.ones(1, device=REMOTE)).item()
    assert "own_operators::fails on node 0" in str(failed.value) and __file__ in str(failed.value)
