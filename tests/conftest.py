"""One session is shared by most tests; a test that needs its own, or that breaks it, leaves the next one to
start another.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The suite compares with CPU kernels, and an index out of range ends a GPU's context. So it hides the GPUs
# from itself and from its workers, before torch looks for them. `make gpu` runs the tests that are for GPUs.
if not os.environ.get("DISTRUNTIME_TEST_GPUS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

import torch

import distruntime as dr
from agree import REMOTE, seed
from distruntime.cluster import named_sessions
from distruntime.session.session import active_session
from leftovers import Leftovers
from processes import STARTING
from user_settings import take_out

# A shell starts background jobs with Ctrl-C ignored, and children inherit that. The tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A collection during the imports would look through ever more objects that stay.
gc.disable()
# The worker's kernels must split their work as the local ones do. Otherwise sums differ in the last bit.
torch.set_num_threads(1)

# The first session imports both anyway. They leave 280,000 objects, which each collection would look through.
# The tests of finalizers, and of what stays behind, ask for many collections. The objects cost each of them
# 0.1 s, and four times that beside another test.
for _name in ("torch.distributed.tensor", "torch._dynamo"):
    importlib.import_module(_name)

# Tests set what they try, and suppose the defaults of everything else. The processes of pytest-xdist have the
# environment of the one that starts them, with what the suite has put there.
_taken_out = [] if "PYTEST_XDIST_WORKER" in os.environ else take_out(os.environ)
# A test that begins a session need not say how long workers may take on a busy machine.
os.environ["DISTRUNTIME_TIMEOUT"] = str(STARTING)
_shared: list[object] = []
_leftovers: list[Leftovers] = []


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the suite folders of its own.

    The processes of pytest-xdist have those of the one that starts them, and that one looks at the end.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _leftovers.append(Leftovers())
        config.option.basetemp = config.option.basetemp or str(_leftovers[0].tests)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the user's settings that the suite has run without."""
    if _taken_out:
        terminalreporter.write_line(f"the suite ran without your {', '.join(_taken_out)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests begin first: one that is left at the end has the machine to itself."""
    items.sort(key=lambda item: item.path.name != "test_examples.py")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the suite fail if it has left a note, a process, shared memory, a folder or a socket."""
    if not _leftovers:
        return
    dr.shutdown()
    gc.collect()
    left = _leftovers[0].found()
    _leftovers.pop().end()
    if left:
        print("\nthe suite has left:\n  " + "\n  ".join(left), file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Freeze what the test modules have imported, too: in the whole suite another 300,000 objects, 0.17 s of
    each collection.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _usable() -> bool:
    if not (_shared and dr.is_initialized()):
        return False
    try:
        return torch.ones((), device=REMOTE).item() == 1.0
    except (dr.errors.NodeFailed, dr.errors.SessionClosed):
        return False


@pytest.fixture
def session() -> Iterator[object]:
    """Two workers on this machine, each with its CPU. It is the inner session, as tests look inside.

    Shared: a test leaves it as it found it, with no failure unread.
    """
    if not _usable():
        dr.shutdown()
        dr.init_master_worker(timeout=STARTING)
        _shared[:] = [active_session()]
    yield _shared[0]
    if dr.is_initialized():
        dr.synchronize()


@pytest.fixture
def fresh_session() -> Iterator[Callable[..., Any]]:
    """Starts a session of the test's own, `fresh_session(simulate_cuda=2)`, and ends it with the test.

    It returns the inner session.
    """
    _shared.clear()
    dr.shutdown()

    def begin(**options: Any) -> object:
        dr.init_master_worker(**{"timeout": STARTING, **options})
        return active_session()

    yield begin
    dr.shutdown()


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions are noted in a directory of the test's own, and ended with it."""
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    dr.shutdown()
    yield
    dr.shutdown()
    for name in named_sessions.names():
        entry = named_sessions.read(name)
        # A worker that the session has not started ends with the test.
        if entry is not None and entry.directory:
            dr.init_master_worker(session=name, resume=True, force=True)
            dr.shutdown()
        named_sessions.delete(name)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Equal random numbers in every test, and no test leaves process-wide settings behind."""
    seed(0)
    grad, default = torch.is_grad_enabled(), torch.get_default_device()
    yield
    assert torch.is_grad_enabled() == grad
    assert torch.get_default_device() == default
    assert torch.get_default_dtype() == torch.float32
