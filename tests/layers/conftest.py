"""Twelve places on three workers: each has its CPU and three simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import distruntime as dr
from distruntime.session.session import active_session
from processes import STARTING

_shared: list[object] = []


@pytest.fixture(scope="package")
def _ended() -> Iterator[None]:
    """The session ends after the last test of this folder, as other tests have sessions of their own."""
    yield
    if dr.is_initialized() and _shared == [active_session()]:
        dr.shutdown()
    _shared.clear()


@pytest.fixture
def twelve(_ended: None) -> None:
    """A session that the files of this folder share."""
    if dr.is_initialized() and _shared == [active_session()]:
        return
    dr.shutdown()
    dr.init_master_worker(world_size=3, simulate_cuda=3, timeout=STARTING)
    _shared[:] = [active_session()]
