"""Random numbers that a function draws in this process: a replay would draw the same ones again."""

from __future__ import annotations

import contextvars
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import distruntime as dr
from agree import REMOTE


class Kept:
    """It has generators, and no functions, by which a walk would know it."""

    numpy = np.random.default_rng(0)
    old = np.random.RandomState(0)
    bits = np.random.PCG64(0)
    python = random.Random(0)
    torch = torch.Generator().manual_seed(0)


_context: contextvars.ContextVar[np.random.Generator] = contextvars.ContextVar("generator")
_context.set(np.random.default_rng(0))
_members = {np.random.default_rng(0)}
_keys = {np.random.RandomState(0): 1}


@functools.cache
def _cached() -> np.random.Generator:
    return np.random.default_rng(0)


_cached()


def _imported() -> float:
    from numpy.random import default_rng

    return float(default_rng().random())


def _shuffled() -> float:
    numbers = [*map(float, range(9))]
    Kept.old.shuffle(numbers)
    return numbers[0]


def _put_back() -> float:
    state = Kept.old.get_state()
    found = float(Kept.old.rand())
    Kept.old.set_state(state)
    return found


_DRAWS: dict[str, Callable[[], Any]] = {
    "an old generator of numpy": lambda: Kept.old.rand(),
    "all of numpy": lambda: np.random.rand(),
    "all of python": lambda: random.uniform(0, 1),
    "a generator of a class": lambda: Kept.numpy.random(),
    "bits": lambda: Kept.bits.random_raw() % 7,
    "bits in a generator": lambda: np.random.Generator(Kept.bits).random(),
    "a generator of python": lambda: Kept.python.randint(0, 9),
    "a generator of torch": lambda: torch.rand(1, generator=Kept.torch).item(),
    "a context variable": lambda: _context.get().random(),
    "a cache": lambda: _cached().random(),
    "a set": lambda: next(iter(_members)).random(),
    "a key": lambda: next(iter(_keys)).rand(),
    "a map": lambda: sum(map(Kept.numpy.random, [None])),
    "an iterator": lambda: next(iter(Kept.python.random, 3)),
    "no seed": lambda: np.random.RandomState().rand(),
    "no seed of python": lambda: random.Random().random(),
    "no seed of bits": lambda: np.random.Generator(np.random.PCG64()).random(),
    "the system": lambda: random.SystemRandom().random(),
    "an import": _imported,
    "a shuffle": _shuffled,
    "a state": lambda: int(Kept.old.get_state()[2]),
    "a state that is put back": _put_back,
}


@pytest.mark.parametrize("name", _DRAWS)
def test_a_function_that_draws_here_is_recorded_each_time(session: object, name: str) -> None:
    x, draw = torch.ones(2, device=REMOTE), _DRAWS[name]
    program = dr.program(lambda x: x * draw())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(4):
            program(x)
    assert not program.replays and "random numbers in this process" in program.why


def test_draws_come_as_in_plain_calls(session: object) -> None:
    x, found = torch.ones(2, device=REMOTE), []
    for wrap in (lambda f: f, dr.program):
        state = np.random.RandomState(0)
        called: Any = wrap(lambda x, state=state: x * 2 if state.rand() < 0.9 else x * 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found.append([called(x)[0].item() for _ in range(9)])
    assert found[0] == found[1] and 3.0 in found[0]


_SEEDED: dict[str, Callable[[], Any]] = {
    "bits": lambda: np.random.Generator(np.random.PCG64(3)).random(),
    "python": lambda: random.Random(3).random(),
    "torch": lambda: torch.rand(1, generator=torch.Generator().manual_seed(3)).item(),
}


@pytest.mark.parametrize("name", _SEEDED)
def test_a_generator_that_the_call_makes_of_a_seed_is_no_reason(session: object, name: str) -> None:
    x, draw = torch.ones(2, device=REMOTE), _SEEDED[name]
    program = dr.program(lambda x: x * draw())
    assert len({program(x)[0].item() for _ in range(5)}) == 1 and program.replays == 3, program.why


def test_a_generator_of_the_system_may_be_named(session: object) -> None:
    x, system = torch.ones(2, device=REMOTE), random.SystemRandom()
    program = dr.program(lambda x: x * (2 if system is not None else 3))
    assert [program(x)[0].item() for _ in range(4)] == [2.0] * 4 and program.replays == 2
