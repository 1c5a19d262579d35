"""Factories that torch makes by an `out=` form elsewhere: they wait for nobody, and give what a CPU gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distruntime as dr
from agree import REMOTE

FACTORIES: dict[str, Callable[[str], torch.Tensor]] = {
    "arange": lambda d: torch.arange(8, device=d),
    "arange of none": lambda d: torch.arange(0, device=d),
    "arange of a float": lambda d: torch.arange(2.0, device=d),
    "arange of that number": lambda d: torch.arange(2, device=d),
    "arange of a bool": lambda d: torch.arange(True, device=d),
    "arange from": lambda d: torch.arange(-0.0, 3.0, device=d),
    "arange backwards": lambda d: torch.arange(3, 0, -1, device=d),
    "arange in steps": lambda d: torch.arange(0, 1, 0.1, device=d),
    "arange with a dtype": lambda d: torch.arange(3, dtype=torch.bfloat16, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "eye that is not square": lambda d: torch.eye(3, 4, device=d),
    "eye with a dtype": lambda d: torch.eye(2, dtype=torch.bool, device=d),
    "hann": lambda d: torch.hann_window(8, device=d),
    "hann, not periodic": lambda d: torch.hann_window(8, False, device=d),
    "hamming": lambda d: torch.hamming_window(8, True, 0.5, 0.4, device=d),
    "bartlett": lambda d: torch.bartlett_window(7, device=d),
    "blackman": lambda d: torch.blackman_window(6, False, device=d),
    "kaiser": lambda d: torch.kaiser_window(5, device=d),
}

MISTAKES: dict[str, Callable[[str], torch.Tensor]] = {
    "the wrong way": lambda d: torch.arange(3, 0, 1, device=d),
    "no step": lambda d: torch.arange(0, 3, 0, device=d),
    "no number": lambda d: torch.arange(float("nan"), device=d),
    "without end": lambda d: torch.arange(0, float("inf"), device=d),
    "fewer than none": lambda d: torch.eye(-1, device=d),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_factory_waits_for_nobody(session: object, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # The second round finds each signature, the first makes it.
        for _ in range(2):
            dr.profiler.stalls(reset=True)
            made = {name: make(REMOTE) for name, make in FACTORIES.items()}
            assert dr.profiler.stalls() == []
            for name, there in made.items():
                here = FACTORIES[name]("cpu")
                assert (there.dtype, there.stride()) == (here.dtype, here.stride()), name
                assert torch.equal(there.cpu(), here), name
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_factory_is_told_in_torchs_words(session: object, name: str) -> None:
    with pytest.raises(RuntimeError) as here:
        MISTAKES[name]("cpu")
    with pytest.raises(RuntimeError) as there:
        MISTAKES[name](REMOTE)
    assert str(there.value).splitlines()[0] == str(here.value).splitlines()[0]
