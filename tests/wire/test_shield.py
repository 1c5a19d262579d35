"""What Ctrl-C and an exception from another thread leave behind: no lock that is taken for ever."""

from __future__ import annotations

import ast
import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from distruntime.wire.shield import InstantLock, InstantRLock, Lock, RLock, Shield
from processes import until
from rooms import MODULES
from strikes import Struck as StruckOnce
from strikes import strikes

KINDS = pytest.mark.parametrize("kind", [Lock, RLock, InstantLock, InstantRLock])
STRIKES = 300


class Struck(BaseException):
    """What is raised in the middle of something."""


def free(lock: Lock | RLock) -> bool:
    """Whether another thread can take a lock."""
    found: list[bool] = []

    def take() -> None:
        if lock.acquire(blocking=False):
            lock.release()
            found.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(found)


def enter(lock: Lock | RLock) -> None:
    """Take a lock again and again, until something is raised."""
    while True:
        with lock:
            pass


@KINDS
def test_a_signal_leaves_no_lock_taken(kind: Callable[[], Lock | RLock]) -> None:
    lock = kind()

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(STRIKES):
            with suppress(Struck):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                enter(lock)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert free(lock)


@KINDS
def test_an_exception_from_another_thread_leaves_no_lock_taken(kind: Callable[[], Lock | RLock]) -> None:
    lock, begun = kind(), [0]

    def struck() -> None:
        while begun[0] < STRIKES:
            try:
                # From here on it is struck once.
                begun[0] += 1
                enter(lock)
            except Struck:
                pass

    # A lock that stays taken would hold it for ever.
    thread = threading.Thread(target=struck, daemon=True)
    thread.start()
    for k in range(STRIKES):
        until(lambda: begun[0] > k)  # noqa: B023
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Struck)
        )
    thread.join(30)
    assert not thread.is_alive() and free(lock)


@KINDS
def test_with_takes_a_lock_and_lets_it_go(kind: Callable[[], Lock | RLock]) -> None:
    lock = kind()
    with lock:
        assert not free(lock)
    assert free(lock)
    with suppress(Struck), lock:
        raise Struck
    assert free(lock)
    assert lock.acquire(timeout=1) and not free(lock)
    lock.release()
    assert free(lock)


@pytest.mark.parametrize("kind", [RLock, InstantRLock])
def test_its_thread_may_take_it_again_and_a_condition_stands_on_it(kind: Callable[[], RLock]) -> None:
    lock, come = kind(), list[int]()
    arrived = threading.Condition(lock)

    def tell() -> None:
        with arrived:
            come.append(1)
            arrived.notify()

    thread = threading.Thread(target=tell)
    with lock, lock, arrived:
        thread.start()
        # It lets go of all three while it waits.
        assert arrived.wait_for(lambda: come, 30) and not free(lock)
    thread.join()
    assert free(lock)


# -- the shield ----------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("other", [signal.SIG_DFL, lambda *_: None], ids=["alone", "beside another"])
@pytest.mark.parametrize("number", SIGNALS)
def test_nothing_strikes_under_a_shield(number: int, other: Callable[..., object] | signal.Handlers) -> None:
    own, shield = signal.SIGUSR2, Shield()
    places, came = set(), 0
    before = signal.signal(own, other)
    try:
        handlers = [signal.getsignal(one) for one in (*SIGNALS, own)]
        for strike in strikes(number=number):
            done, raised = [], False
            try:
                with strike, shield:
                    done.append(1)
                    with shield:
                        done.append(2)
                    done.append(3)
            except StruckOnce:
                raised = True
            assert raised == bool(strike.struck)
            came += strike.came
            assert done in ([], [1, 2, 3]), strike.struck
            assert shield._depth == 0 and not shield._covered and not shield._struck
            assert [signal.getsignal(one) for one in (*SIGNALS, own)] == handlers, strike.struck
            places.add(strike.struck)
        assert came > 20 and len(places) > 5
    finally:
        signal.signal(own, before)


def test_all_that_has_come_under_a_shield_acts() -> None:
    shield, acted = Shield(), list[int]()

    def act(number: int, frame: object) -> None:
        acted.append(number)
        raise Struck(number)

    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, act) for number in numbers]
    try:
        with pytest.raises(Struck), shield:
            for number in (*numbers, *numbers):
                signal.raise_signal(number)
            assert not acted
        assert sorted(acted) == sorted(numbers)
        with shield:
            pass
        assert len(acted) == 3
    finally:
        for number, own in zip(numbers, before):
            signal.signal(number, own)


def test_no_module_makes_a_lock_that_ctrl_c_can_leave_taken() -> None:
    """A `Condition` is entered in Python, so who uses one sees to interrupts."""
    own = []
    for module, path in MODULES.items():
        if module in ("distruntime.wire.shield", "distruntime.guards.contents"):
            continue
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(one, ast.Attribute) and one.attr in ("Lock", "RLock"):
                own.append(f"{module}:{one.lineno}")
            elif isinstance(one, ast.ImportFrom) and one.module == "threading":
                own += [f"{module}:{one.lineno}" for name in one.names if name.name in ("Lock", "RLock")]
    assert own == []
