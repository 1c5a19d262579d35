"""`dr.workers.on_nodes`: functions that hear of workers that are lost, and of those in their place."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from processes import until


def test_a_function_hears_of_a_loss_and_of_who_comes(
    fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    fresh_session(world_size=2)
    heard: list[dr.workers.NodeChange] = []
    sums: list[float] = []

    def fails(change: dr.workers.NodeChange) -> None:
        raise ValueError("mine")

    def computes(change: dr.workers.NodeChange) -> None:
        # It waits for a worker, which the thread that reads the socket could not do.
        sums.append(torch.ones(3, device=dr.place(0)).sum().item())
        heard.append(change)

    stop_failing, stop = dr.workers.on_nodes(fails), dr.workers.on_nodes(computes)
    old = dr.nodes()[1]
    os.kill(old.pid, signal.SIGKILL)
    until(lambda: len(heard) == 1)
    assert heard[0].node == 1 and heard[0].what == "lost" and heard[0].pid == old.pid
    assert "killed by signal 9 (SIGKILL)" in heard[0].why
    assert "a function that dr.workers.on_nodes() was given failed" in caplog.text
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]
    stop_failing()
    stop_failing()
    dr.restart(1)
    until(lambda: len(heard) == 2)
    assert heard[1] == dr.workers.NodeChange(1, "joined", dr.nodes()[1].host, dr.nodes()[1].pid)
    assert sums == [3.0, 3.0]
    stop()


def test_it_needs_a_session_and_a_function(fresh_session: Callable[..., Any]) -> None:
    dr.shutdown()
    with pytest.raises(dr.errors.UsageError):
        dr.workers.on_nodes(print)
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.UsageError, match="on_nodes takes a function that gets a NodeChange, got 3"):
        dr.workers.on_nodes(3)  # type: ignore[arg-type]
