"""Numbers of a program follow the floats that gave them, and nothing that has just been equal to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distruntime as dr
from agree import REMOTE
from number_programs import compare_numbers

# What reads a number, and what changes it.
Made = tuple[Callable[[], float], Callable[[float], object]]


def _replaced(value: float) -> Made:
    boxes = [SimpleNamespace(v=value)]
    return (lambda: boxes[0].v), (lambda value: boxes.__setitem__(0, SimpleNamespace(v=value)))


def _counted(value: float) -> Made:
    box = SimpleNamespace(n=int(value))
    return (lambda: float(box.n)), (lambda value: setattr(box, "n", int(value)))


def _chosen(value: float) -> Made:
    box = SimpleNamespace(large=False, values=[value, 6.0])
    return (lambda: box.values[box.large]), (lambda value: setattr(box, "large", value == 6.0))


def _written(value: float) -> Made:
    local = torch.tensor(value)
    return (lambda: local.item()), local.fill_


def _listed(value: float) -> Made:
    names = ["x"] * int(value)
    return (lambda: float(len(names))), (lambda value: names.__setitem__(slice(None), ["x"] * int(value)))


@pytest.fixture
def x(session: object) -> torch.Tensor:
    return torch.ones(3, device=REMOTE)


@pytest.mark.parametrize("make", [_replaced, _counted, _chosen, _written, _listed])
@pytest.mark.parametrize("turned", [False, True])
def test_what_changes_with_a_float_does_not_follow_it(
    x: torch.Tensor, make: Callable[[float], Made], turned: bool
) -> None:
    """Two numbers have changed alike in both recordings, and a float has given one of them only."""
    scale = SimpleNamespace(a=1.0)
    read, change = make(1.0)
    program = dr.program(lambda x: x * scale.a + read() if turned else x * read() + scale.a)

    def call(a: float, b: float) -> None:
        for _ in range(4):
            assert program(x)[0].item() == a + b

    call(1.0, 1.0)
    scale.a = 6.0
    change(6.0)
    call(6.0, 6.0)
    scale.a = 3.0
    call(3.0, 6.0)
    change(1.0)
    call(3.0, 1.0)
    assert program.replays >= 4


@pytest.mark.parametrize(
    "second, values",
    [
        (lambda a: max(a, 0.5), [0.125, 0.25, 0.375, 0.125, 2.0, 3.0, 0.25]),
        (lambda a: min(a, 0.5), [1.0, 2.0, 3.0, 4.0, 0.25, 0.125, 5.0]),
        (abs, [1.0, -1.0, 1.0, -1.0, 3.0, 4.0, -5.0]),
        (lambda a: a * a, [1.0, -1.0, 1.0, -1.0, 3.0]),
        (lambda a: 2.0 if a > 1 else a, [0.5, 2.0, 3.0, 4.0, 5.0, 6.0, 0.25]),
    ],
    ids=["max", "min", "abs", "square", "branch"],
)
@pytest.mark.parametrize("argument", [False, True])
def test_what_was_the_same_twice_is_not_fixed(
    x: torch.Tensor, second: Callable[[float], float], values: list[float], argument: bool
) -> None:
    """A rate with a bound is at its bound at first."""
    scale = SimpleNamespace(a=0.0)
    program = dr.program(
        lambda x, a=None: x * (scale.a if a is None else a) + second(scale.a if a is None else a)
    )
    for a in values:
        scale.a = a
        assert (program(x, a) if argument else program(x))[0].item() == a + second(a)
    assert program.replays


def test_a_float_that_is_alone_follows_what_another_one_was(x: torch.Tensor) -> None:
    """A product has changed, and so may one of its factors later, which is a number of its own."""
    scale = SimpleNamespace(a=1.0, b=2.0)
    program = dr.program(lambda x: x * (scale.a * scale.b) + scale.b)
    for a, b in [(1.0, 2.0), (3.0, 2.0), (5.0, 2.0), (5.0, 7.0), (4.0, 7.0), (4.0, 1.0)]:
        scale.a, scale.b = a, b
        assert program(x)[0].item() == a * b + b


def _sized(x: torch.Tensor, a: float) -> torch.Tensor:
    y = torch.arange(0, a, device=REMOTE)
    return (y + 1).sum() * y.numel()


def _scaled(x: torch.Tensor, a: float) -> torch.Tensor:
    y = F.interpolate(x.reshape(1, 1, 3), scale_factor=a)
    return y.sum() / y.shape[-1] + y.numel()


def _dropped(x: torch.Tensor, a: float) -> torch.Tensor:
    # Where nothing is dropped, nothing is drawn either.
    return F.dropout(x, a / 8) + torch.rand(3, device=REMOTE)


def _normed(x: torch.Tensor, a: float) -> torch.Tensor:
    y = x.detach().mul(2).requires_grad_()
    return torch.autograd.grad(torch.norm(y, p=a), y)[0]


@pytest.mark.parametrize("step", [_sized, _scaled, _dropped, _normed])
@pytest.mark.parametrize("values", [(2.5, 2.6, 2.7, 3.5, 5.5, 0.0, 0.0), (1.0, 3.0, 4.0, 2.0, 1.0, 2.0, 2.0)])
def test_a_float_by_which_torch_decides_something_is_fixed(
    x: torch.Tensor, step: Callable[[torch.Tensor, float], torch.Tensor], values: tuple[float, ...]
) -> None:
    """It decides that here: how large something is, or by which operators."""
    if step in (_scaled, _normed):
        values = tuple(value + 1 for value in values)
    state = SimpleNamespace(a=0.0)
    program = dr.program(lambda x: step(x, state.a))
    dr.manual_seed(3)
    plain = [step(x, a).tolist() for a in values]
    dr.manual_seed(3)
    found = []
    with warnings.catch_warnings():
        # Recordings are in vain where each call has another float.
        warnings.simplefilter("ignore", UserWarning)
        for state.a in values:
            found.append(program(x).tolist())
    assert found == plain


_OF_LAYERS: list[tuple[nn.Module, str]] = [
    *((nn.LeakyReLU(), "negative_slope"), (nn.ELU(), "alpha"), (nn.CELU(), "alpha"), (nn.Softplus(), "beta")),
    *((nn.Hardtanh(), "max_val"), (nn.Threshold(0.1, 0.2), "threshold"), (nn.Hardshrink(), "lambd")),
    *((nn.BatchNorm1d(4), "momentum"), (nn.BatchNorm1d(4), "eps"), (nn.LayerNorm(6), "eps")),
    *((nn.RMSNorm(6), "eps"), (nn.GroupNorm(2, 4), "eps"), (nn.Upsample(scale_factor=2.0), "scale_factor")),
    *(
        (nn.LPPool1d(2.0, 2), "norm_type"),
        (nn.Dropout(), "p"),
        (nn.Dropout1d(), "p"),
        (nn.AlphaDropout(), "p"),
    ),
    (nn.RReLU(0.0, 0.1), "upper"),
]


@pytest.mark.parametrize(
    "layer, name", _OF_LAYERS, ids=[f"{type(layer).__name__}.{name}" for layer, name in _OF_LAYERS]
)
def test_a_float_of_a_layer_may_change(session: object, layer: nn.Module, name: str) -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).to(REMOTE)
    before, found = getattr(layer, name), []
    for replayed in (False, True):
        model, scale = deepcopy(layer).to(REMOTE), nn.Parameter(torch.ones(1).to(REMOTE))
        dr.manual_seed(5)

        def step(
            x: torch.Tensor, model: nn.Module = model, scale: nn.Parameter = scale
        ) -> tuple[torch.Tensor, ...]:
            y = (model(x * scale) ** 2).sum() + torch.rand(1, device=REMOTE).sum()
            return y, torch.autograd.grad(y, scale)[0], *(b.clone() for b in model.buffers())

        call: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = dr.program(step) if replayed else step
        mine = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for value in (before, before, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.25):
                setattr(model, name, value)
                mine.append([one.detach() for one in call(x)])
        found.append(dr.fetch(mine))
    for plain, other in zip(*found, strict=True):
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, other, strict=True))


def _half(value: float) -> float:
    return value * 0.5


def _by_default(value: float, factor: float = 0.5) -> float:
    return value * factor


@pytest.mark.parametrize(
    "step",
    [
        lambda x, s: x * s.a + _half(s.b),
        lambda x, s: x * s.a + _by_default(s.b),
        lambda x, s: x * s.a + sum(value * s.b for value in s.several),
        lambda x, s: x * s.a + max(s.pair) * s.b,
        lambda x, s: x * (max(s.a, 0.5) + s.b) + s.b * 0.5,
    ],
    ids=["literal", "default", "list", "tuple", "bound"],
)
def test_a_float_that_is_the_object_of_a_literal(
    x: torch.Tensor, step: Callable[[torch.Tensor, SimpleNamespace], torch.Tensor]
) -> None:
    """Python keeps equal literals of a module as one object."""
    state = SimpleNamespace(a=0.5, b=3.0, several=[0.5, 7.0], pair=(0.5, 0.25))
    program = dr.program(lambda x: step(x, state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for a, b in [(0.5, 3), (0.5, 3), (0.5, 4), (0.5, 5), (2, 6), (3, 6), (4, 6), (4, 8), (5, 9)]:
            # An object that was not made from a literal is another one.
            state.a, state.b = state.a if a == 0.5 else float(a), float(b)
            assert program(x)[0].item() == step(x, state)[0].item()


@pytest.mark.parametrize("first", [0, 20, 40])
def test_random_functions_of_floats_are_equal_to_the_plain_ones(session: object, first: int) -> None:
    replays = sum(compare_numbers(seed, 20).replays for seed in range(first, first + 20))
    assert replays >= 100


@pytest.mark.slow(reason="600 functions of 24 calls each")
@pytest.mark.timeout(900)
def test_many_random_functions_of_floats_are_equal_to_the_plain_ones(session: object) -> None:
    for seed in range(1000, 1600):
        compare_numbers(seed, 24)


@pytest.mark.parametrize("zero", [0.0, 0j])
def test_zeros_of_other_signs_are_other_numbers(x: torch.Tensor, zero: complex) -> None:
    @dr.program
    def f(y: torch.Tensor, value: complex) -> tuple[torch.Tensor, torch.Tensor]:
        return y + value, torch.full((2,), value, device=REMOTE)

    zeros = torch.full((3,), -0.0, device=REMOTE, dtype=torch.complex64 if type(zero) is complex else None)
    for value in [zero, zero, zero, -zero, -zero, zero, -zero, zero]:
        assert [repr(r.cpu()) for r in f(zeros, value)] == [
            repr(zeros.cpu() + value),
            repr(torch.full((2,), value)),
        ]
    assert f.replays
