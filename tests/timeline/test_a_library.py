"""A training step of a library's model: each slice names the line of the script, and the library's layers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

import distruntime as dr
from distruntime.session.session import Session
from small_models import MODELS
from traces import line_of, read_trace

at = partial(line_of, __file__)


def test_a_step_of_gpt2(session: Session, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt2"].build().to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(3, 90, (2, 12)).to("remote")

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss  # forward
        optimizer.zero_grad()
        loss.backward()  # backward
        optimizer.step()  # the optimizer
        return loss

    step().item()
    with dr.trace(tmp_path / "step.json", quiet=True):
        step().item()
    trace = read_trace(tmp_path / "step.json")
    found = trace.of("node 0", "operator")
    assert len(found) > 100
    lines = {os.path.basename(one.args.get("line", "none")) for one in found}
    assert lines >= {
        at("forward"),
        at("backward"),
        at("the optimizer"),
    }
    assert all(line.startswith(Path(__file__).name) for line in lines), lines
    layers = [one.args["layer"] for one in found if "layer" in one.args]
    assert any("GPT2" in layer and "forward" in layer for layer in layers)
    # A matrix product of the forward pass is in a block of the model.
    products = [one for one in found if "addmm" in one.name and short(one.args) == at("forward")]
    assert products and all("modeling_gpt2.py:" in one.args["layer"] for one in products)


def short(args: dict[str, str]) -> str:
    return os.path.basename(args["line"])
