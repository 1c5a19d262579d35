"""What a call reads: what an error says of it, and a method that is C code around an object."""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.guards.seen import MISSING, ask


class Late(LookupError):
    """What a handler raises."""


def test_only_the_function_says_that_it_gives_nothing() -> None:
    def struck() -> None:
        signal.raise_signal(signal.SIGUSR1)

    def late(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGUSR1, late)
    try:
        assert ask(operator.getitem, ([], 0)) is MISSING
        with pytest.raises(Late):
            ask(struck, ())
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:the program:UserWarning")
def test_a_method_of_a_c_function_reads_its_object(session: object) -> None:
    numbers = [1.0, 2.0]
    total, first = types.MethodType(sum, numbers), types.MethodType(operator.getitem, numbers)
    program, x = dr.program(lambda x: x * total() + first(0)), torch.ones(2).to(REMOTE)
    assert [program(x)[0].item() for _ in range(4)] == [4.0] * 4 and program.replays > 0
    numbers[0] = 5.0
    assert program(x)[0].item() == 12.0


_libc = ctypes.CDLL(None)
_OUTSIDE: dict[str, Callable[[str], bool]] = {
    "a foreign function": lambda path: bool(_libc.access(path.encode(), 0) == 0),
    "a foreign function in a map": lambda path: [*map(_libc.access, [path.encode()], [0])] == [0],
    "a function of the system in a map": lambda path: any(map(os.access, [path], [0])),
    "a key": lambda path: max([path], key=lambda one: os.access(one, 0)) == path and os.access(path, 0),
}


@pytest.mark.filterwarnings("ignore:the program:UserWarning")
@pytest.mark.parametrize("name", _OUTSIDE)
def test_a_function_that_does_not_depend_on_its_arguments_alone(
    session: object, name: str, tmp_path: Path
) -> None:
    there, path, x = _OUTSIDE[name], tmp_path / "flag", torch.ones(2).to(REMOTE)
    program = dr.program(lambda x: x * (2 if there(str(path)) else 1))
    for _ in range(4):
        program(x)
    path.touch()
    assert program(x)[0].item() == 2.0 and not program.replays and "access()" in program.why


def test_c_code_may_get_functions_of_their_arguments(session: object) -> None:
    kept: list[object] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        # A list calls nothing.
        kept[:] = []
        kept.append(os.access)
        kept.clear()
        return x * sum(map(abs, [-1, 2]))

    program, x = dr.program(step), torch.ones(2).to(REMOTE)
    assert [program(x)[0].item() for _ in range(5)] == [3.0] * 5 and program.replays == 3, program.why
