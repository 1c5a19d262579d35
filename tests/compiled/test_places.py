"""What names a place in a compiled function names the same place as outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from dynamo import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a number": lambda x: x.to(1) + 0,
    "a number by name": lambda x: x.to(device=1) + 0,
    "the CPU's number": lambda x: x.to(-1) + 0,
    "a text": lambda x: x.to("cuda:1") + 0,
    "a kind": lambda x: x.to("cuda") + 0,
    "a device and a dtype": lambda x: x.to(torch.device("cuda", 1), torch.float64) + 0,
    "its own device": lambda x: x.to(x.device) + 0,
    "cuda": lambda x: x.cuda() + 0,
    "cuda with a number": lambda x: x.cuda(1, True) + 0,
    "cuda with a text": lambda x: x.cuda("cuda:1", non_blocking=True) + 0,
    "get_device": lambda x: x * (x.get_device() + 2),
    "get_device of what was moved": lambda x: (x.to(1) + 0) * ((x.to(1) + 0).get_device() + 2),
    "a place as text": lambda x: (x * 2, str(x.place), f"{x.place} {x.place!r}"),
    "a place itself": lambda x: (x * 2, x.place),
    "what a place says": lambda x: (
        x * 2,
        x.place.node,
        x.place.local_device,
        x.place.device == x.device,
        isinstance(x.place, str),
        x.place.members,
    ),
    "an equal place": lambda x: (x * 2, x.place == dr.place(1, "cuda:0"), {x.place: 3}[x.place]),
}


@pytest.fixture
def x(fresh_session: Callable[..., object]) -> Iterator[torch.Tensor]:
    """Return a tensor on the second of two nodes, each with two GPUs."""
    fresh_session(world_size=2, simulate_cuda=2)
    yield torch.ones(2, device=dr.place(1, "cuda:0"))
    torch._dynamo.reset()


def _said(found: Any) -> list[object]:
    results = found if isinstance(found, tuple) else (found,)
    return [
        (str(one.place), one.dtype, one.tolist()) if isinstance(one, torch.Tensor) else (type(one), repr(one))
        for one in results
    ]


def test_places_are_named_as_outside(x: torch.Tensor) -> None:
    for name, function in FUNCTIONS.items():
        compiled = torch.compile(function, backend="distruntime")
        for _ in range(4):
            assert _said(compiled(x)) == _said(function(x)), name


def test_a_number_that_changes_names_another_device_each_time(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x, k: x.to(k) + 0, backend="distruntime")
    for k in (0, 1, -1, 0, 1):
        assert compiled(x, k).place == x.to(k).place


def test_a_place_that_is_not_there_is_refused_as_outside(x: torch.Tensor) -> None:
    for name in (7, "cuda:9"):
        compiled = torch.compile(lambda x, name=name: x.to(name) + 0, backend="distruntime")
        with pytest.raises(dr.errors.PlacementError, match="has no device 'cuda"):
            compiled(x)


def test_with_the_take_over_a_number_is_what_the_script_knows(fresh_session: Callable[..., object]) -> None:
    fresh_session(world_size=2, simulate_cuda=2, as_cuda="all")
    x = torch.ones(2, device="cuda:1")
    for act in (lambda x: x.to("cuda:2") + x.get_device(), lambda x: x.to(3) + 0, lambda x: x.cuda() + 0):
        found = torch.compile(act, backend="distruntime")(x)
        assert _said(found) == _said(act(x))
    torch._dynamo.reset()
