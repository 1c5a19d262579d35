"""Where the workers are, from the environment."""

from __future__ import annotations

import pytest

import distruntime as dr
from distruntime.cluster.arguments import launched
from distruntime.cluster.local_workers import LocalLauncher


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORKERS", "LISTEN", "WORLD_SIZE"):
        monkeypatch.delenv(f"DISTRUNTIME_{name}", raising=False)


def test_without_variables_a_call_means_what_it_says() -> None:
    assert launched(None, None, None, None) == (None, None, None)
    assert launched(3, None, None, None) == (3, None, None)


def test_a_script_of_a_launch_waits_for_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_LISTEN", "tcp://0.0.0.0:29400")
    monkeypatch.setenv("DISTRUNTIME_WORLD_SIZE", "4")
    assert launched(None, None, None, None) == (4, None, "tcp://0.0.0.0:29400")
    assert launched(4, None, None, None) == (4, None, "tcp://0.0.0.0:29400")
    with pytest.raises(
        dr.errors.ConfigurationError, match="world_size=2, and `distruntime launch` has started 4"
    ):
        launched(2, None, None, None)
    monkeypatch.setenv("DISTRUNTIME_WORLD_SIZE", "many")
    with pytest.raises(
        dr.errors.ConfigurationError, match="DISTRUNTIME_WORLD_SIZE is a number of workers, got 'many'"
    ):
        launched(None, None, None, None)


def test_workers_are_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_WORKERS", "tcp://a:1, tcp://b:1")
    assert launched(None, None, None, None) == (None, ["tcp://a:1", "tcp://b:1"], None)
    monkeypatch.setenv("DISTRUNTIME_WORKERS", "ssh://a?devices=cuda:0,cuda:1,ssh://b")
    assert launched(None, None, None, None) == (None, ["ssh://a?devices=cuda:0,cuda:1", "ssh://b"], None)
    monkeypatch.setenv("DISTRUNTIME_LISTEN", "tcp://0.0.0.0:29400")
    with pytest.raises(dr.errors.ConfigurationError, match="Unset one of the two"):
        launched(None, None, None, None)


def test_an_argument_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_WORKERS", "tcp://a:1")
    launcher = LocalLauncher()
    assert launched(2, ["tcp://c:1"], None, None) == (2, ["tcp://c:1"], None)
    assert launched(2, None, "tcp://0.0.0.0:1", None) == (2, None, "tcp://0.0.0.0:1")
    assert launched(2, None, None, launcher) == (2, None, None)
