"""Twelve places on three workers: each has its CPU and three simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distruntime as dr
from processes import STARTING


@pytest.fixture(scope="module")
def twelve() -> Iterator[None]:
    """A session for the tests of a module."""
    dr.shutdown()
    with dr.init_master_worker(world_size=3, simulate_cuda=3, timeout=STARTING):
        yield
