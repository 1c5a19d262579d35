"""The suite that each launcher passes (`docs/sessions.md`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

import distruntime as dr

from ..session.session import active_session


def check_launcher(
    launcher: dr.workers.Launcher, *, listen: str | None = None, timeout: float = 60.0, insecure: bool = False
) -> None:
    """Check that a launcher starts, watches and ends workers as a session needs it. Block for a minute.

    There must be no session. Two workers are started, and compute; one is ended behind the session's back,
    which notices it; another one takes its place; one that runs is replaced, too. The end of a session ends
    its workers, and those of a named session that is left run on until a later one ends it.

    Args:
        listen: where this process listens for the workers; left out: at a socket in a folder of this machine.
        timeout: seconds for workers to start, and for each other thing that is waited for.
        insecure: as `init_master_worker` takes it.

    Raises:
        AssertionError: something is not as `dr.workers.Launcher` and `dr.workers.WorkerProcess` say; the text
            names it. UsageError: there is a session.
    """
    if dr.is_initialized():
        raise dr.errors.UsageError(
            "check_launcher opens sessions of its own: end the open one first, dr.shutdown()"
        )
    options = _Options(launcher, listen, timeout, insecure)
    try:
        _check_one_session(options)
        _check_named_session(options)
    finally:
        if dr.is_initialized():
            # The check that failed says more than what this end may raise.
            with suppress(dr.DistruntimeError):
                dr.shutdown()


@dataclass(frozen=True)
class _Options:
    launcher: dr.workers.Launcher
    listen: str | None
    timeout: float
    insecure: bool

    def open(self, name: str | None = None, *, resume: bool = False) -> None:
        dr.init_master_worker(
            world_size=2,
            launcher=self.launcher,
            session=name,
            resume=resume,
            listen=self.listen,
            timeout=self.timeout,
            insecure=self.insecure,
            quiet=True,
        )

    def until(self, condition: Callable[[], object], otherwise: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"launcher {self.launcher!r}: within {self.timeout:g} s {otherwise}")
            time.sleep(0.02)


def _started() -> list[dr.workers.WorkerProcess]:
    workers = [worker for worker in active_session().workers if worker is not None]
    for worker in workers:
        assert isinstance(worker, dr.workers.WorkerProcess), (
            f"start() returns a dr.workers.WorkerProcess, got {worker!r}"
        )
        assert isinstance(worker.pid, int), f"pid is an int, got {worker.pid!r}"
        assert isinstance(worker.last_lines(5), str), f"last_lines(5) is a str, got {worker.last_lines(5)!r}"
        assert worker.last_lines(5).count("\n") < 5, "last_lines(5) has more than five lines"
        ended = worker.poll()
        assert ended is None, f"a worker runs, and poll() says {ended!r}"
    return workers


def _computes(node: int) -> bool:
    with dr.on(node, "cpu"):
        return bool(torch.ones(3, device="remote").sum().item() == 3)


def _check_one_session(options: _Options) -> None:
    options.open()
    first = _started()
    assert len({worker.pid for worker in first}) == 2, "two workers have one pid"
    assert _computes(0) and _computes(1)
    first[1].stop(0.0)
    ended = first[1].poll()
    assert isinstance(ended, str) and ended, (
        f"after stop(0.0) poll() says how the worker has ended, got {ended!r}"
    )
    # A worker that is asked to end before it is killed may still say that it leaves.
    options.until(
        lambda: dr.nodes()[1].state in ("lost", "left"),
        "the session does not hear of a worker's end: see poll()",
    )
    assert _computes(0), "the end of one worker has taken another with it"
    dr.restart(1)
    second = _started()
    assert second[1] is not first[1] and _computes(1)
    dr.restart(1, force=True)
    third = _started()
    assert second[1].poll() is not None, "a worker that was replaced runs on"
    assert third[1] is not second[1] and _computes(0) and _computes(1)
    dr.shutdown()
    for worker in (first[0], third[1]):
        assert worker.poll() is not None, "a worker runs on after the end of its session"
        worker.terminate()
        worker.stop(0.0)


def _check_named_session(options: _Options) -> None:
    name = f"check-{os.getpid()}"
    options.open(name)
    left = _started()
    dr.publish("kept", torch.full((3,), 2.0, device="remote"))
    dr.detach()
    options.open(name, resume=True)
    assert dr.lookup("kept").sum().item() == 6, "workers of a named session have lost what was published"
    dr.shutdown()
    options.until(
        lambda: all(worker.poll() is not None for worker in left),
        "workers outlive the end of a named session",
    )
