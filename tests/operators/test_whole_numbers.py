"""Whole numbers that are words of a call: no number makes a signature or a template of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.operators.whole_numbers import takes
from distruntime.session.session import Session
from dynamo import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS
aten = torch.ops.aten
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "x + k": lambda x, k: x + k,
    "k - x": lambda x, k: k - x,
    "x / k": lambda x, k: x / (k or 1),
    "x // k": lambda x, k: x // (k or 1),
    "x % k": lambda x, k: x % (k or 1),
    "x == k": lambda x, k: x == k,
    "x > k": lambda x, k: x > k,
    "add alpha": lambda x, k: torch.add(x, x, alpha=k),
    "addmm alpha": lambda x, k: torch.addmm(x[:4].view(2, 2), x[:4].view(2, 2), x[1:].view(2, 2), alpha=k),
    "addcmul value": lambda x, k: torch.addcmul(x, x, x, value=k),
    "masked_fill": lambda x, k: x.masked_fill(x > 1, k),
    "masked_fill_": lambda x, k: x.clone().masked_fill_(x > 1, k),
    "where": lambda x, k: torch.where(x > 1, x, k),
    "clamp": lambda x, k: x.clamp(k, k + 2),
    "fill_": lambda x, k: x.clone().fill_(k),
    "full": lambda x, k: torch.full((2, 3), k, device=x.device),
    "full_like": lambda x, k: torch.full_like(x, k),
    "new_full": lambda x, k: x.new_full((4,), k),
    "foreach": lambda x, k: torch._foreach_mul([x, x + 1], k)[1],
    "threshold": lambda x, k: torch.nn.functional.threshold(x, 1, k),
    "bits": lambda x, k: x.long() & k,
}
NUMBERS = (3, -4, 0, 1, 1 << 40, -(1 << 40), 7)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_each_number_gives_its_own_result_by_one_template(
    session: Session, name: str, dtype: torch.dtype
) -> None:
    call, node = CALLS[name], session.nodes[0]
    x = torch.arange(5).to(dtype)
    remote = x.to("remote")
    known = session.places.residence(session.places.own[0])

    def learned() -> tuple[int, int]:
        dr.synchronize()
        return len(known.signatures), len(node.templates)

    # An `alpha` of 1 is none.
    call(remote, 2), call(remote, 1)
    before = learned()
    found = [call(remote, k) for k in NUMBERS]
    assert learned() == before
    for k, out in zip(NUMBERS, found):
        local = call(x, k)
        assert out.dtype == local.dtype and torch.equal(out.cpu(), local), k


def test_a_size_and_a_dimension_are_no_such_numbers() -> None:
    assert takes(aten.add.Tensor) and takes(aten.full.default) and takes(aten._foreach_add.Scalar)
    for func in (aten.arange.default, aten.transpose.int, aten.index_fill.int_Scalar, aten.eye.default):
        assert not takes(func)
    # A negative power of whole numbers is a mistake by its value, and is told at its line.
    assert not takes(aten.pow.Tensor_Scalar)


def _counted(x: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    y = x * k
    return y, y.masked_fill(y > 3, 9), torch.full((2,), 3, device=x.device) + y[:2], torch.add(x, y, alpha=2)


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_a_program_keeps_them_whole(session: Session, compile: str | None) -> None:
    program = dr.program(_counted, compile=compile)
    x = torch.arange(5)
    for k in (2, 2, 2, 2, 3, 3, 3, 2, -1, -1, -1):
        for out, local in zip(program(x.to("remote"), k), _counted(x, k)):
            assert out.dtype == torch.int64 and torch.equal(out.cpu(), local)
    assert program.replays > 2


class Scaled:
    k = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.k


def test_a_program_sees_a_number_that_another_has_changed(session: Session) -> None:
    scaled, x = Scaled(), torch.zeros(3, dtype=torch.int64, device="remote")
    program = dr.program(scaled)
    for scaled.k in (1, 1, 1, 1, 2, 2, 2, 1, 3):
        assert program(x).tolist() == [scaled.k] * 3
    assert program.replays > 1


def test_a_compiled_function_keeps_them_whole(session: Session) -> None:
    compiled, x = torch.compile(_counted, dynamic=False), torch.arange(5)
    for k in (2, 2, 2, 2, 3, 3, 3):
        for out, local in zip(compiled(x.to("remote"), k), _counted(x, k)):
            assert out.dtype == torch.int64 and torch.equal(out.cpu(), local)
