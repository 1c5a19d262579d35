"""An operand that is a local module's parameter is told by the module's name, with what to type."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from agree import REMOTE

at_the_top = nn.Linear(4, 4)
# Python 3.10 does not know which call of a line it is.
by_source = pytest.mark.skipif(sys.version_info < (3, 11), reason="the source is not looked at")


@pytest.fixture
def x(session: object) -> Iterator[torch.Tensor]:
    yield torch.ones(3, 4, device=REMOTE)


def told(error: BaseException) -> tuple[str, str]:
    """Return the operand and what it is said to be, and what to type."""
    first, second = str(error).splitlines()
    return (
        first.partition(": ")[2].partition(", the other operands")[0],
        second.strip().partition("      ")[0].replace(" there: ", " ", 1),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Trainer:
    def __init__(self) -> None:
        self.net = Block()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(
            x,
        )


@by_source
def test_the_parameter_is_told_by_the_name_at_the_users_line(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(dr.errors.PlacementError) as caught:
        model(x)
    assert told(caught.value) == (
        "`self` is `model.0.bias`: the module is still local",
        f'send it model.to("{x.device}")',
    )
    # What it says to type is right.
    model.to(x.device)
    assert model(x).shape == (3, 4)


@by_source
def test_a_model_of_modules_is_named_as_a_whole(x: torch.Tensor) -> None:
    trainer = Trainer()
    with pytest.raises(dr.errors.PlacementError) as caught:
        trainer.step(x)
    assert told(caught.value)[0] == "`mat2` is `self.net.layers.0.weight`: the module is still local"
    trainer.net.layers.to(REMOTE)
    trainer.net.norm.eval()
    with pytest.raises(dr.errors.PlacementError) as caught:
        trainer.step(x)
    assert "is `self.net.norm." in told(caught.value)[0]


def test_a_function_is_told_the_module_among_the_globals(x: torch.Tensor) -> None:
    with pytest.raises(dr.errors.PlacementError) as caught:
        F.linear(x, at_the_top.weight)
    assert told(caught.value) == (
        "`mat2` is `at_the_top.weight`: the module is still local",
        f'send it at_the_top.to("{x.device}")',
    )


def test_a_lone_parameter(x: torch.Tensor) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(dr.errors.PlacementError) as caught:
        x @ weight
    assert told(caught.value) == (
        "`mat2` (4, 4) is a parameter of a module that is still local",
        f'send the module module.to("{x.device}")',
    )


def test_a_module_that_torch_calls(x: torch.Tensor) -> None:
    """Its caller has no name for it."""
    with pytest.raises(dr.errors.PlacementError) as caught:
        torch.utils.checkpoint.checkpoint(nn.Sequential(nn.Linear(4, 4)), x, use_reentrant=False)
    assert told(caught.value)[0] == "`self` is `0.bias` of a module Sequential: the module is still local"


@by_source
def test_a_model_on_another_node(x: torch.Tensor) -> None:
    with dr.on(1):
        model = nn.Sequential(nn.Linear(4, 4, device=REMOTE))
    with pytest.raises(dr.errors.PlacementError) as caught:
        model(x)
    assert str(caught.value).splitlines()[2:] == ["  `weight` is `model.0.weight`"]
    model[0].bias = None
    with pytest.raises(dr.errors.PlacementError) as caught:
        model(x)
    assert str(caught.value).splitlines()[2:] == ["  `weight` is `model.0.weight`"]


def test_a_tensor_of_no_module(x: torch.Tensor) -> None:
    with pytest.raises(dr.errors.PlacementError) as caught:
        x + torch.ones(3, 4)
    assert told(caught.value)[0] == "`other` (3, 4) is a local tensor on cpu"


@by_source
def test_a_transformers_model_that_was_not_sent(session: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
        ids = torch.arange(4, device=REMOTE)[None]
        with pytest.raises(dr.errors.PlacementError) as caught:
            model(ids)
    assert told(caught.value) == (
        "`weight` is `model.transformer.wte.weight`: the module is still local",
        f'send it model.to("{ids.device}")',
    )


def test_who_looks_for_names_keeps_nothing(x: torch.Tensor) -> None:
    """A look at a function's locals would keep them until it returns."""

    class Kept:
        pass

    model, kept = nn.Linear(4, 4), Kept()
    gone = weakref.ref(kept)
    gc.collect()
    gc.disable()
    try:
        try:
            model(x)
        except dr.errors.PlacementError as error:
            assert "bias" in str(error)
        del kept
        assert gone() is None
    finally:
        gc.enable()
