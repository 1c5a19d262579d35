"""Kinds of calls in turns that each leave another tensor in an object: both are replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from as_program import Case, equal, outcomes

Step = Callable[[torch.Tensor], torch.Tensor]


def _follows(box: SimpleNamespace, w: torch.Tensor) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        box.h = torch.tanh(box.h + (x @ w).sum(0))
        return box.h * 2

    return step


def _only_leaves(box: SimpleNamespace, w: torch.Tensor) -> Step:
    """What it leaves has the shape of the batch, and it does not read what it finds."""

    def step(x: torch.Tensor) -> torch.Tensor:
        box.last = x @ w
        return box.last.sum()

    return step


def _of_two_shapes(box: SimpleNamespace, w: torch.Tensor) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        box.last = x @ w + box.last.mean()
        return box.last.sum()

    return step


def _pair(box: SimpleNamespace, w: torch.Tensor) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        h, c = box.pair
        c = torch.tanh(c + (x @ w).sum(0))
        box.pair = torch.tanh(h * c), c
        return c + 1

    return step


def _writes_and_leaves(box: SimpleNamespace, w: torch.Tensor) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        box.h.mul_(0.5).add_((x @ w).sum(0))
        box.h = torch.tanh(box.h)
        return box.h.sum()

    return step


def _swaps(box: SimpleNamespace, w: torch.Tensor) -> Step:
    box.a, box.b = (torch.full((4,), k).to(REMOTE) for k in (1.0, 2.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        box.a.add_(x.sum(0))
        box.a, box.b = box.b, box.a
        return box.a * len(x) - box.b

    return step


def _trains(box: SimpleNamespace, w: torch.Tensor) -> Step:
    box.w = torch.nn.Parameter(w)
    optimizer = torch.optim.SGD([box.w], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ box.w).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _made(make: Callable[[SimpleNamespace, torch.Tensor], Step], between: Any = None) -> Case:
    torch.manual_seed(0)
    box = SimpleNamespace(h=torch.zeros(4).to(REMOTE), last=torch.zeros(2, 4).to(REMOTE))
    box.pair = torch.zeros(4).to(REMOTE), torch.ones(4).to(REMOTE)
    step = make(box, torch.randn(4, 4).to(REMOTE))
    data = [torch.randn(n, 4).to(REMOTE) for n in (2, 3)]
    kept: list[torch.Tensor] = []

    def arguments(k: int) -> tuple[torch.Tensor]:
        if between is not None:
            between(k, box, kept)
        return (data[k % 2] + k,)

    def state() -> list[torch.Tensor]:
        own = [value for value in vars(box).values() if isinstance(value, torch.Tensor)]
        return [*own, *box.pair, *(t.grad for t in own if t.grad is not None), *kept]

    return Case(step, arguments, state)


def _compared(make: Any, calls: int, between: Any = None) -> tuple[Any, list[str]]:
    """Compare a step with its program; return the program, and why each call was recorded."""
    cases = [_made(make, between) for _ in range(2)]
    eager = outcomes(cases[0], cases[0].function, calls)
    program: Any = dr.program(cases[1].function)
    whys: list[str] = []

    def call(*args: Any) -> Any:
        try:
            return program(*args)
        finally:
            whys.append(program.why)

    for one, other in zip(eager, outcomes(cases[1], call, calls), strict=True):
        assert equal(one, other), (one, other)
    return program, whys


@pytest.mark.parametrize(
    "make", [_follows, _only_leaves, _of_two_shapes, _pair, _writes_and_leaves, _swaps, _trains]
)
def test_two_batch_shapes_in_turns_are_both_replayed(session: object, make: Any) -> None:
    _, whys = _compared(make, 14)
    assert whys[6:] == [""] * 8


def test_another_order_of_the_kinds_needs_plans_of_its_own(session: object) -> None:
    # What a call finds is of the shape that the call before has left.
    case = _made(_only_leaves)
    xs = [case.arguments(k)[0] for k in (0, 0, 1)]
    program: Any = dr.program(case.function)
    for k in range(18):
        x = xs[k % 3]
        assert equal(program(x).cpu(), case.function(x).cpu())
        case.function(xs[2])
    for k in range(9):
        program(xs[k % 3])
        assert k < 3 or not program.why, (k, program.why)


def test_a_state_that_is_reset_is_taken_up(session: object) -> None:
    def reset(k: int, box: SimpleNamespace, kept: list[torch.Tensor]) -> None:
        if k % 3 == 0:
            box.h = torch.full((4,), float(k)).to(REMOTE)

    _, whys = _compared(_follows, 16, reset)
    assert whys[8:] == [""] * 8


def test_what_somebody_keeps_stays_as_it_was(session: object) -> None:
    def keep(k: int, box: SimpleNamespace, kept: list[torch.Tensor]) -> None:
        if k in (7, 8, 11):
            kept.append(box.h)

    for make in (_follows, _writes_and_leaves):
        program, _ = _compared(make, 20, keep)
        assert program.replays > 8


@pytest.mark.parametrize("form", [tuple, list, dict], ids=lambda form: str(form.__name__))
def test_what_somebody_keeps_in_a_tuple_stays_as_it_was(session: object, form: Callable[..., Any]) -> None:
    def make(box: SimpleNamespace, w: torch.Tensor) -> Step:
        box.kept = form([(0, box.h), (1, box.last)])

        def step(x: torch.Tensor) -> torch.Tensor:
            (_, h), (_, last) = box.kept.items() if form is dict else box.kept
            box.kept = form([(0, torch.tanh(h + x.sum(0))), (1, last * 0.5)])
            return h + 1

        return step

    found: list[Any] = []

    def keep(k: int, box: SimpleNamespace, kept: list[torch.Tensor]) -> None:
        if k == 0:
            found.clear()
        found.append(box.kept)
        kept[:] = [t for one in found for _, t in (one.items() if form is dict else one)]

    _compared(make, 10, keep)


def test_two_programs_over_one_state_are_both_replayed(session: object) -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 4)
    losses: list[list[float]] = []
    for replayed in (False, True):
        w = torch.nn.Parameter(values.to(REMOTE))
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

        def backward(
            x: torch.Tensor, w: torch.Tensor = w, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x @ w).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        programs: Any = [dr.program(f) if replayed else f for f in (backward, update)]
        found = []
        for k in range(10):
            found.append(programs[0](torch.full((2, 4), 0.1 * k).to(REMOTE)))
            programs[1]()
            if replayed and k > 4:
                assert [program.why for program in programs] == ["", ""]
        losses.append([loss.item() for loss in found])
    assert losses[0] == losses[1]


def test_a_tensor_at_two_places_is_no_two_tensors(session: object) -> None:
    def make(box: SimpleNamespace, w: torch.Tensor) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            first, second = box.h, box.last
            box.h = torch.tanh(first + x.sum(0))
            box.last = box.h if len(x) == 3 else second * 0.5
            return first - second

        box.last = torch.ones(4).to(REMOTE)
        return step

    _compared(make, 16)

    def join(k: int, box: SimpleNamespace, kept: list[torch.Tensor]) -> None:
        if k % 5 == 4:
            box.last = box.h

    _compared(make, 16, join)


@pytest.mark.parametrize("odd", ["dtype", "shape", "wants a gradient", "a graph", "None", "an argument"])
def test_another_kind_of_tensor_there_is_recorded(session: object, odd: str) -> None:
    case = _made(_follows)
    program: Any = dr.program(case.function)
    cells = case.function.__closure__
    assert cells is not None
    box = next(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, SimpleNamespace))
    x, before = case.arguments(0)[0], torch.zeros(4).to(REMOTE)
    box.h = before
    for _ in range(3):
        program(x)
    assert not program.why
    box.h = torch.ones(4).to(REMOTE)
    program(x)
    assert not program.why
    match odd:
        case "dtype":
            box.h = before.double()
        case "shape":
            box.h = torch.zeros(1, 4).to(REMOTE)
        case "wants a gradient":
            box.h = torch.zeros(4).to(REMOTE).requires_grad_()
        case "a graph":
            box.h = torch.zeros(4).to(REMOTE).requires_grad_() * 2
        case "None":
            box.h = None
        case "an argument":
            x = torch.zeros(2, 4).to(REMOTE)
            box.h = x
    recordings = program.recordings
    # Some of it is no valid call, and raises where eager does.
    with suppress(TypeError, dr.DistruntimeError):
        program(x)
    assert program.recordings == recordings + 1
