"""What only workers can describe is asked for once on a mesh, too, where it cannot change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distruntime as dr


@pytest.mark.parametrize("on", ["a place", "a mesh"])
def test_attention_in_double_is_asked_about_once(fresh_session: Any, on: str) -> None:
    """Its meta kernel promises another layout than the CPU's kernel gives."""
    fresh_session(world_size=1, simulate_cuda=2)
    device = dr.init_device_mesh("cuda", (2,)).device if on == "a mesh" else "remote:0"
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    attend = torch.nn.functional.scaled_dot_product_attention
    program = dr.program(lambda q: attend(q, q, q, is_causal=True).sum())
    x, expected = q.to(device), attend(q, q, q, is_causal=True).sum()
    for _ in range(6):
        torch.testing.assert_close(dr.fetch(program(x)), expected)
    assert program.replays > 0, program.why
    waits = len(dr.profiler.stalls())
    attend(x, x, x, is_causal=True)
    assert len(dr.profiler.stalls()) == waits
