"""Who else holds a tensor that a replay gives another value: each holder is noticed, and none where none is.

Python's own counts say so, and each version counts in its way what runs at the moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.guards import operands


class Box:
    """It holds a tensor that each call puts a new one in the place of."""

    def __init__(self) -> None:
        self.held = torch.zeros(2, device=REMOTE)


def _program(box: Box) -> Any:
    def add(x: torch.Tensor) -> torch.Tensor:
        box.held = box.held + x
        return x * 2

    return dr.program(add)


def _in_a_variable(box: Box, call: Callable[[], None]) -> list[float]:
    held = box.held
    call()
    return held.tolist()  # type: ignore[no-any-return]


def _in_a_callers_argument(box: Box, call: Callable[[], None]) -> list[float]:
    def inner(held: torch.Tensor) -> list[float]:
        call()
        return held.tolist()  # type: ignore[no-any-return]

    return inner(box.held)


def _in_an_expression(box: Box, call: Callable[[], None]) -> list[float]:
    return [box.held, call()][0].tolist()  # type: ignore[func-returns-value, union-attr]


def _in_a_list(box: Box, call: Callable[[], None]) -> list[float]:
    kept = [box.held]
    call()
    return kept[0].tolist()  # type: ignore[no-any-return]


def _in_a_closure(box: Box, call: Callable[[], None]) -> list[float]:
    def closure(held: torch.Tensor) -> Callable[[], list[float]]:
        return lambda: held.tolist()  # type: ignore[no-any-return]

    kept = closure(box.held)
    call()
    return kept()


def _in_a_generator(box: Box, call: Callable[[], None]) -> list[float]:
    def generator(held: torch.Tensor) -> Any:
        yield
        yield held.tolist()

    kept = generator(box.held)
    next(kept)
    call()
    return next(kept)  # type: ignore[no-any-return]


HOLDERS = (
    *(_in_a_variable, _in_a_callers_argument, _in_an_expression),
    *(_in_a_list, _in_a_closure, _in_a_generator),
)


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__.strip("_"))
def test_a_holder_is_noticed_and_keeps_its_value(
    session: object, holder: Callable[[Box, Callable[[], None]], list[float]]
) -> None:
    box, x = Box(), torch.ones(2, device=REMOTE)
    program = _program(box)
    for _ in range(5):
        program(x)
    assert program.replays >= 2 and not program.why
    for k in range(2):
        before = program.replays
        assert holder(box, lambda: program(x)) == [5.0 + 3 * k] * 2
        assert program.replays == before and "is held elsewhere too" in program.why
        # Nobody holds it any more.
        for _ in range(2):
            program(x)
        assert program.replays > before and not program.why, program.why
    assert box.held.tolist() == [11.0, 11.0]


def test_nobody_is_noticed_where_nobody_holds(session: object) -> None:
    box, x = Box(), torch.ones(2, device=REMOTE)
    program = _program(box)

    def deep(number: int) -> None:
        if number:
            deep(number - 1)
        else:
            program(x)

    for k in range(12):
        deep(k % 3)
        # It was asked for, and let go.
        assert box.held.tolist() == [k + 1.0] * 2
    assert program.replays == 10 and not program.why


def test_an_interpreter_that_nobody_knows_records_each_call(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_VERSION", (3, 99))
    x = torch.ones(2, device=REMOTE)
    factor = [2.0]
    program = dr.program(lambda x: x * factor[0])
    for k in range(4):
        factor[0] = float(k)
        assert program(x).tolist() == [float(k)] * 2
    assert not program.replays
    assert "does not know how this Python" in program.why and sys.version.split()[0] in program.why
