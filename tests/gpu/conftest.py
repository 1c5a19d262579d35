"""Tests of what only a GPU can show; without one, each is skipped and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import distruntime as dr


@pytest.fixture(scope="session", autouse=True)
def _a_gpu() -> None:
    if not os.environ.get("DISTRUNTIME_TEST_GPUS"):
        pytest.skip("the suite hides GPUs: make gpu, or DISTRUNTIME_TEST_GPUS=1, runs this")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: torch.cuda.is_available() is False")


@pytest.fixture(scope="module")
def gpu(_a_gpu: None) -> Iterator[dr.Place]:
    """The first GPU of a worker that was started here."""
    dr.shutdown()
    dr.init_master_worker(world_size=1)
    yield dr.place(0, "cuda:0")
    dr.shutdown()
