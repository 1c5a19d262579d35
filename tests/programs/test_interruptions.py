"""Signal handlers, exceptions and tracers amid a program's calls: state is as plain calls leave it."""

from __future__ import annotations

import builtins
import cProfile
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.log.tape import recorded
from distruntime.programs import parts
from distruntime.session.session import active_session
from fewer import fewer

SIGNAL = signal.SIGUSR1
UNTOUCHED = builtins.open, io.open, os._Environ.__getitem__

pytestmark = pytest.mark.filterwarnings("ignore:the program:UserWarning")


class Stop(Exception):
    """What is raised in the midst of something."""


@contextmanager
def _handling(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(SIGNAL, handler)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def _require_tidy() -> None:
    """Nothing of a recording is left."""
    assert sys.gettrace() is None and not recorded.name and not recorded.aside and not recorded.covered
    assert (builtins.open, io.open, os._Environ.__getitem__) == UNTOUCHED
    assert not any(log.tapes for log in active_session().logs)


def _strike() -> None:
    signal.raise_signal(SIGNAL)


# -- signal handlers -----------------------------------------------------------------------------------------


def test_what_a_handler_issues_is_no_part_of_a_program(session: object) -> None:
    box = SimpleNamespace(w=torch.zeros(3).to(REMOTE), n=torch.zeros(3).to(REMOTE))

    def step(x: torch.Tensor) -> torch.Tensor:
        box.w.add_(x)
        _strike()
        return box.w + 0

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    with _handling(lambda *_: box.n.add_(1)):
        for k in range(4):
            assert program(x).tolist() == [k + 1] * 3
            assert box.n.tolist() == [k + 1] * 3
    assert program.replays == 0 and "signal handler '<lambda>' has run" in program.why
    # Another handler does something else.
    with _handling(lambda *_: box.n.zero_()):
        program(x)
    assert box.n.tolist() == [0] * 3
    _require_tidy()


def test_a_handler_may_read_values_change_state_and_call_programs(session: object) -> None:
    box = SimpleNamespace(w=torch.zeros(3).to(REMOTE), struck=0)
    seen: list[float] = []
    other = dr.program(lambda x: x * 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        box.w.add_(x)
        _strike()
        box.w.add_(x)
        return box.w + 0

    program, x = dr.program(step), torch.ones(3).to(REMOTE)

    def handler(*_: object) -> None:
        box.struck += 1
        if box.struck % 2:
            seen.append(box.w[0].item())
            seen.append(other(x)[0].item())
            # It strikes within.
            program(x)

    with _handling(handler):
        assert [program(x)[0].item() for _ in range(3)] == [4.0, 8.0, 12.0]
    assert seen == [1.0, 3.0, 5.0, 3.0, 9.0, 3.0] and box.struck == 6
    _require_tidy()


def test_a_handler_that_only_runs_python_costs_no_replay(session: object) -> None:
    ticks: list[float] = []
    clock = SimpleNamespace(now=0.0)

    def handler(number: int, frame: FrameType | None) -> None:
        clock.now += 0.5
        ticks.append(clock.now)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        _strike()
        return y + 1

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    with _handling(handler):
        assert [program(x)[0].item() for _ in range(5)] == [3.0] * 5
    assert program.replays == 3 and len(ticks) == 2


def test_a_handler_strikes_from_another_thread_all_the_time(session: object) -> None:
    box = SimpleNamespace(w=torch.zeros(3).to(REMOTE), n=torch.zeros(3).to(REMOTE), ran=0)
    over = threading.Event()

    def handler(*_: object) -> None:
        box.n.add_(1)
        box.ran += 1

    def strike() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not over.wait(0.001):
            signal.pthread_kill(main, SIGNAL)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            box.w.add_(x)
        return box.w + 0

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    thread = threading.Thread(target=strike)
    with _handling(handler):
        thread.start()
        for k in range(20):
            assert program(x)[0].item() == 5 * (k + 1)
        over.set()
        thread.join(60)
        assert not thread.is_alive()
        ran = box.ran
        assert box.n.tolist() == [ran] * 3
    for k in range(20, 24):
        assert program(x)[0].item() == 5 * (k + 1)
    assert box.n.tolist() == [ran] * 3
    _require_tidy()


def test_a_handler_that_the_function_sets_stays(session: object) -> None:
    def mine(*_: object) -> None:
        pass

    def step(x: torch.Tensor) -> torch.Tensor:
        signal.signal(SIGNAL, mine)
        return x + 1

    with _handling(lambda *_: None):
        dr.program(step)(torch.ones(3).to(REMOTE))
        assert signal.getsignal(SIGNAL) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_what_a_handler_raises_gets_to_the_user(session: object, kind: type[BaseException]) -> None:
    box, raises = SimpleNamespace(w=torch.zeros(3).to(REMOTE)), [True]

    def handler(*_: object) -> None:
        if raises[0]:
            raise kind

    def step(x: torch.Tensor) -> torch.Tensor:
        box.w.add_(x)
        _strike()
        box.w.add_(x)
        return box.w + 0

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    with _handling(handler):
        for k in range(3):
            with pytest.raises(kind):
                program(x)
            assert box.w.tolist() == [k + 1] * 3
            _require_tidy()
        raises[0] = False
        assert [program(x)[0].item() for _ in range(4)] == [5.0, 7.0, 9.0, 11.0]
    assert program.replays > 0


# -- exceptions ----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "adamw": lambda own: torch.optim.AdamW(own, lr=0.1),
}


def _training(device: Any, optimizer: str) -> tuple[Any, Any, list[int]]:
    """Return an object with state, a step that raises at the point that stands in the list, and the list."""
    torch.manual_seed(0)
    box = SimpleNamespace(
        p=torch.nn.Parameter(torch.randn(4, 4).to(device)),
        h=torch.zeros(4).to(device),
        w=torch.zeros(4).to(device),
    )
    box.optimizer = OPTIMIZERS[optimizer]([box.p])
    raise_at = [0]

    def at(point: int) -> None:
        if raise_at[0] == point:
            raise Stop

    def step(x: torch.Tensor) -> torch.Tensor:
        box.optimizer.zero_grad()
        at(1)
        y = torch.tanh(x @ box.p + box.h)
        at(2)
        box.h = y.detach().sum(0)
        at(3)
        loss = y.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        at(4)
        box.w.add_(box.p.grad.sum(0))
        at(5)
        box.optimizer.step()
        at(6)
        box.w.mul_(0.5)
        return loss.detach()

    return box, step, raise_at


def _state(box: Any) -> list[torch.Tensor | None]:
    kept = [v for own in box.optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    found = [box.p, box.h, box.w, box.p.grad, *kept]
    return [None if one is None else one.detach().cpu() for one in found]


@pytest.mark.parametrize("optimizer", fewer(OPTIMIZERS, 3, "another function, 2 s"))
@pytest.mark.parametrize("call", [0, 1, 2, 5])
def test_an_exception_at_each_point_leaves_what_the_plain_call_leaves(
    session: object, optimizer: str, call: int
) -> None:
    for point in range(1, 7):
        mine, plain, mine_at = _training("cpu", optimizer)
        theirs, step, theirs_at = _training(REMOTE, optimizer)
        program = dr.program(step)
        for k in range(9):
            x = torch.full((3, 4), 0.1 * k)
            mine_at[0] = theirs_at[0] = point if k == call else 0
            for function, value in ((plain, x), (program, x.to(REMOTE))):
                if k == call:
                    with pytest.raises(Stop):
                        function(value)
                else:
                    function(value)
            _require_tidy()
            for one, other in zip(_state(mine), _state(theirs), strict=True):
                assert (one is None) == (other is None), (point, k)
                assert one is None or other is None or torch.equal(one, other), (point, k)
        assert program.replays >= 2


@contextmanager
def _interrupted_before(number: int, interrupt: Callable[[], object]) -> Iterator[None]:
    """Interrupt a replay before this one of what it issues."""
    before = {kind: kind.issue for kind in (parts.Piece, parts.Bridge)}
    count = [0]

    def wrapped(own: Any) -> Any:
        def issue(*args: Any) -> None:
            count[0] += 1
            if count[0] == number:
                interrupt()
            own(*args)

        return issue

    for kind, own in before.items():
        kind.issue = wrapped(own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, own in before.items():
            kind.issue = own  # type: ignore[method-assign]


@pytest.mark.parametrize("in_turns", [False, True])
def test_ctrl_c_between_the_parts_of_a_replay(session: object, in_turns: bool) -> None:
    here, there = dr.place(0, "cpu"), dr.place(1, "cpu")
    for number in range(1, 6):
        box = SimpleNamespace(a=torch.zeros(3).to(here), b=torch.zeros(3).to(there))
        box.h, box.c = torch.zeros(3).to(there), torch.zeros(3).to(here)

        def step(x: torch.Tensor, box: Any = box) -> torch.Tensor:
            box.a.add_(x)
            y = box.a.to(there)
            box.b.add_(y * 0 + 1)
            box.h = box.h + y * 0 + 1
            box.c.add_(box.b.to(here) * 0 + 1)
            return box.c + 0  # type: ignore[no-any-return]

        def values(box: Any = box) -> list[float]:
            return [one[0].item() for one in (box.a, box.b, box.h, box.c)]

        program = dr.program(step)
        xs = [torch.ones(3).to(here), torch.ones(3, 3).to(here)[:, 0] if in_turns else torch.ones(3).to(here)]
        for k in range(8):
            program(xs[k % 2])
        assert values() == [8.0] * 4 and program.replays >= 4
        replays = program.replays
        with (
            pytest.raises(KeyboardInterrupt),
            _interrupted_before(number, lambda: signal.raise_signal(signal.SIGINT)),
        ):
            program(xs[0])
        # A plain call would have been left between two instructions too.
        done = [value - 8 for value in values()]
        assert set(done) <= {0.0, 1.0} and done[0] >= done[1] >= done[2] >= done[3], (number, done)
        assert done[0] == (number > 1) and done[3] == 0
        _require_tidy()
        before = values()
        for k in range(4):
            program(xs[k % 2])
            assert [value - old for value, old in zip(values(), before)] == [k + 1.0] * 4
        assert program.replays > replays


def test_steps_are_counted_where_a_replay_is_interrupted(session: object) -> None:
    box, step, _ = _training(REMOTE, "adamw")
    program, x = dr.program(step), torch.ones(3, 4).to(REMOTE)
    for _ in range(6):
        program(x)
    assert program.replays >= 2
    (own,) = box.optimizer.state.values()
    with pytest.raises(Stop), _interrupted_before(1, lambda: (_ for _ in ()).throw(Stop)):
        program(x)
    # The plain optimizer counts a step before it issues anything of it, so this is no state of its own.
    assert own["step"].item() == 7
    mine, plain, _ = _training("cpu", "adamw")
    for _ in range(6):
        plain(torch.ones(3, 4))
    (counted,) = mine.optimizer.state.values()
    counted["step"] += 1
    for _ in range(3):
        program(x)
        plain(torch.ones(3, 4))
        assert torch.equal(mine.p.detach(), box.p.detach().cpu())


# -- tracers -------------------------------------------------------------------------------------------------


def test_a_debugger_goes_on_behind_a_recording(session: object) -> None:
    program, x = dr.program(lambda x: x + 1), torch.ones(3).to(REMOTE)
    lines: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name in ("outer", "behind"):
            lines.append(f"{frame.f_code.co_name} {event}")
            return trace
        return None

    def behind() -> int:
        return 1

    def outer() -> int:
        for _ in range(4):
            program(x)
            behind()
        return 2

    sys.settrace(trace)
    try:
        outer()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert lines.count("behind line") == 4 and lines.count("outer line") == 4 * 3 + 2
    assert program.replays == 2


def test_a_generator_is_shown_to_a_debugger_line_by_line_behind_a_recording(session: object) -> None:
    box, lines = SimpleNamespace(going=None), []

    def count() -> Iterator[int]:
        yield 1
        yield 2

    def step(x: torch.Tensor) -> torch.Tensor:
        box.going = count()
        return x * next(box.going)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        lines.append(event)
        return trace if frame.f_code is count.__code__ else None

    dr.program(step)(torch.ones(3).to(REMOTE))
    sys.settrace(trace)
    try:
        assert next(box.going) == 2
    finally:
        sys.settrace(None)
    assert "line" in lines


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tools stand side by side there")
def test_a_debugger_that_begins_in_a_function_makes_it_unfit(session: object) -> None:
    box = SimpleNamespace(k=2.0)

    def trace(frame: FrameType, event: str, argument: object) -> None:
        return None

    def step(x: torch.Tensor) -> torch.Tensor:
        sys.settrace(trace)
        return x * box.k  # type: ignore[no-any-return]

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    try:
        for k in range(4):
            box.k = float(k)
            assert program(x)[0].item() == k
            assert sys.gettrace() is trace
            sys.settrace(None)
    finally:
        sys.settrace(None)
    assert program.replays == 0 and "another trace function was set" in program.why


def test_a_profiler_stands_beside(session: object) -> None:
    box = SimpleNamespace(h=torch.zeros(3).to(REMOTE))

    def step(x: torch.Tensor) -> torch.Tensor:
        box.h = box.h + x
        return box.h * 2  # type: ignore[no-any-return]

    program, x, profile = dr.program(step), torch.ones(3).to(REMOTE), cProfile.Profile()
    profile.enable()
    try:
        found = [program(x)[0].item() for _ in range(6)]
    finally:
        profile.disable()
    assert found == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0] and program.replays >= 3


def test_the_collector_is_as_it_was_after_an_exception(session: object) -> None:
    gc.unfreeze()
    try:

        def step(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            raise Stop

        program, x = dr.program(step), torch.ones(3).to(REMOTE)
        for _ in range(3):
            with suppress(Stop):
                program(x)
            assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()
