"""One session is shared by most tests; a test that needs its own, or that breaks it, leaves the next one to
start another.
"""

from __future__ import annotations

import gc
import importlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from processes import STARTING

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell starts background jobs so, and children inherit it: Ctrl-C is tested here
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(
    1
)  # the worker's kernels must split their work as the local ones do, or sums differ in the last bit

# The first session imports both anyway. What torch's modules consist of, 280,000 objects, need not be looked
# through by each collection, of which the tests of finalizers and of what stays behind ask for many: 0.1 s
# each, and four times that beside another test.
for _name in ("torch.distributed.tensor", "torch._dynamo"):
    importlib.import_module(_name)
gc.collect()
gc.freeze()

_shared: list[object] = []


def _usable() -> bool:
    if not (_shared and dr.is_initialized()):
        return False
    try:
        return torch.ones((), device=REMOTE).item() == 1.0
    except (dr.NodeFailed, dr.SessionClosed):
        return False


@pytest.fixture
def session() -> Iterator[object]:
    """Two workers on this machine, each with its CPU.

    Shared: a test leaves it as it found it, with no failure unread.
    """
    if not _usable():
        dr.shutdown()
        _shared[:] = [dr.init_master_worker(timeout=STARTING)]
    yield _shared[0]
    if dr.is_initialized():
        dr.synchronize()


@pytest.fixture
def fresh_session() -> Iterator[Callable[..., Any]]:
    """Starts a session of the test's own, `fresh_session(simulate_cuda=2)`, and ends it with the test."""
    _shared.clear()
    dr.shutdown()
    yield lambda **options: dr.init_master_worker(**{"timeout": STARTING, **options})
    dr.shutdown()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Equal random numbers in every test, and no test leaves process-wide settings behind."""
    torch.manual_seed(0)
    grad, default = torch.is_grad_enabled(), torch.get_default_device()
    yield
    assert torch.is_grad_enabled() == grad
    assert torch.get_default_device() == default
    assert torch.get_default_dtype() == torch.float32
