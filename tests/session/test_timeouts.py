"""The limits of waits: what counts as one, and how much of it is left."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import distruntime as dr
from distruntime.session import timeouts
from distruntime.session.timeouts import checked, deadline_in, left_until


def test_a_deadline_comes_nearer_and_then_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(timeouts, "time", SimpleNamespace(monotonic=lambda: now))
    deadline = deadline_in(2.5)
    assert deadline == 102.5 and left_until(deadline) == 2.5
    now = 102.0
    assert left_until(deadline) == 0.5
    now = 110.0
    assert left_until(deadline) == 0.0


def test_no_timeout_has_no_deadline() -> None:
    assert deadline_in(None) is None and left_until(None) is None and checked(None) is None


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, True, "1", 1e300])
def test_what_no_wait_can_last_is_refused(timeout: object) -> None:
    with pytest.raises(dr.errors.UsageError, match="a timeout is a number of seconds from 0 on"):
        checked(timeout)  # type: ignore[arg-type]
