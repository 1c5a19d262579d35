"""Calls that are recorded again and again run plainly, and the user is told; recordings that pay go on."""

from __future__ import annotations

import gc
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.programs.side_effects import young_cycles_end
from distruntime_worker.python.alarms import alarms


@pytest.fixture
def x(session: object) -> torch.Tensor:
    return torch.ones(3, device=REMOTE)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let no warning be shown: each is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_a_step_that_never_is_replayed_runs_plainly_and_says_so_once(x: torch.Tensor) -> None:
    box = SimpleNamespace(k=0)
    program = dr.program(lambda x: x * (box.k % 3 + 1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for k in range(40):
            box.k = k
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            assert program(x).tolist() == [k % 3 + 1.0] * 3
    (warned,) = [one for one in seen if issubclass(one.category, UserWarning)]
    assert (warned.filename, warned.lineno) == (__file__, line)
    text = str(warned.message)
    assert "'<lambda>' was recorded 5 times" in text and "pass what changes as an argument" in text
    assert program.replays == 0 and program.recordings <= 8
    assert program.why.startswith("it runs plainly") and "box.k was" in program.why


def test_a_plan_that_fits_is_replayed_again(x: torch.Tensor) -> None:
    box = SimpleNamespace(k=0)
    program = dr.program(lambda x: x + box.k)
    with pytest.warns(UserWarning, match="was recorded 5 times"):
        for k in (0, 0, 0, 1, 2, 3, 4, 5, 6, 7):
            box.k = k
            assert program(x).tolist() == [k + 1.0] * 3
    assert program.replays == 1 and program.why.startswith("it runs plainly")
    box.k = 0
    assert program(x).tolist() == [1.0] * 3 and program.replays == 2 and not program.why
    # It may be recorded again after that.
    before, box.k = program.recordings, 9
    for _ in range(3):
        assert program(x).tolist() == [10.0] * 3
    assert program.recordings == before + 2 and program.replays == 3


def test_it_tries_again_after_a_hundred_plain_calls(x: torch.Tensor) -> None:
    box = SimpleNamespace(k=0)
    program = dr.program(lambda x: x + box.k)
    with pytest.warns(UserWarning, match="was recorded 5 times"):
        for k in range(104):
            box.k = min(k, 20)
            last = program(x)
    assert last.tolist() == [21.0] * 3 and (program.recordings, program.replays) == (5, 0)
    for _ in range(10):
        last = program(x)
    assert last.tolist() == [21.0] * 3 and (program.recordings, program.replays) == (7, 7)


def test_plans_in_turns_are_not_in_vain(x: torch.Tensor, quiet: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).to(REMOTE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = dr.program(step)
    for k in range(20):
        model.train(k % 2 == 0)
        program(x)
    assert program.replays >= 13 and not program.why


def test_eight_plans_that_are_used_before_they_change(x: torch.Tensor, quiet: None) -> None:
    box = SimpleNamespace(k=0)
    program = dr.program(lambda x: x + box.k)
    for _ in range(2):
        for k in range(8):
            box.k = k
            assert [program(x).tolist() for _ in range(3)] == [[k + 1.0] * 3] * 3
    assert (program.recordings, program.replays) == (16, 32)


def test_recordings_that_verify_are_not_in_vain(x: torch.Tensor, quiet: None) -> None:
    program = dr.program(lambda x: x + 1, verify=True)
    for _ in range(12):
        program(x)
    assert (program.recordings, program.replays) == (12, 0)
    assert program.why.startswith("it was recorded again to compare")


def test_what_a_plain_call_returns_has_no_graph(x: torch.Tensor) -> None:
    box = SimpleNamespace(k=0, w=torch.nn.Parameter(torch.ones(3, device=REMOTE)))
    program: Any = dr.program(lambda x: {"y": x * box.w * box.k, "x": x, "n": 3})
    with pytest.warns(UserWarning, match="was recorded 5 times"):
        for k in range(8):
            box.k = k
            found = program(x)
    assert found["x"] is x and found["n"] == 3 and found["y"].tolist() == [7.0] * 3
    with pytest.raises(dr.errors.UsageError, match="its graph stays in the program"):
        found["y"].sum().backward()


def test_slices_that_each_need_a_recording_run_plainly(session: object) -> None:
    program: Any = dr.program(lambda x: torch.as_strided(x, (2,), (1,), x.storage_offset() + 1) * 2)
    here, there = torch.arange(20.0), torch.arange(20.0, device=REMOTE)
    with pytest.warns(UserWarning, match="it asks where an argument begins in its memory"):
        for k in range(12):
            assert program(there[k : k + 4]).tolist() == (here[k + 1 : k + 3] * 2).tolist()
    assert program.recordings == 5


# -- cycles --------------------------------------------------------------------------------------------------


class _Node:
    """It holds itself, and a value."""

    def __init__(self, value: object = None) -> None:
        self.value, self.me = value, self


@pytest.mark.parametrize("frozen", [False, True])
def test_values_that_only_cycles_hold_are_let_go_of(x: torch.Tensor, frozen: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        node = _Node()
        node.value = x * 2
        total: torch.Tensor = node.value.sum()
        return total

    program = dr.program(step)
    if not frozen:
        gc.unfreeze()
    try:
        for _ in range(4):
            assert program(x).item() == 6.0
        assert program.replays == 2 and (frozen or not gc.get_freeze_count())
    finally:
        if not frozen:
            gc.freeze()


@pytest.mark.parametrize("collection", (0, 1, 2, None))
def test_what_gc_freeze_hides_is_said(collection: int | None) -> None:
    with young_cycles_end() as steady:
        if collection is not None:
            gc.collect(collection)
    with young_cycles_end() as frozen:
        if collection is not None:
            gc.collect(collection)
        gc.freeze()
    assert not steady.reasons
    assert [reason for reason in frozen.reasons if "gc.freeze() was called" in reason]


def test_what_is_left_elsewhere_is_still_refused(x: torch.Tensor) -> None:
    hidden = threading.local()

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden.value = x * 2
        return x + 1

    program = dr.program(step)
    # A thread of the worker's own waits for this. It is none of the user's, and once begun it does not end.
    alarm = alarms.after(60, lambda: None)
    try:
        with pytest.raises(dr.errors.NotSupportedError, match="where it cannot be found"):
            for _ in range(3):
                program(x)
    finally:
        alarms.call_off(alarm)


def _swapped(
    step: Callable[..., Any], hold: bool, x: torch.Tensor
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Call a function eight times; return what each call gave, and all that it gave where it is held."""
    given, held = [], []
    for _ in range(8):
        out = step(x)
        given.append(out.tolist())
        if hold:
            held.append(out)
        del out
    return given, held


@pytest.mark.parametrize("hold", [False, True])
def test_the_caller_may_let_go_of_state_that_was_returned(session: object, hold: bool) -> None:
    """Two buffers take turns, and one of them is returned: in a recorded call that is the buffer itself."""
    found = []
    for make in (lambda function: function, dr.program):
        box, x = Buffers(), torch.ones(4, device=REMOTE)

        def step(x: torch.Tensor, box: Buffers = box) -> torch.Tensor:
            box.one.mul_(0.5)
            box.one, box.two = box.two, box.one
            box.one.add_(x)
            return box.one

        program = make(step)
        given, held = _swapped(program, hold, x)
        found.append((given, [t.tolist() for t in held], box.one.tolist(), box.two.tolist()))
    assert found[0] == found[1]
    assert program.replays == 6 and not program.why


class Buffers:
    """Two tensors that take turns."""

    def __init__(self) -> None:
        self.one, self.two = torch.zeros(4, device=REMOTE), torch.ones(4, device=REMOTE)
