"""A launcher of one's own: what starts workers where you have machines. This one starts processes here.

    $ python examples/23_own_launcher.py
    4 nodes from processes of the launcher, sum 6
    the conformance suite passes, in 10.9 s

The suite starts workers of its own, and kills some of them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import distruntime as dr
from distruntime.testing import check_launcher


class ShellWorker(dr.workers.WorkerProcess):
    """One worker that has been started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> str | None:
        """Return how the worker ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"exited with code {code}"

    def last_lines(self, count: int = 20) -> str:
        """Return the end of its log: errors quote these lines."""
        return "\n".join(self._log.read_text(encoding="utf-8").splitlines()[-count:])

    def terminate(self) -> None:
        """Ask the worker to end."""
        self._process.terminate()

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for the end, and kill the worker if that takes too long."""
        self.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """Let the worker run on, for a named session."""


class ShellLauncher(dr.workers.Launcher):
    """Starts a worker for each node that a session asks for, and returns at once."""

    def start(self, spec: dr.workers.LaunchSpec) -> ShellWorker:
        log = spec.directory / f"worker-{spec.node}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "distruntime_worker", *spec.arguments()],
                env={**os.environ, **spec.environment},
                stdout=output,
                stderr=output,
            )
        return ShellWorker(process, log)


if __name__ == "__main__":
    with dr.init_master_worker(launcher=ShellLauncher(), world_size=4):
        values = [torch.tensor(k, device=dr.place(k)) for k in range(4)]
        print(f"{len(values)} nodes from processes of the launcher, sum {sum(dr.fetch(values))}")
    # The suite kills workers, and the session would say so.
    logging.getLogger("distruntime").setLevel(logging.ERROR)
    started = time.monotonic()
    check_launcher(ShellLauncher())
    print(f"the conformance suite passes, in {time.monotonic() - started:.1f} s")
