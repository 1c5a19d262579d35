"""Operators of lists: the meta kernel sees one position of each kind, and the outcome is as of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.log.spec import spec_of
from distruntime.operators import propagate
from distruntime.operators.alias_info import tensors_of
from distruntime.session.session import Session

FOREACH = torch.ops.aten


def _lists() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return two lists of meta tensors, of four kinds of position, the kinds mixed."""
    forms: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(3, 4, device="meta"),
        lambda: torch.empty(4, 3, device="meta").t(),
        lambda: torch.empty(3, 4, dtype=torch.float64, device="meta"),
        lambda: torch.empty((), device="meta"),
    ]
    order = [0, 1, 0, 2, 3, 1, 0, 2]
    return [forms[k]() for k in order], [forms[k]() for k in reversed(order)]


CALLS: dict[
    str, Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[Any, tuple[Any, ...], dict[str, Any]]]
] = {
    "a number": lambda x, y: (FOREACH._foreach_add.Scalar, (x, 2), {}),
    "numbers of two types": lambda x, y: (
        FOREACH._foreach_mul.ScalarList,
        (x, [2, 2.5, 1j, 2, 2, 2.0, 2, 1j]),
        {},
    ),
    "two lists": lambda x, y: (FOREACH._foreach_add.List, (x, x), {"alpha": 2}),
    "lists whose shapes do not match": lambda x, y: (FOREACH._foreach_add.List, (x, y), {}),
    "in place": lambda x, y: (FOREACH._foreach_lerp_.Scalar, (x, x), {"weight": 0.5}),
    "in place, with numbers": lambda x, y: (FOREACH._foreach_addcdiv_.ScalarList, (x, x, x, [1.0] * 8), {}),
    "norms": lambda x, y: (FOREACH._foreach_norm.Scalar, (x, 2), {}),
    "one list": lambda x, y: (FOREACH._foreach_sqrt.default, (x,), {}),
    "copied": lambda x, y: (FOREACH._foreach_copy_.default, (x, x), {}),
    "a tensor beside it": lambda x, y: (FOREACH._foreach_mul.Tensor, (x, torch.empty((), device="meta")), {}),
    "lists of unlike lengths": lambda x, y: (FOREACH._foreach_mul.List, (x, y[:-1]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_outcome_is_as_of_all_positions(name: str) -> None:
    func, args, kwargs = CALLS[name](*_lists())

    def result(how: Callable[..., object]) -> object:
        try:
            return how(func, args, kwargs, spec_of, True)
        except Exception as error:
            return type(error), str(error)

    assert result(propagate.propagate) == result(propagate._propagate)


def test_it_sees_one_position_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = propagate.outcome

    def outcome(func: Any, args: Any, *rest: Any) -> Any:
        seen.append(len(tensors_of(args, {})))
        return own(func, args, *rest)

    monkeypatch.setattr(propagate, "outcome", outcome)
    x, _ = _lists()
    propagate.propagate(FOREACH._foreach_sqrt.default, (x,), {}, spec_of, True)
    # A power of a whole number may be a mistake by its value, so other numbers are other kinds.
    propagate.propagate(FOREACH._foreach_add.ScalarList, (x, [1.0, 2.0] * 4), {}, spec_of, True)
    propagate.propagate(FOREACH._foreach_add.ScalarList, (x, [1, 2, 3] + [4] * 5), {}, spec_of, True)
    assert seen == [4, 4, 7]


@pytest.mark.usefixtures("session")
def test_a_tensor_without_rows_gives_none() -> None:
    # Each call is one instruction, and what follows it in the log must not be taken for a part of it.
    empty, total = torch.empty(0, 3, device=REMOTE), torch.zeros(3, device=REMOTE)
    for _ in range(4):
        for row in empty:
            total = total + row
        assert empty.unbind() == ()
        assert torch.split_with_sizes(empty, []) == ()
        total = total + 1
    assert total.tolist() == [4.0, 4.0, 4.0]


@pytest.mark.usefixtures("session")
def test_a_program_may_take_a_tensor_without_rows() -> None:
    @dr.program
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for row in x:
            y = y + row
        return y + 1

    empty, y = torch.empty(0, 3, device=REMOTE), torch.zeros(3, device=REMOTE)
    for _ in range(4):
        y = f(empty, y)
    assert y.tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("first", [1, True])
def test_numbers_of_several_types_stay_what_they_are(session: Session, first: int) -> None:
    lists = [[1, 2.5], [1, 3.5], [1, 2], [1, 2.0], [first, 2], [2.5, 1], [1, 0.5j], [1, -0.0], [1, 0]]
    for _ in range(3):
        for numbers in lists:
            for op in (torch._foreach_mul, torch._foreach_add):
                remote = op([torch.arange(3, device="remote"), torch.ones(2, device="remote")], numbers)
                local = op([torch.arange(3), torch.ones(2)], numbers)
                for a, b in zip(remote, local):
                    assert a.dtype == b.dtype and torch.equal(a.cpu(), b), (op, numbers)
        dr.synchronize()


def test_complex_numbers_with_other_signs_of_zero_are_told_apart(session: Session) -> None:
    for place in ("cpu", REMOTE):
        x = torch.ones(2, dtype=torch.complex64, device=place)
        zero = torch.zeros(2, dtype=torch.complex64, device=place)
        signs = []
        for factor in (complex(-1, 0.0), complex(-1, -0.0)) * 3:
            results = [torch.add(zero, x, alpha=factor), *torch._foreach_mul([x, x], [factor, 1.0])]
            dr.synchronize()
            signs.append([torch.view_as_real(r).signbit().tolist() for r in results])
        if place == "cpu":
            wanted = signs
    assert signs == wanted


def test_lists_are_copied_between_places(session: Session) -> None:
    def made(place: str) -> list[torch.Tensor]:
        return [torch.arange(3.0, device=place), torch.ones(2, 2, device=place).t()]

    places = ["cpu", "remote:0", "remote:1"]
    for there in places:
        for here in places:
            for mixed in (False, True):
                targets, sources = [torch.zeros_like(t) for t in made(there)], made(here)
                if mixed:
                    sources[1] = sources[1].to("remote:1")
                versions = [t._version for t in targets]
                torch._foreach_copy_(targets, sources)
                assert [t.tolist() for t in targets] == [s.tolist() for s in made("cpu")]
                assert [t._version for t in targets] == [v + 1 for v in versions]
                assert [str(t.device) for t in targets] == [there] * 2
    with pytest.raises(RuntimeError, match="must match the size"):
        torch._foreach_copy_([torch.zeros(3, device=REMOTE)], [torch.zeros(2)])
    with pytest.raises(RuntimeError, match="Tensor lists must have the same number of tensors, got 1 and 2"):
        torch._foreach_copy_([torch.zeros(3, device=REMOTE)], [torch.zeros(3), torch.zeros(3)])
