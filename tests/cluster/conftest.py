"""Fixtures that several tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.cluster import named_sessions as registry


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions are noted in a directory of the test's own, and ended with it."""
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    dr.shutdown()
    yield
    dr.shutdown()
    for name in registry.names():
        entry = registry.read(name)
        # A worker that the session has not started ends with the test.
        if entry is not None and entry.directory:
            dr.init_master_worker(session=name, resume=True, force=True)
            dr.shutdown()
        registry.delete(name)
