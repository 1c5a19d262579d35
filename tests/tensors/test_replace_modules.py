"""`dr.nn.replace_modules` puts other modules where a rule says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE


def test_a_rule_replaces_modules_by_path_and_class(session: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 2))).to(REMOTE)
    kept = model[1][1]
    assert dr.nn.replace_modules(model, lambda path, m: nn.ReLU() if isinstance(m, nn.GELU) else None) == [
        "1.0"
    ]
    assert isinstance(model[1][0], nn.ReLU) and model[1][1] is kept
    assert model(torch.ones(1, 4).to(REMOTE)).shape == (1, 2)
    asked: list[str] = []
    dr.nn.replace_modules(model, lambda path, m: asked.append(path))
    assert asked == ["", "0", "1", "1.0", "1.1"]


def test_a_shared_module_is_replaced_everywhere_by_one() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    found = dr.nn.replace_modules(model, lambda path, m: nn.Identity() if m is shared else None)
    assert sorted(found) == ["a", "b.0"] and model["a"] is model["b"][0]


def test_what_a_rule_cannot_give() -> None:
    with pytest.raises(dr.errors.UsageError, match="for the model itself"):
        dr.nn.replace_modules(nn.Linear(2, 2), lambda path, m: nn.Identity())
    with pytest.raises(dr.errors.UsageError, match="gives a module or None, got 3 for '0'"):
        dr.nn.replace_modules(nn.Sequential(nn.ReLU()), lambda path, m: 3 if path else None)  # type: ignore[arg-type, return-value]
