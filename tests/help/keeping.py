"""A worker in a thread of the test, which looks into what is kept there of sessions whose masters come and
go.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distruntime as dr
from distruntime.session.session import active_session
from distruntime_worker.collectives.data_channel import prepare
from distruntime_worker.publishing.published import Published
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import Daemon


class Keeping(Daemon):
    """A daemon that the test looks into."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.address = config.listen or ""

    @property
    def kept(self) -> dict[str, Published]:
        """What each session has published here."""
        return self._sessions.published()

    @property
    def state(self) -> Any:
        """What the session that has a master holds here."""
        (session,) = self._by_peer.values()
        return session.executor.state


@contextmanager
def keeping(folder: Path, count: int = 1) -> Iterator[list[Keeping]]:
    """Run that many such workers."""
    prepare()
    stop, before = threading.Event(), os.environ.get("DISTRUNTIME_STATE")
    os.environ["DISTRUNTIME_STATE"] = str(folder / "state")
    daemons = [
        Keeping(WorkerConfig(listen=f"ipc://{folder}/worker-{k}", simulate_cuda=2)) for k in range(count)
    ]
    threads = [
        threading.Thread(target=daemon.run, args=(stop,), name=f"keeping-{k}", daemon=True)
        for k, daemon in enumerate(daemons)
    ]
    for thread in threads:
        thread.start()
    try:
        yield daemons
    finally:
        dr.shutdown()
        os.environ.pop("DISTRUNTIME_STATE")
        if before is not None:
            os.environ["DISTRUNTIME_STATE"] = before
        stop.set()
        for thread, daemon in zip(threads, daemons):
            thread.join(20)
            daemon.close()


def enter(open_session: Callable[..., Any], daemons: list[Keeping], name: str) -> Any:
    """Open a session of that name, or attach to it if it is there; the one that is open is left."""
    if dr.is_initialized() and active_session().lasting:
        dr.detach()
    dr.shutdown()
    return open_session(
        workers=[daemon.address for daemon in daemons],
        session=name,
        force=True,
        # A session that has just failed may end between a look at the daemon and the greeting.
        resume="auto",
    )
