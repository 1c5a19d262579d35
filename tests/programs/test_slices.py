"""Batches that are slices of one tensor: they are one kind of call, wherever they begin in its memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

Function = Callable[..., Any]
_STARTS = (0, 2, 5, 1, 8, 3, 0, 7, 4, 2)


def _base(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(12, 4).to(device)


def _outside(result: Any) -> list[Any]:
    found = result if isinstance(result, (list, tuple)) else [result]
    return [(x.tolist(), x.storage_offset(), x.stride()) if isinstance(x, torch.Tensor) else x for x in found]


def _compare(
    function: Function, cut: Callable[[torch.Tensor, int], tuple[Any, ...]], starts: Any = _STARTS
) -> Any:
    """Call a function eagerly here, and as a program, with the same slices; return the program."""
    program: Any = dr.program(function)
    here, there = _base("cpu"), _base(REMOTE)
    for start in starts:
        mine, theirs = function(*cut(here, start)), program(*cut(there, start))
        assert _outside(theirs) == _outside(mine), (start, program.why)
        assert torch.equal(there.cpu(), here), (start, program.why)
    return program


def _one(base: torch.Tensor, start: int) -> tuple[torch.Tensor]:
    return (base[start : start + 4],)


def _two(base: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    return base[start : start + 4], base[start // 2 : start // 2 + 4]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x[1:3].t(),
        lambda x: (x[0], x.sum(), x, x[:, 2:]),
        lambda x: torch.view_as_complex(x.view(4, 2, 2)),
        lambda x: x.view(torch.int32)[1],
        lambda x: x.view(torch.float16)[2:, 3],
        lambda x: x.unfold(0, 2, 1),
        lambda x: torch.as_strided(x, (2, 3), (1, 2), 5) * 1,
        lambda x: torch.as_strided(x, (2, 3), (1, 2)),
        lambda x: x.mul_(1.5)[2],
        lambda x: (x[1:3].add_(1), x[0].clone()),
    ],
)
def test_slices_of_one_tensor_are_one_kind_of_call(session: object, function: Function) -> None:
    program = _compare(function, _one)
    assert program.recordings == 2 and program.replays == 8


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.mul_(0.5).add_(y * 2),
        lambda x, y: (y.add_(x * 3), x.mul_(0.5)[1], y[2]),
        lambda x, y: (x.copy_(y * 2), y.sum()),
        lambda x, y: (x.t(), y[1:].t(), x),
    ],
)
def test_arguments_that_overlap(session: object, function: Function) -> None:
    program = _compare(function, _two)
    assert program.replays >= 6


def test_arguments_that_share_memory_are_another_kind(session: object) -> None:
    program: Any = dr.program(lambda x, y: (x.add_(1), (y * 2))[1])
    base, other = torch.zeros(8, device=REMOTE), torch.zeros(8, device=REMOTE)
    for _ in range(4):
        program(base[:4], other[:4])
    before = program.recordings
    program(base[:4], base[2:6])
    assert program.recordings == before + 1
    assert base.tolist() == [5.0] * 4 + [0.0] * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.as_strided(x, (3,), (1,), x.storage_offset() + 2) * 1,
        lambda x: x * 2 if x.storage_offset() < 20 else x * 3,
        lambda x: x + x.data_ptr() % 64,
    ],
)
def test_what_asks_where_it_begins_is_recorded_for_each_place(session: object, function: Function) -> None:
    program: Any = dr.program(function)
    here, there = _base("cpu"), _base(REMOTE)
    for start in (0, 6, 0, 6, 0, 6, 0, 6):
        mine, theirs = function(*_one(here, start)), program(*_one(there, start))
        if "data_ptr" not in function.__code__.co_names:
            assert _outside(theirs) == _outside(mine), (start, program.why)
    assert program.recordings == 4 and program.replays == 4


def test_a_view_of_an_argument_that_stays_in_an_object(session: object) -> None:
    def made(device: str) -> tuple[Function, SimpleNamespace, torch.Tensor]:
        box = SimpleNamespace(last=torch.zeros(2, 4).to(device))

        def function(x: torch.Tensor) -> torch.Tensor:
            total = box.last.sum() + x.sum()
            box.last = x[1:3]
            return total

        return function, box, _base(device)

    (function, mine, here), (own, theirs, there) = made("cpu"), made(REMOTE)
    program: Any = dr.program(own)
    for start in (0, 2, 5, 0, 2, 5, 0, 2, 5, 5, 5, 5, 2, 2):
        a, b = function(here[start : start + 4]), program(there[start : start + 4])
        assert torch.equal(b.cpu(), a) and torch.equal(theirs.last.cpu(), mine.last), program.why
        assert theirs.last.storage_offset() == mine.last.storage_offset()
        theirs.last.mul_(1.5)
        mine.last.mul_(1.5)
        assert torch.equal(there.cpu(), here)


def test_writes_to_views_with_gradients(session: object) -> None:
    """torch's own backward pass of such a write has an offset, which counts from the base of a view."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        h = x @ w
        h[:, 1] = x[:, 0] * 2
        return torch.autograd.grad(h.square().sum(), w)[0]

    program = _compare(function, lambda base, start: (base[start : start + 4], base[:4]))
    assert program.recordings <= 3 and program.replays >= 7


def test_a_slice_of_what_the_function_finds_itself(session: object) -> None:
    data = _base(REMOTE)
    other = _base(REMOTE)
    program: Any = dr.program(lambda x: data.mul_(0.5)[0] + x.add_(1).sum())
    here, apart = _base("cpu"), _base("cpu")
    for k, start in enumerate((0, 2, 5, 1, 8, 3)):
        source, theirs = (here, data) if k < 4 else (apart, other)
        mine = here.mul_(0.5)[0] + source[start : start + 4].add_(1).sum()
        assert torch.equal(program(theirs[start : start + 4]).cpu(), mine), program.why
    assert torch.equal(data.cpu(), here) and torch.equal(other.cpu(), apart)


def test_a_number_that_nobody_can_follow_is_not_blamed_on_where_slices_begin(session: object) -> None:
    """What was blamed on that was recorded for each begin, and so in vain."""
    box = SimpleNamespace(rate=0.5, name="a")
    program: Any = dr.program(lambda x: x * box.rate + len(box.name))
    there = _base(REMOTE)
    for k, start in enumerate(_STARTS):
        box.rate, box.name = 0.5 / (k + 1), "a" if k == 0 else "b"
        x = there[start : start + 4]
        assert torch.equal(program(x).cpu(), (x * box.rate + 1).cpu()), program.why
    assert program.recordings <= 4 and program.replays >= 6


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "Adagrad"])
def test_an_optimizer_that_counts_its_steps_here_takes_slices(session: object, name: str) -> None:
    def made(device: str) -> tuple[Function, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, _base(device)

    (step, here), (there_step, there) = made("cpu"), made(REMOTE)
    program: Any = dr.program(there_step)
    for start in _STARTS:
        mine, theirs = step(here[start : start + 4]), program(there[start : start + 4])
        torch.testing.assert_close(theirs.cpu(), mine, msg=lambda text: f"{text}: {program.why}")
    assert program.recordings <= 5 and program.replays >= 5


def test_slices_on_several_streams(session: object) -> None:
    side = dr.Stream(0)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with dr.stream(side):
            first = x[1:] * 2
        dr.current_stream(0).wait_stream(side)
        return first.sum() + y.add_(1).sum()

    program: Any = dr.program(function)
    here, there = _base("cpu"), _base(REMOTE)
    for start in _STARTS:
        x, y = _two(here, start)
        mine = (x[1:] * 2).sum() + y.add_(1).sum()
        assert torch.equal(program(*_two(there, start)).cpu(), mine), program.why
        assert torch.equal(there.cpu(), here)
    assert program.replays >= 6
