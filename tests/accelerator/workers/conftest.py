"""The worker on the simulated accelerator: real worker processes, each with two devices that lag.

`run.py` names the built device in DISTRUNTIME_SIMULATED. This process does not load it: a master takes the
place of such a device in torch. Its workers find it on their PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import distruntime as dr
from on_device import forget, set_delay, start
from processes import STARTING

BUILT = os.environ.get("DISTRUNTIME_SIMULATED", "")
collect_ignore_glob = [] if BUILT else ["*"]
if BUILT:
    # Python has read its own PYTHONPATH when this runs, so this is for the workers alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [BUILT, os.environ.get("PYTHONPATH")]))
    # Whoever reads memory that nobody owns any more must see it.
    os.environ["SIMULATED_SCRIBBLE"] = "1"
    os.environ["SIMULATED_MEMORY"] = str(1 << 28)

# Each kernel takes so many microseconds where a test has to see what is under way.
LAG = 300


@pytest.fixture
def workers() -> Iterator[list[list[dr.types.Place]]]:
    """Two workers, each with its devices: `workers[node][device]`. Most tests share them."""
    start(2)
    yield [[dr.place(node, k) for k in range(2)] for node in range(2)]
    if dr.is_initialized():
        for node in range(2):
            set_delay(node, 0)
        dr.synchronize()


@pytest.fixture
def device(workers: list[list[dr.types.Place]]) -> dr.types.Place:
    """The first device of the first worker."""
    return workers[0][0]


@pytest.fixture
def slow(workers: list[list[dr.types.Place]]) -> None:
    """Every kernel lags from here on."""
    for node in range(2):
        set_delay(node, LAG)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dr.types.Place]]:
    """Starts one worker of the test's own, `alone(memory=1 << 20)`, with these knobs of the device."""
    dr.shutdown()
    forget()

    def begin(**knobs: object) -> dr.types.Place:
        for name, value in knobs.items():
            monkeypatch.setenv(f"SIMULATED_{name.upper()}", str(value))
        dr.init_master_worker(world_size=1, timeout=STARTING, quiet=True)
        return dr.place(0, 0)

    yield begin
    dr.shutdown()


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    yield
    dr.shutdown()
