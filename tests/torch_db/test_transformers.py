"""Unchanged models from `transformers` train and generate on a worker as they do here."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from agree import REMOTE, agrees, is_remote, quietly
from fewer import fewer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from small_models import MODELS, Small

# The library's own deprecations are not our subject.
pytestmark = pytest.mark.filterwarnings("ignore")
each_model = pytest.mark.parametrize("small", MODELS.values(), ids=MODELS.keys())


def _on(device: str, small: Small) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = small.build().to(device)
    torch.manual_seed(1)
    return model, {name: value.to(device) for name, value in small.batch().items()}


def _ties(model: torch.nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


@each_model
@agrees
def test_loss_and_every_gradient(device: str, small: Small) -> Any:
    model, batch = _on(device, small)
    out = model.train()(**batch)  # with its dropout
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert any(g is not None for g in gradients.values())
    return out.loss, out.logits, gradients


@each_model
@agrees
def test_training(device: str, small: Small) -> Any:
    model, batch = _on(device, small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters())


@each_model
def test_ties_survive_the_way_there_and_back(session: object, small: Small) -> None:
    model = small.build()
    ties, names = _ties(model), [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for device in (REMOTE, "cpu"):
        model.to(device)
        assert _ties(model) == ties
        assert [name for name, _ in model.named_parameters()] == names
        assert all(is_remote(p) == (device == REMOTE) for p in model.parameters())
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_the_models_have_ties() -> None:
    assert [name for name, small in MODELS.items() if _ties(small.build())] == ["gpt2", "bert", "t5"]


_GENERATING = [name for name, small in MODELS.items() if small.generates]
generating = pytest.mark.parametrize("small", [MODELS[name] for name in _GENERATING], ids=_GENERATING)
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 3, "do_sample": False},
    "no cache": {"do_sample": False, "use_cache": False},
}


@generating
@pytest.mark.parametrize("way", fewer(_WAYS.values(), 3, "another architecture, 1 s"), ids=_WAYS.keys())
@agrees
def test_generate(device: str, small: Small, way: dict[str, Any]) -> Any:
    model, batch = _on(device, small)
    batch.pop("labels")
    torch.manual_seed(2)
    return quietly(lambda: model.eval().generate(**batch, **way, max_new_tokens=8, pad_token_id=0))


@agrees
def test_state_of_a_remote_model_loads_into_a_new_one(device: str) -> Any:
    model, batch = _on(device, MODELS["gpt2"])
    other = MODELS["gpt2"].build().to(device)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return other.eval()(**batch).loss


@agrees
def test_gradient_checkpointing(device: str) -> Any:
    model, batch = _on(device, MODELS["llama"])
    model.gradient_checkpointing_enable()
    loss = model.train()(**batch).loss
    loss.backward()
    return loss, [p.grad for p in model.parameters()]
