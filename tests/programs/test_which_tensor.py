"""Which tensors a call finds, and of what shape they are by now: `t_()` and its like change that in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

# A program that is recorded at each call says so once.
pytestmark = pytest.mark.filterwarnings("ignore:the program:UserWarning")

CALLS = 5


def _rows(device: str = REMOTE) -> Any:
    return torch.arange(6.0).view(2, 3).to(device)


def _replayed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a program of a function that is replayed by now."""
    program: Any = dr.program(function)
    for _ in range(CALLS):
        program(*arguments)
    assert program.replays > 0, program.why
    return program


# -- other metadata ------------------------------------------------------------------------------------------

_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "squeeze_": lambda w: w.unsqueeze_(0).squeeze_(0).unsqueeze_(1),
    "resize_": lambda w: w.resize_(3, 2),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_held_tensor_that_gets_another_shape_in_place(session: object, name: str) -> None:
    w, local, x = _rows(), _rows("cpu"), torch.ones(2).to(REMOTE)
    programs = [_replayed(lambda x: x * w.shape[0] + w.dim(), x), _replayed(lambda x: w * 2, x)]
    plain = [lambda: torch.ones(2) * local.shape[0] + local.dim(), lambda: local * 2]
    for change in (lambda w: None, _CHANGES[name], lambda w: None):
        change(w)
        change(local)
        for program, function in zip(programs, plain):
            assert torch.equal(program(x).cpu(), function())
    # Another tensor's change is none of these.
    before = [program.recordings for program in programs]
    _rows().t_()
    for program in programs:
        program(x)
        assert not program.why
    assert [program.recordings for program in programs] == before


def test_a_change_in_place_says_why_a_call_is_recorded(session: object) -> None:
    w, x = _rows(), torch.ones(2).to(REMOTE)
    program = _replayed(lambda x: x * w.dim(), x)
    w.t_()
    program(x)
    assert "the shape or the layout of w changes" in program.why
    program(x)
    assert "w has another shape or other strides" in program.why


def test_a_call_that_changes_a_shape_in_place(session: object) -> None:
    w, local = _rows(), _rows("cpu")
    held: Any = dr.program(lambda: w.t_() * 2)
    given: Any = dr.program(lambda x: x.t_() * 2)
    for _ in range(CALLS):
        assert torch.equal(held().cpu(), local.t_() * 2)
        x = _rows()
        assert torch.equal(given(x).cpu(), _rows("cpu").t() * 2) and x.shape == (3, 2)
    assert "the shape or the strides of w in place" in held.why
    assert "the shape or the strides of argument 0 in place" in given.why
