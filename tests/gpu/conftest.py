"""Tests of what only an accelerator can show; without one, each is skipped and says so.

A worker says what there is. It is started here, or `DISTRUNTIME_TEST_GPUS=tcp://gpubox:29400` names one, so
that a laptop without a GPU can run these tests on another machine's. What compares with the same code here
needs a GPU of this process too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distruntime as dr

_ASKED = os.environ.get("DISTRUNTIME_TEST_GPUS", "")


@pytest.fixture(scope="session", autouse=True)
def _asked_for() -> None:
    if not _ASKED:
        pytest.skip("the suite hides GPUs: make gpu, or DISTRUNTIME_TEST_GPUS=1, runs this")


def begin(world_size: int = 1) -> None:
    """Open a session with workers of this machine, or with the ones that were named."""
    options: dict[str, Any] = {"world_size": world_size}
    if "://" in _ASKED:
        addresses = _ASKED.split(",")
        if len(addresses) < world_size:
            pytest.skip(f"needs {world_size} workers, and DISTRUNTIME_TEST_GPUS names {len(addresses)}")
        options = {"workers": addresses[:world_size]}
    dr.shutdown()
    dr.init_master_worker(**options)


def accelerator(node: int = 0) -> dr.types.Place:
    """Return the first accelerator of a node; skip the test where it has none."""
    info = dr.nodes()[node]
    names = [device.name for device in info.devices if device.name != "cpu"]
    if info.simulated or not names:
        offered = ", ".join(device.name for device in info.devices)
        pytest.skip(f"node {node} has no accelerator: it offers {offered}{' (simulated)' * info.simulated}")
    return dr.place(node, f"accelerator:{names[0].partition(':')[2]}")


@pytest.fixture(scope="module")
def gpu(_asked_for: None) -> Iterator[dr.types.Place]:
    """The first accelerator of a worker."""
    begin()
    try:
        yield accelerator()
    finally:
        dr.shutdown()


@pytest.fixture
def two_nodes(gpu: dr.types.Place) -> Iterator[list[dr.types.Place]]:
    """The first accelerators of two workers, which share one where there is only one."""
    begin(2)
    try:
        yield [accelerator(0), accelerator(1)]
    finally:
        # The other tests of the module have a session with one worker.
        begin()


@pytest.fixture
def cuda(_asked_for: None) -> torch.device:
    """The GPU of this process, which the worker's results are compared with."""
    if not torch.cuda.is_available():
        pytest.skip("compares with a GPU of this process: torch.cuda.is_available() is False here")
    return torch.device("cuda:0")


@pytest.fixture
def same_card(gpu: dr.types.Place, cuda: torch.device) -> torch.device:
    """The GPU of this process, where the worker has the same one."""
    if "://" in _ASKED:
        pytest.skip("compares with the card itself: the worker of DISTRUNTIME_TEST_GPUS may have another")
    # A test that used up the memory has left it with the worker's allocator.
    torch.remote.empty_cache()  # type: ignore[attr-defined]
    dr.synchronize()
    return cuda
