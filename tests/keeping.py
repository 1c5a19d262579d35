"""A worker in a thread of the test, which keeps what sessions have published when they end, as a daemon does that outlives its masters.

The test says whose session the next master opens (`serving`), and looks into what is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distruntime as dr
from distruntime_worker.config import WorkerConfig
from distruntime_worker.daemon import Daemon
from distruntime_worker.data_channel import prepare
from distruntime_worker.published import Published


class Keeping(Daemon):
    """A daemon whose sessions' publications stay."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.kept: dict[str, Published] = {}
        self.serving = "alice"
        self.address = config.listen or ""

    def publications(self, session: str) -> Published:
        return self.kept.setdefault(self.serving, Published(self.serving))

    def shared(self) -> dict[str, Published]:
        return self.kept

    @property
    def state(self) -> Any:
        """What the session that is open holds here."""
        assert self._master is not None
        return self._master.executor.state


@contextmanager
def keeping(folder: Path, count: int = 1) -> Iterator[list[Keeping]]:
    """Run that many such workers."""
    prepare()
    stop = threading.Event()
    daemons = [Keeping(WorkerConfig(listen=f"ipc://{folder}/worker-{k}", simulate_cuda=2)) for k in range(count)]
    threads = [threading.Thread(target=daemon.run, args=(stop,), name=f"keeping-{k}") for k, daemon in enumerate(daemons)]
    for thread in threads:
        thread.start()
    try:
        yield daemons
    finally:
        dr.shutdown()
        stop.set()
        for thread, daemon in zip(threads, daemons):
            thread.join(20)
            daemon.close()


def enter(open_session: Callable[..., Any], daemons: list[Keeping], name: str) -> Any:
    """Open a session of that name, which may have been there before; the one that is open ends."""
    dr.shutdown()
    for daemon in daemons:
        daemon.serving = name
    session = open_session(workers=[daemon.address for daemon in daemons])
    session.name = name
    return session
