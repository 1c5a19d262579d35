"""What a program returns in one memory is one memory to autograd, as behind its function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, tensor

_Result = tuple[torch.Tensor, torch.Tensor]


class _Held:
    def __init__(self, device: str) -> None:
        self.x = tensor(device, 2, 2)


def _detached(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    return b, b.detach()[0]


def _without_grad(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    with torch.no_grad():
        return b, b[0]


def _view(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    return b, b[0]


def _view_first(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    return b.t(), b


def _siblings(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    return b[0], b.view(-1)


def _of_another_dtype(a: torch.Tensor, held: _Held) -> _Result:
    b = a * 2
    return b, b.view(torch.int32)


def _of_what_is_held(a: torch.Tensor, held: _Held) -> _Result:
    held.x.add_(a)
    return held.x, held.x[1]


def _only_of_what_is_held(a: torch.Tensor, held: _Held) -> _Result:
    held.x.add_(a)
    return held.x.t(), held.x[1]


def _of_an_argument(a: torch.Tensor, held: _Held) -> _Result:
    a.mul_(2)
    return a, a.view(-1)


FUNCTIONS: list[Callable[[torch.Tensor, _Held], _Result]] = [
    _detached,
    _without_grad,
    _view,
    _view_first,
    _siblings,
    _of_another_dtype,
    _of_what_is_held,
    _only_of_what_is_held,
    _of_an_argument,
]


def _raised(run: Callable[[], object]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error).split(":")[0].splitlines()[0][:60]
    return ""


def _written(one: torch.Tensor, other: torch.Tensor) -> Any:
    """Return what autograd says of a tensor that was saved when another one in its memory is written."""
    weight = torch.ones_like(one.detach()).requires_grad_()
    loss = (weight * one).sum()
    other.add_(1)
    return one._version, other._version, _raised(loss.backward)


def _with_history(one: torch.Tensor, other: torch.Tensor) -> Any:
    """Return what becomes of a tensor when one that wants a gradient is added to its view."""
    if not other.is_floating_point():
        return None
    weight = torch.ones_like(other.detach()).requires_grad_()

    def act() -> None:
        other.add_(weight)
        if one.requires_grad:
            one.sum().backward()

    why = _raised(act)
    return why, weight.grad if weight.grad is None else weight.grad.tolist()


@pytest.mark.parametrize("look", [_written, _with_history], ids=["versions", "history"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_writes_to_what_is_returned_are_seen_as_behind_the_function(
    session: object, look: Any, fn: Any, grad: bool
) -> None:
    here, there = _Held("cpu"), _Held(REMOTE)
    program = dr.program(fn)
    for k in range(6):
        with nullcontext() if grad else torch.no_grad():
            found = program(tensor(REMOTE, 2, 2, seed=k), there)
            expected = fn(tensor("cpu", 2, 2, seed=k), here)
        seen, wanted = look(*found), look(*expected)
        if look is _written:
            # A replay counts one write where the function has written several times.
            assert seen[2] == wanted[2] and seen[0] == seen[1], k
            for a, b in zip(found, expected):
                assert torch.equal(a.cpu(), b)
        elif fn not in (_siblings, _detached):
            # Those are views of what nobody has, which a replay does not keep.
            assert seen == wanted, k
        if here.x.requires_grad:
            # What is held has a graph now.
            here.x.detach_()
            there.x.detach_()
    assert program.replays >= 3


@pytest.mark.parametrize("kind", [dr.program, partial(torch.compile, backend="distruntime")])
@pytest.mark.parametrize("written", [0, 1])
def test_views_of_what_is_not_returned_lose_no_gradient(session: object, kind: Any, written: int) -> None:
    function = kind(_two_views)
    for k in range(6):
        found = function(tensor(REMOTE, 2, 2, seed=k))
        found[written].add_(1)
        assert torch.equal(found[0].cpu(), found[1].cpu()[:2])
        assert found[0]._version == found[1]._version == 1
        weight = torch.ones(1, device=REMOTE, requires_grad=True)

        def act(found: Any = found, weight: torch.Tensor = weight) -> None:
            found[written].mul_(weight)
            found[1 - written].sum().backward()

        # At a call that is traced or runs operator by operator, they are views of what is not returned.
        why = _raised(act)
        assert weight.grad is not None or why.startswith("A view was created in no_grad mode"), why


def _two_views(a: torch.Tensor) -> _Result:
    b = a * 2
    return b[0], b.view(-1)
