"""Several sessions on one worker: a long function of one does not hold the others up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from distruntime_worker.values.draws import Draws, may_draw
from distruntime_worker.values.step import Run


def step(name: str, *args: object) -> Any:
    return SimpleNamespace(name=name, parts=(), pattern=SimpleNamespace(call=None, args=[*args]))


def function(random: bool) -> Any:
    return step("python::call f", "f", "object", [False, None], None, random)


def drawing(draws: Draws, of: Any, run: Run) -> Run:
    found = draws.around(of, run)
    assert found is not None
    return found


def test_a_function_that_draws_nothing_takes_no_generators() -> None:
    assert may_draw(function(True)) and not may_draw(function(False))
    assert Draws().around(function(False), lambda slots, p, i: 0) is None


def test_another_session_draws_beside_a_long_function_and_keeps_its_numbers() -> None:
    mine, others = Draws(), Draws()
    begun, go_on, numbers = threading.Event(), threading.Event(), list[float]()

    def long(slots: Any, p: Any, i: int) -> int:
        begun.set()
        assert go_on.wait(60)
        return 0

    def draws(slots: Any, p: Any, i: int) -> int:
        numbers.append(torch.rand(()).item())
        return 0

    seed = step("distruntime::manual_seed")

    def seeds(slots: Any, p: Any, i: int) -> int:
        torch.manual_seed(3)
        return 0

    state = torch.get_rng_state()
    try:
        for session in (mine, others):
            drawing(session, seed, seeds)({}, [], 0)
        thread = threading.Thread(target=drawing(mine, function(True), long), args=({}, [], 0))
        thread.start()
        assert begun.wait(60)
        # It comes back while the function still runs.
        for _ in range(2):
            drawing(others, function(True), draws)({}, [], 0)
        drawing(mine, function(True), draws)({}, [], 0)
        go_on.set()
        thread.join()
        drawing(mine, function(True), draws)({}, [], 0)
        drawing(others, function(True), draws)({}, [], 0)
        torch.manual_seed(3)
        alone = [torch.rand(()).item() for _ in range(3)]
        assert numbers == [alone[0], alone[1], alone[0], alone[1], alone[2]]
    finally:
        go_on.set()
        with Draws():
            torch.set_rng_state(state)
