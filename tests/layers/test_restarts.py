"""Layers after a worker was replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import distruntime as dr


def test_borders_travel_to_a_worker_that_was_replaced(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    x = torch.randn(1, 2, 16)
    for again in (False, True):
        if again:
            dr.restart(1, force=True)
        on = dr.mesh.Partition([0, 1], (1, 1, 2))
        pool = dr.nn.MaxPool1d(on, 3, 1, 1)
        assert torch.equal(on.gather(pool(on.scatter(x))), torch.nn.MaxPool1d(3, 1, 1)(x))
