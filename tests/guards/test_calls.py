"""What a call reads: what an error says of it, and a method that is C code around an object."""

from __future__ import annotations

import operator
import signal
import types

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
