"""Fixtures that several tests of sessions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distruntime as dr


@pytest.fixture(scope="module")
def two_nodes_with_two_simulated_gpus() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=2)
    yield
    dr.shutdown()
