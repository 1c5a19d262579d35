"""Threads, generators and tasks that call one program: each result is that of plain calls in some order."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.programs import turns

pytestmark = pytest.mark.filterwarnings("ignore:the program:UserWarning")


@pytest.fixture
def hasty() -> Iterator[None]:
    """Python goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _at_once(*bodies: Callable[[], object]) -> None:
    """Run functions in threads of their own, and raise what one of them has raised."""
    raised: list[str] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not raised, raised


@pytest.mark.parametrize("rows", [(2,), (2, 3), (1, 2, 3, 4)])
def test_each_of_several_threads_calls_has_its_turn(session: object, hasty: None, rows: tuple[int]) -> None:
    box = SimpleNamespace(h=torch.zeros(3).to(REMOTE), w=torch.zeros(3).to(REMOTE))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        box.w.add_(x.sum(0))
        box.h = box.h + x.sum(0)
        return box.h * 1, box.w * 1

    program = dr.program(step)
    xs = [torch.ones(n, 3).to(REMOTE) for n in rows]
    found: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def calls(k: int) -> None:
        for i in range(30):
            n = (i + k) % len(rows)
            found.append((rows[n], *program(xs[n])))

    _at_once(*(lambda k=k: calls(k) for k in range(4)))  # type: ignore[misc]
    read = [(n, h[0].item(), w[0].item()) for n, h, w in found]
    total = 0.0
    # In the order of what they have found, each has added its own.
    for n, h, w in sorted(read, key=lambda one: one[2]):
        total += n
        assert h == w == total
    assert box.h[0].item() == box.w[0].item() == total
    assert program.recordings + program.replays == len(found)
    assert program.recordings == 2 * len(rows)


def test_other_work_and_changes_of_other_threads_meanwhile(session: object, hasty: None) -> None:
    box = SimpleNamespace(k=1.0, flag=True, h=torch.zeros(3).to(REMOTE), count=0)
    over = threading.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        box.h.add_(1)
        return x * box.k if box.flag else x - box.k

    program, x = dr.program(step), torch.full((3,), 10.0).to(REMOTE)
    found: list[torch.Tensor] = []
    issued: list[torch.Tensor] = []

    def call() -> None:
        try:
            for _ in range(60):
                found.append(program(x))
        finally:
            over.set()

    def change() -> None:
        k = 0
        while not over.wait(0.0005):
            k += 1
            box.flag, box.k, box.count = k % 2 == 0, float(k % 3 + 1), box.count + 1

    def issue() -> None:
        y = torch.zeros(3).to(REMOTE)
        while not over.wait(0.0001):
            y = y + 1
        issued.append(y)

    _at_once(call, change, issue)
    assert {one[0].item() for one in found} <= {10.0, 20.0, 30.0, 9.0, 8.0, 7.0}
    assert box.h[0].item() == 60 and issued[0][0].item() >= 0


def test_a_thread_that_replaces_a_tensor_makes_no_error(session: object, hasty: None) -> None:
    box = SimpleNamespace(w=torch.ones(3).to(REMOTE))
    over = threading.Event()
    program, x = dr.program(lambda x: x * box.w + box.w), torch.ones(3).to(REMOTE)
    found: list[torch.Tensor] = []

    def call() -> None:
        try:
            for _ in range(60):
                found.append(program(x))
        finally:
            over.set()

    def replace() -> None:
        k = 1
        while not over.wait(0.0005):
            k = k % 3 + 1
            box.w = torch.full((3,), float(k), device=REMOTE)

    _at_once(call, replace)
    assert {one[0].item() for one in found} <= {2.0, 3.0, 4.0, 5.0, 6.0}


def test_a_function_may_wait_for_a_thread_that_calls_its_program(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.2)
    box = SimpleNamespace(w=torch.zeros(3).to(REMOTE), wait=True)
    others: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        box.w.add_(x)
        if box.wait and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: others.append(program(x)), daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        return box.w + 0  # type: ignore[no-any-return]

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    assert program(x)[0].item() == 2 and others[0][0].item() == 2
    box.wait = False
    assert [program(x)[0].item() for _ in range(4)] == [3, 4, 5, 6]


def test_a_call_waits_for_each_recording_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other recordings may have taken all its patience: each that ended was progress."""
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    mine, others = turns.Recorder(), []
    _at_once(lambda: others.append(turns.Recorder()))
    assert not mine.waits_for(others[0])
    monkeypatch.setattr(turns, "PATIENCE", 60.0)
    ends = threading.Timer(0.1, others[0].end)
    ends.start()
    assert mine.waits_for(others[0])
    ends.join(60)


def test_ctrl_c_ends_the_wait_for_another_thread(session: object) -> None:
    begun, over = threading.Event(), threading.Event()
    main = threading.main_thread()

    def step(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not main:
            begun.set()
            over.wait(60)
        return x + 1

    program, x = dr.program(step), torch.ones(3).to(REMOTE)

    def first() -> None:
        program(x)

    def strike() -> None:
        begun.wait(60)
        assert main.ident is not None
        # The main thread waits in `Event.wait` by then, or is about to.
        while not struck.wait(0.01):
            import signal

            signal.pthread_kill(main.ident, signal.SIGINT)
            struck.wait(0.2)

    struck = threading.Event()
    threads = [threading.Thread(target=body, daemon=True) for body in (first, strike)]
    try:
        threads[0].start()
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            threads[1].start()
            program(x)
            raise AssertionError("it did not wait")
    finally:
        struck.set()
        over.set()
        for thread in threads:
            thread.join(60)
    assert [program(x)[0].item() for _ in range(4)] == [2.0] * 4
    assert program.replays >= 2


def test_a_copy_of_a_program_has_its_own_turns() -> None:
    program = dr.program(lambda x: x + 1)
    assert copy.deepcopy(program)._turns is not program._turns


# -- generators and tasks ------------------------------------------------------------------------------------


def _count() -> Generator[int, None, None]:
    k = 0
    while True:
        k += 1
        yield k


def test_generators_that_call_programs_take_turns(session: object) -> None:
    box = SimpleNamespace(h=torch.zeros(3).to(REMOTE))

    def step(x: torch.Tensor) -> torch.Tensor:
        box.h = box.h + x
        return box.h * 1

    program, other = dr.program(step), dr.program(lambda x: box.h * 2 + x)
    x = torch.ones(3).to(REMOTE)

    def calls() -> Iterator[torch.Tensor]:
        for _ in range(8):
            yield program(x)

    found = [(one[0].item(), two[0].item(), other(x)[0].item()) for one, two in zip(calls(), calls())]
    assert found == [(2.0 * k + 1, 2.0 * k + 2, 2 * (2.0 * k + 2) + 1) for k in range(8)]
    assert program.replays >= 12 and other.replays >= 5


def test_tasks_call_a_program_while_others_read(session: object) -> None:
    factor = contextvars.ContextVar("factor", default=1.0)
    box = SimpleNamespace(h=torch.zeros(3).to(REMOTE))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        box.h = box.h + x
        return box.h * 1, x * factor.get()

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    found: list[tuple[float, float, float]] = []

    async def calls(k: float) -> None:
        factor.set(k)
        for _ in range(8):
            h, y = program(x)
            await asyncio.sleep(0)
            h_now = await asyncio.to_thread(lambda h=h: h[0].item())
            found.append((h_now, y[0].item(), k))

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(calls(2.0), calls(3.0)), 100)

    asyncio.run(both())
    assert sorted(h for h, _, _ in found) == [float(k) for k in range(1, 17)]
    assert all(y == k for _, y, k in found) and program.replays >= 10


def _ends(x: torch.Tensor) -> torch.Tensor:
    a = sum(k for k in (1, 2))
    b = 4 if any(k > 1 for k in (0, 1, 2, 3)) else 5
    return x * (a + next(k for k in (b, 9)))


def _awaits(x: torch.Tensor) -> torch.Tensor:
    async def inner() -> torch.Tensor:
        return x * 7

    going = inner()
    try:
        going.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError


@pytest.mark.parametrize("step", [_ends, _awaits])
def test_generators_and_coroutines_of_a_function_are_replayed(session: object, step: Any) -> None:
    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    assert [program(x)[0].item() for _ in range(5)] == [7.0] * 5
    assert program.replays == 3


@pytest.mark.parametrize("begun", [False, True])
def test_a_generator_that_is_left_midway_is_recorded(session: object, begun: bool) -> None:
    box: Any = SimpleNamespace(going=None)

    def twice(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x * 1
        yield x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        box.going = twice(x)
        if begun:
            next(box.going)
        return x + 1

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    for k in range(8):
        assert program(x + k)[0].item() == k + 2
        assert next(box.going)[0].item() == (2 if begun else 1) * (k + 1)
    assert program.replays == 0 and "leaves the generator 'twice' midway" in program.why


def test_a_generator_that_was_begun_before_is_recorded(session: object) -> None:
    going = [_count() for _ in range(3)]
    for one in going:
        next(one)

    def step(x: torch.Tensor) -> torch.Tensor:
        # Frames that end leave their identities to others.
        a = sum(next(k for k in (1, 2)) for _ in range(3))
        return x * (a + sum(next(one) for one in going))

    program, x = dr.program(step), torch.ones(3).to(REMOTE)
    assert [program(x)[0].item() for _ in range(6)] == [3.0 + 3 * (k + 2) for k in range(6)]
    assert program.replays == 0 and "was begun before" in program.why
