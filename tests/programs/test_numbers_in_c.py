"""Numbers that a program follows, where C code takes them: it may decide something by them, or round them."""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import distruntime as dr
from agree import REMOTE

Step = Callable[[torch.Tensor, float], torch.Tensor]


@pytest.fixture
def x(session: object) -> torch.Tensor:
    return torch.ones(3, device=REMOTE)


@functools.cache
def _kept(value: float) -> float:
    return min(value, 8.0)


def _rooted(x: torch.Tensor, a: float) -> torch.Tensor:
    try:
        return x * a + math.sqrt(a - 8.0)
    except ValueError:
        return x * a


def _in_an_array(x: torch.Tensor, a: float) -> torch.Tensor:
    values = np.zeros(1, dtype=np.float32)
    values[0] = a
    return x * float(min(values[0], np.float32(8)))


def _in_a_tensor(x: torch.Tensor, a: float) -> torch.Tensor:
    values = torch.zeros(1)
    values[0] = a
    return x * values.clamp(max=8.0).item()


class Record(ctypes.Structure):
    """It keeps a float as C does."""

    _fields_ = (("small", ctypes.c_float),)


def _in_a_record(x: torch.Tensor, a: float, by_name: bool = False) -> torch.Tensor:
    record = Record()
    if by_name:
        setattr(record, "small", a)  # noqa: B010
    else:
        record.small = a
    return x * min(record.small, 8.0)


# Each gives what a float is, up to 8, or does something else behind that.
_BY_C: dict[str, Step] = {
    "a generator": lambda x, a: x * min(value for value in (a, 8.0)),
    "a sorted generator": lambda x, a: x * sorted(value for value in (a, 8.0))[0],
    "a generator in a map": lambda x, a: x * min(map(float, (value for value in (a, 8.0)))),
    "a loop over a map": lambda x, a: next(x * v for v in map(min, (v for v in (a,)), (8.0,))),
    "a key": lambda x, a: x * min([[a], [8.0]], key=lambda one: one[0])[0],
    "a function in a map": lambda x, a: x * min(map(lambda one: one[0], ([a], [8.0]))),
    "a loop over a filter": lambda x, a: x * a + len([v for v in filter(lambda v: v - 9, (a,))]),
    "in a tuple": lambda x, a: x + 100 if a in (0.0, 9.0) else x * a,
    "in a list": lambda x, a: x + 100 if a in [0.0, 9.0] else x * a,
    "in a set": lambda x, a: x + 100 if a in {0.0, 9.0} else x * a,
    "among others": lambda x, a: x + 100 if 9.0 in (a, 0.0) else x * a,
    "a pair in a list": lambda x, a: x + 100 if (a, 1) in [(9.0, 1)] else x * a,
    "a set": lambda x, a: x * (len({a, 9.0}) + a),
    "a comprehension of a set": lambda x, a: x * (len({v for v in (a, 9.0)}) + a),
    "keys": lambda x, a: x * (len({a: 1, 9.0: 2}) + a),
    "keys of a comprehension": lambda x, a: x * (len({v: 1 for v in (a, 9.0)}) + a),
    "a local tensor": lambda x, a: x * torch.tensor(a).clamp(max=8.0).item(),
    "a product of a local tensor": lambda x, a: x * (torch.ones(()) * a).clamp(max=8.0).item(),
    "an operator": lambda x, a: x * torch.ops.aten.mul(torch.ones(()), a).clamp(max=8.0).item(),
    "a local tensor that is filled": lambda x, a: x * torch.zeros(()).fill_(a).clamp(max=8.0).item(),
    "a cache": lambda x, a: x * _kept(a),
    "an error": _rooted,
    "an array": _in_an_array,
    "an item of a local tensor": _in_a_tensor,
    "a record of C": _in_a_record,
    "a record of C by a name": functools.partial(_in_a_record, by_name=True),
}


@pytest.mark.parametrize("name", _BY_C)
@pytest.mark.parametrize("argument", [False, True])
def test_a_float_by_which_c_code_decides_is_fixed(x: torch.Tensor, name: str, argument: bool) -> None:
    step, box = _BY_C[name], SimpleNamespace(a=0.0)
    program = dr.program(lambda x, a=None: step(x, box.a if a is None else a))
    # The cache has its answers to all of them before.
    for value in (1.5, 2.25, 9.0):
        _kept(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for box.a in (1.5, 2.25, 9.0, 9.0, 9.0, 9.0):
            found = program(x, box.a) if argument else program(x)
            assert found[0].item() == step(x, box.a)[0].item()
    assert program.replays, program.why


def test_a_float_of_a_group_by_which_c_code_decides_is_fixed(x: torch.Tensor) -> None:
    groups = [{"lr": 8.0}, {"lr": 0.25}]
    program = dr.program(lambda x: x * max(one["lr"] for one in groups))
    for value in (8.0, 4.0, 2.0, 1.0, 0.125):
        groups[0]["lr"] = value
        assert program(x)[0].item() == max(value, 0.25)


def test_a_float_that_a_local_tensor_rounds_is_fixed(session: object) -> None:
    x = torch.ones(2, dtype=torch.float64, device=REMOTE)
    program = dr.program(lambda x, a: x * torch.tensor(a).item())
    for value in (0.125, 0.25, 0.5, 0.75, 0.1):
        assert program(x, value)[0].item() == torch.tensor(value).item()


class Halves:
    """It has half a number."""

    def __init__(self, value: float) -> None:
        self.value = value

    @property
    def half(self) -> float:
        return self.value * 0.5


def _looped(x: torch.Tensor, a: float) -> torch.Tensor:
    for k, value in enumerate(2 * value for value in (a, a + 1)):
        x = x * value + k
    return x


def _in_place(x: torch.Tensor, a: float) -> torch.Tensor:
    y = [x.clone(), x.clone()]
    torch._foreach_mul_(y, [a, 2 * a])
    y[0][0] = a
    return y[0] + y[1]


_FOLLOWED: dict[str, Step] = {
    "a loop over a generator": lambda x, a: [x * value for value in (v for v in (a, 3.0))][0],  # noqa: RUF015
    "a numbered loop": _looped,
    "in place": _in_place,
    "an attribute of an object": lambda x, a: x * Halves(a).half,
    "an operator": lambda x, a: torch.ops.aten.mul(x, a) + torch.full((3,), a, device=REMOTE),
    "a key of a sort": lambda x, a: x * a + sorted([2, 1], key=lambda one: one)[0],
    "the first of a generator": lambda x, a: x * next(value for value in (a, 2.0)),
}


@pytest.mark.parametrize("name", _FOLLOWED)
def test_a_float_that_python_hands_on_is_followed(x: torch.Tensor, name: str) -> None:
    step = _FOLLOWED[name]
    program = dr.program(lambda x, a: step(x, a))
    for a in range(1, 9):
        assert torch.equal(program(x, float(a)), step(x, float(a)))
    assert program.replays == 6, program.why


def test_a_list_that_it_returns_is_read(x: torch.Tensor) -> None:
    kept = [1, 2]
    program = dr.program(lambda x: (x * 2, kept))
    for _ in range(4):
        program(x)
    assert program.replays
    kept.append(3)
    assert program(x)[1] == [1, 2, 3]
