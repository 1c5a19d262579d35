"""`dr.profiler.profile_model` says what each module takes, on its worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE

pytestmark = pytest.mark.usefixtures("session")


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = torch.ones(600, 600, device=x.device)
        for _ in range(8):
            big = big @ big * 1e-3
        return self.inner(x) + big[:1, :64]


def test_time_and_memory_of_each_module(session: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Slow(), nn.ReLU()), nn.Linear(64, 8)).to(REMOTE)
    x = torch.randn(16, 64).to(REMOTE)
    dr.profiler.profile_model(model, x)
    before = [p.grad for p in model.parameters()]
    found = dr.profiler.profile_model(model, x, backward=True)
    rows = {one.name: one for one in found}
    assert list(rows) == ["", "0", "1", "1.0", "1.0.inner", "1.1", "2"]
    assert all(one.place == x.place and one.calls == 1 for one in found)  # type: ignore[attr-defined]
    # A module's time holds that of its children, and events on one stream are in order.
    assert rows[""].forward >= rows["1"].forward >= rows["1.0"].forward > rows["1.0.inner"].forward > 0
    assert rows["1.0"].forward > rows["0"].forward and rows["1.0"].forward > rows["1.1"].forward
    assert rows["0"].parameters == (64 * 64 + 64) * 4
    assert rows[""].parameters == sum(p.numel() for p in model.parameters()) * 4
    assert rows["1.1"].saved == 16 * 64 * 4 and rows[""].saved >= rows["1"].saved
    assert rows["0"].backward is not None and rows["0"].backward > 0
    assert [p.grad for p in model.parameters()] == before
    text = repr(found)
    assert "the model" in text and "Slow" in text and "node 0 cpu" in text
    # No hook is left.
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_modules_on_several_places_and_on_a_mesh(session: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4).to(dr.place(0, "cpu"))
            self.b = nn.Linear(4, 4).to(dr.place(1, "cpu"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).to(self.b.weight.device))  # type: ignore[no-any-return]

    rows = {one.name: one for one in dr.profiler.profile_model(Two(), torch.ones(2, 4).to("remote:0"))}
    assert (rows["a"].place, rows["b"].place) == (dr.place(0, "cpu"), dr.place(1, "cpu"))
    mesh = dr.init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4).to(mesh.device)
    (row,) = dr.profiler.profile_model(model, torch.ones(2, 4).to(mesh.device))
    assert row.forward > 0 and row.place is not None and len(row.place.members) == 2


def test_what_is_no_module_and_what_has_no_gradient(session: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match=r"takes an nn\.Module"):
        dr.profiler.profile_model(len, [1])  # type: ignore[arg-type]
    model = nn.Linear(2, 2).to(REMOTE).requires_grad_(False)
    with pytest.raises(dr.errors.UsageError, match="nothing that has a gradient: leave backward= out"):
        dr.profiler.profile_model(model, torch.ones(1, 2).to(REMOTE), backward=True)
