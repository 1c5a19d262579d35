"""What tests of workers that dial share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import distruntime as dr
from distruntime.cluster.local_workers import worker_environment
from distruntime.cluster.nursery import ForkedWorker, fork_worker
from processes import STARTING, free_port


@pytest.fixture
def address() -> Iterator[str]:
    dr.shutdown()
    yield f"tcp://127.0.0.1:{free_port()}"
    dr.shutdown()


@pytest.fixture
def dial(tmp_path: Path, address: str) -> Iterator[Callable[..., None]]:
    """Starts a worker that dials the address, with more arguments, and ends it with the test."""
    started: list[subprocess.Popen[bytes] | ForkedWorker] = []

    def start(*more: str) -> None:
        with (tmp_path / f"worker-{len(started)}.log").open("wb") as output:
            arguments = ["--threads", "1", "--master", address, "--insecure", *more]
            worker = fork_worker(arguments, worker_environment(1), output, False)
            assert worker is not None
            started.append(worker)

    yield start
    dr.shutdown()
    for worker in started:
        worker.terminate()
        worker.wait(STARTING)
