"""The pytest plugin: `@pytest.mark.cluster(nodes=3, cuda=2)` gives a test a cluster (docs/testing.md).

pytest loads it by itself where distruntime is installed. Without a marked test it imports no torch and starts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import distruntime as dr

_MARK = "cluster(nodes=2, cuda=0): run in a session of so many workers, each with so many simulated GPUs"
# Workers may take so many seconds to start, also on a busy machine.
_STARTING = 120.0


@dataclass
class _Open:
    """The session that is open, and what it was asked to be."""

    options: tuple[int, int]
    session: dr.types.Session

    def fits(self, options: tuple[int, int]) -> bool:
        """Return whether a test may use it: it is open, and all of its workers run."""
        if self.options != options:
            return False
        try:
            # A worker of a busy machine may be anything else but gone.
            return not any(node.state in ("lost", "left") for node in self.session.nodes)
        except dr.errors.SessionClosed:
            return False


_KEY = pytest.StashKey[_Open]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", _MARK)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a marked test use the fixture, before any other of its fixtures."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("cluster") is not None:
        names = item.fixturenames
        if "cluster" in names:
            names.remove("cluster")
        names.insert(0, "cluster")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[dr.types.Session]:
    """Return an open session, on workers that this machine starts, as the mark `cluster` says.

    Tests with equal options that follow each other share it. A failure of a worker's that the test has not
    read fails the test at its end.
    """
    options, stash = _options(request), request.config.stash
    found = stash.get(_KEY, None)
    if found is None or not found.fits(options):
        dr.shutdown()
        nodes, cuda = options
        session = dr.init_master_worker(world_size=nodes, simulate_cuda=cuda, quiet=True, timeout=_STARTING)
        found = stash[_KEY] = _Open(options, session)
    # What the test before has set is not this one's: its result would depend on the order of the tests.
    dr.set_place(0)
    dr.set_implicit_waits(True)
    yield found.session
    if found.fits(options):
        dr.synchronize()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the session."""
    found = config.stash.get(_KEY, None)
    if found is not None:
        # What failed in the last test has been told.
        found.session.shutdown(raise_unread=False)


def _options(request: pytest.FixtureRequest) -> tuple[int, int]:
    mark = request.node.get_closest_marker("cluster")
    given = {} if mark is None else dict(mark.kwargs)
    if mark is not None and len(mark.args) > 2:
        raise pytest.UsageError(f"the mark is {_MARK.partition(':')[0]}, got {mark.args}")
    given.update(zip(("nodes", "cuda"), () if mark is None else mark.args))
    nodes, cuda = given.pop("nodes", 2), given.pop("cuda", 0)
    good = type(nodes) is int and nodes > 0 and type(cuda) is int and cuda >= 0
    if given or not good:
        got = {"nodes": nodes, "cuda": cuda, **given}
        raise pytest.UsageError(f"the mark is {_MARK.partition(':')[0]}, with whole numbers, got {got}")
    return nodes, cuda
