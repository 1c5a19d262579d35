"""What a call puts in place of what it has read: the next call finds that, and a plan is made of both."""

from __future__ import annotations

import contextvars
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import distruntime as dr
from agree import REMOTE

# A program that is recorded at each call says so once.
pytestmark = pytest.mark.filterwarnings("ignore:the program:UserWarning")

CALLS = 13
# It makes a function of a tensor, on a device, with state of its own.
Make = Callable[[str], Callable[[Any], Any]]


def _given(function: Any, device: str) -> list[list[float]]:
    x = torch.ones(2).to(device)
    return [function(x).tolist() for _ in range(CALLS)]


def _agrees(make: Make) -> Any:
    """Call a program and the function as it is. Each has state of its own. Return the program."""
    program: Any = dr.program(make(REMOTE))
    assert _given(program, REMOTE) == _given(make("cpu"), "cpu")
    return program


# -- another thing in its place ------------------------------------------------------------------------------


def _lists_in_turns(device: str) -> Callable[[Any], Any]:
    box = SimpleNamespace(a=[1.0], b=[2.0])
    box.now = box.a

    def step(x: Any) -> Any:
        y = x * box.now[0]
        box.now = box.b if box.now is box.a else box.a
        return y

    return step


def _lists_in_a_tuple(device: str) -> Callable[[Any], Any]:
    box = SimpleNamespace(a=[1.0], b=[1.0])
    box.now = (box.a,)

    def step(x: Any) -> Any:
        first = box.now[0] is box.a
        box.now = (box.b,) if first else (box.a,)
        return x * (2 if first else 3)

    return step


def _something_or_nothing(device: str) -> Callable[[Any], Any]:
    box, thing = SimpleNamespace(now=None), [1.0]

    def step(x: Any) -> Any:
        y = x * (2 if box.now is None else 3)
        box.now = thing if box.now is None else None  # type: ignore[assignment]
        return y

    return step


def _functions_in_turns(device: str) -> Callable[[Any], Any]:
    functions = [lambda x: x * 2, lambda x: x * 3]

    def step(x: Any) -> Any:
        y = functions[0](x)
        functions.reverse()
        return y

    return step


def _partial_functions_in_turns(device: str) -> Callable[[Any], Any]:
    box = SimpleNamespace(now=functools.partial(torch.mul, other=2))

    def step(x: Any) -> Any:
        y, doubles = box.now(x), box.now.func is torch.mul
        box.now = functools.partial(torch.add if doubles else torch.mul, other=2)
        return y

    return step


def _number_of_numpy(device: str) -> Callable[[Any], Any]:
    box = SimpleNamespace(n=np.int64(0))

    def step(x: Any) -> Any:
        box.n = box.n + 1
        return x * 2 if box.n % 6 == 0 else x * 1

    return step


def _number_in_an_array(device: str) -> Callable[[Any], Any]:
    numbers = np.zeros(1)

    def step(x: Any) -> Any:
        y = x * 2 if numbers[0] % 6 == 5 else x * 1
        numbers[0] += 1
        return y

    return step


def _attribute_of_a_new_list(device: str) -> Callable[[Any], Any]:
    class Items(list[float]):
        scale = 0

    box = SimpleNamespace(now=Items())

    def step(x: Any) -> Any:
        y, now = x * (box.now.scale % 2 + 2), Items()
        now.scale = box.now.scale + 1
        box.now = now
        return y

    return step


def _flag_in_a_context(device: str) -> Callable[[Any], Any]:
    flag = contextvars.ContextVar("flag", default=True)

    def step(x: Any) -> Any:
        was = flag.get()
        flag.set(not was)
        return x * 2 if was else x * 3

    return step


def _object_in_a_context(device: str) -> Callable[[Any], Any]:
    one, other = object(), object()
    which = contextvars.ContextVar("which", default=one)

    def step(x: Any) -> Any:
        was = which.get()
        which.set(other if was is one else one)
        return x * 2 if was is one else x * 3

    return step


@pytest.mark.parametrize(
    "make",
    [
        _lists_in_turns,
        _lists_in_a_tuple,
        _something_or_nothing,
        _functions_in_turns,
        _partial_functions_in_turns,
        _number_of_numpy,
        _number_in_an_array,
        _attribute_of_a_new_list,
        _flag_in_a_context,
        _object_in_a_context,
    ],
)
def test_another_thing_in_its_place_lets_no_call_be_replayed(session: object, make: Make) -> None:
    program = _agrees(make)
    assert program.replays == 0 and "it left" in program.why


# -- what is alike -------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a call leaves in an object of the user's."""

    h: Any
    scale: float = 2.0


class Pair(NamedTuple):
    """What a call leaves in a tuple with names."""

    h: Any
    scale: float


def _new_state(make: Callable[[Any], Any], read: Callable[[Any], Any]) -> Make:
    def of_device(device: str) -> Callable[[Any], Any]:
        box = SimpleNamespace(state=make(torch.zeros(2).to(device)))

        def step(x: Any) -> Any:
            h = read(box.state) * 0.5 + x
            box.state = make(h)
            return h + 0

        return step

    return of_device


_ALIKE: dict[str, Make] = {
    "tuple": _new_state(lambda h: (h, 1), lambda state: state[0] * state[1]),
    "tuple of lists": _new_state(lambda h: ([h], {"scale": 2}), lambda s: s[0][0] * s[1]["scale"]),
    "list": _new_state(lambda h: [h], lambda state: state[0]),
    "dictionary": _new_state(lambda h: {"h": h, "scale": 2}, lambda state: state["h"] * state["scale"]),
    "dictionary that makes values": _new_state(lambda h: defaultdict(int, h=h), lambda state: state["h"]),
    "object": _new_state(State, lambda state: state.h * state.scale),
    "tuple with names": _new_state(lambda h: Pair(h, 2.0), lambda state: state.h * state.scale),
    "number of numpy": _new_state(lambda h: (h, np.float64(0.5)), lambda s: s[0] * float(s[1])),
    "range": _new_state(lambda h: (h, range(3)), lambda state: state[0] * len(state[1])),
}


@pytest.mark.parametrize("name", _ALIKE)
def test_a_new_object_that_is_alike_is_replayed(session: object, name: str) -> None:
    program = _agrees(_ALIKE[name])
    assert program.replays >= CALLS - 4, program.why


def test_what_a_call_makes_before_it_reads_is_replayed(session: object) -> None:
    def make(device: str) -> Callable[[Any], Any]:
        class Box:
            def __init__(self) -> None:
                self.table: dict[str, int] = {}
                self.act: Any = None
                self.now: Any = self.table

            def double(self, x: Any) -> Any:
                return x * self.table["scale"]

            def step(self, x: Any) -> Any:
                # Each key is a text of its own.
                self.table.clear()
                self.table["".join(["sc", "ale"])] = 2
                self.act, self.now = self.double, [3]
                y = self.act(x) * self.now[0] * len([*self.table])
                self.now = self.table
                return y

        return Box().step

    program = _agrees(make)
    assert program.replays >= CALLS - 4, program.why
