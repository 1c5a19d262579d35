"""The benchmarks' played workers keep to the protocol: to a master they are workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from benchmarks.mesh import played
from processes import until


@pytest.mark.slow(reason="starts programs that import torch, 3 s")
def test_a_master_takes_played_workers_for_its_own(fresh_session: Callable[..., Any]) -> None:
    with played(3) as where:
        session = fresh_session(workers=where, insecure=True)
        assert [node.host for node in dr.nodes()] == ["played"] * 3
        with dr.init_device_mesh("cpu", (3,)):
            x = torch.ones(20, 20, device="remote")
            for _ in range(1000):
                x + x
        dr.synchronize()
        until(lambda: not any(log.flights for log in session.logs))
        assert [node.failed for node in session.nodes] == [None] * 3
        assert [place.free for place in dr.memory().devices] == [0] * 3
        dr.shutdown()
