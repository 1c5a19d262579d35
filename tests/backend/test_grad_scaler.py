"""`torch.amp.GradScaler("remote")` gives the same losses, scales and parameters as a loop on local tensors.

That includes loops that overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE, agrees, tensor

# The gradients of this step are infinite.
OVERFLOWS = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
}
FORMS: dict[str, dict[str, bool]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def trained(device: str, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    found = []
    for step in range(6):
        x = tensor("cpu", 6, 8, seed=step).to(next(model.parameters()).device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = model(x).float().square().mean()
        if step == OVERFLOWS:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        kept = all(
            torch.equal(a.cpu(), p.detach().cpu()) for a, p in zip(before, model.parameters(), strict=True)
        )
        scaler.update()
        found.append((scaler.get_scale(), kept))
    return found, scaler.state_dict(), model.state_dict()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@agrees
def test_training(device: str, name: str, form: str, dtype: torch.dtype) -> Any:
    model = make_model().to(device)
    found, scaler, state = trained(
        device, model, OPTIMIZERS[name](model.parameters(), lr=0.05, **FORMS[form]), dtype
    )
    assert [scale for scale, _ in found] == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert [kept for _, kept in found] == [step == OVERFLOWS for step in range(6)], (
        "the step that overflows is skipped, and no other"
    )
    return found, scaler, state


@agrees
def test_states_are_taken_up_again(device: str) -> Any:
    first = torch.amp.GradScaler(device, init_scale=64.0)
    scaled = first.scale(tensor(device, 3))
    second = torch.amp.GradScaler(device)
    second.load_state_dict(first.state_dict())
    return scaled, second.scale([tensor(device, 3), tensor(device, 2)]), second.state_dict()


@agrees(remote_result=False)
def test_mistakes(device: str) -> Any:
    model = make_model().to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device)
    scaler.scale(model(tensor(device, 2, 8)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    half = make_model().half().to(device)
    for p in half.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(torch.optim.SGD(half.parameters(), lr=0.1))
    return scaler.get_scale()


def test_a_model_on_two_nodes(session: object) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, _, self.second = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).relu()
            out: torch.Tensor = self.second(y.to(self.second.weight.device))
            return out

    local, split = Split(), Split()
    split.first.to(REMOTE)
    split.second.to(node=1)  # type: ignore[call-overload]
    for model in (local, split):
        trained(
            "cpu" if model is local else REMOTE,
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            torch.bfloat16,
        )
    assert {p.place.node for p in split.parameters()} == {0, 1}  # type: ignore[attr-defined]
    for name, value in dr.fetch(split.state_dict()).items():
        torch.testing.assert_close(value, local.state_dict()[name], rtol=0, atol=0)


def test_on_a_gpu(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=1)
    model = make_model().to(REMOTE)
    found, *_ = trained(
        REMOTE, model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), torch.float16
    )
    assert found == [
        (1024.0, False),
        (2048.0, False),
        (2048.0, False),
        (1024.0, True),
        (1024.0, False),
        (2048.0, False),
    ]
