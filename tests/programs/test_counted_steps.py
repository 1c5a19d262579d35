"""What an optimizer decides by the number of its steps, which it counts here and each replay counts too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

Act = Callable[[torch.Tensor, torch.Tensor], object]


class Counting(torch.optim.Optimizer):
    """It counts its steps as torch's own do, and acts by them."""

    def __init__(self, parameters: list[torch.nn.Parameter], act: Act) -> None:
        self.act = act
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                self.act(parameter, state["step"])


# What is followed is replayed until it comes out in another way.
_FOLLOWED: dict[str, Act] = {
    "a remainder": lambda p, step: p.mul_(0) if step.item() % 6 == 0 else p.add_(1),
    "a remainder of a float": lambda p, step: p.mul_(0) if float(step) % 6 == 0 else p.add_(1),
    "a comparison": lambda p, step: p.add_(1 if step.item() < 6 else 3),
    "a bound": lambda p, step: p.add_(max(step.item(), 6.0)),
}
_ASKED: dict[str, Act] = {
    "an int": lambda p, step: p.mul_(0) if int(step) % 6 == 0 else p.add_(1),
    "a tensor of a remainder": lambda p, step: p.mul_(0) if step % 6 == 0 else p.add_(1),
    "a tensor of a comparison": lambda p, step: p.add_(1 if step < 6 else 3),
    "a copy": lambda p, step: p.add_(1 if step.clone().item() < 6 else 3),
    "another view": lambda p, step: p.add_(1 if step.data.item() < 6 else 3),
    "an array": lambda p, step: p.add_(1 if step.numpy() < 6 else 3),
    "a sum": lambda p, step: p.add_(1 if sum([step]) < 6 else 3),
    "a text": lambda p, step: p.add_(3 if f"{step}" == "6.0" else 1),
    "one of a list": lambda p, step: p.add_(3 if step in [torch.tensor(6.0)] else 1),
    "a list": lambda p, step: p.add_(1 if step.tolist() < 6 else 3),
    "a truth": lambda p, step: p.add_(1 if step - 6 else 3),
}


@pytest.mark.parametrize("name", [*_FOLLOWED, *_ASKED])
def test_what_the_number_of_steps_decides_comes_out_as_in_a_plain_call(session: object, name: str) -> None:
    found = []
    for wrap in (lambda f: f, dr.program):
        w = torch.nn.Parameter(torch.zeros(2, device=REMOTE))
        optimizer = Counting([w], {**_FOLLOWED, **_ASKED}[name])
        called: Any = wrap(lambda optimizer=optimizer: optimizer.step())
        values = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(9):
                called()
                values.append(w[0].item())
        found.append((values, optimizer.state[w]["step"].item()))
    assert found[0] == found[1]
    if name in _FOLLOWED:
        assert called.replays >= 4, called.why
    else:
        assert not called.replays and "decides something by the number of an optimizer's steps" in called.why
