"""How workers are started: the plug point for launchers of one's own, by ssh, by Slurm or in containers."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..wire.address import host_of


@dataclass(frozen=True)
class LaunchSpec:
    """What a launcher gets for one worker.

    Attributes:
        node: the number that the worker has in the session.
        master: the address that the worker dials; "" where it listens.
        listen: the address where it waits for masters instead; "" where it dials. It then outlives this
            process.
        key: the file here with the cluster's key; None: the address needs none.
        insecure: whether the user has said that there is to be no key.
        threads: threads of torch's kernels; 0: as torch chooses.
        simulate_cuda: how many GPUs it offers that are really CPU tensors.
        environment: variables that it needs beside those of its machine.
        directory: a folder on this machine for what it writes, which only this user can enter. It goes with
            the session.
        logs: a folder on this machine for its log, which stays; None: there is none, so take `directory`.
        workers: so many workers the session has. Those of one machine share its GPUs.
        lasting: whether the session has a name, so that the worker is to outlive this process.
        once: whether it ends with its session. False: it serves the next one, until somebody ends it.
    """

    node: int
    master: str
    listen: str
    key: Path | None
    insecure: bool
    threads: int
    simulate_cuda: int
    environment: Mapping[str, str]
    directory: Path
    logs: Path | None = None
    workers: int = 1
    lasting: bool = False
    once: bool = True

    def arguments(self, key: Path | None = None) -> list[str]:
        """Return the arguments of the `distruntime-worker` that is to be started.

        Args:
            key: the key file on the worker's machine, where that is another one than here.
        """
        where = (
            ["--listen", self.listen] if self.listen else ["--master", self.master, "--node", str(self.node)]
        )
        found = key or self.key
        return [
            *where,
            *(("--once",) if self.once else ()),
            *("--threads", str(self.threads)),
            *("--simulate-cuda", str(self.simulate_cuda)),
            *(("--insecure",) if self.insecure else ("--key", str(found)) if found is not None else ()),
        ]


class WorkerProcess(ABC):
    """A worker that a launcher has started.

    The thread that reads the session's socket asks `poll` ten times a second, so that must not wait.
    """

    @property
    @abstractmethod
    def pid(self) -> int:
        """The number of its process on its machine, or what else its operator knows it by."""

    @abstractmethod
    def poll(self) -> str | None:
        """Return at once how it has ended, as "killed by signal 9 (SIGKILL)", or None while it runs."""

    @abstractmethod
    def last_lines(self, count: int = 20) -> str:
        """Return the last lines that it has written, at most `count`, for errors to quote.

        "" if there are none.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to end, as SIGTERM does. Return at once; it may have ended already."""

    @abstractmethod
    def stop(self, timeout: float = 5.0) -> None:
        """Block until it has ended. Kill it if that takes longer than `timeout` seconds, or at once for 0."""

    @abstractmethod
    def leave(self) -> None:
        """Let it run on with its named session, which this process leaves. Return at once.

        This call is the last.
        """


class Launcher(ABC):
    """Starts workers: `init_master_worker(launcher=...)`. `distruntime.testing.check_launcher` checks one.

    A launcher may start workers for several sessions, one after the other.
    """

    @abstractmethod
    def start(self, spec: LaunchSpec) -> WorkerProcess:
        """Start a worker, the first one of a node or another one. Return at once, before it listens or dials.

        Called from any thread. What is raised here ends `init_master_worker`, or the attempt to start the
        worker again.
        """


class Routes(Protocol):
    """Where workers dial each other, if not all of them reach each other directly."""

    def settle(self, listening: Mapping[int, str]) -> Mapping[int, list[str]]:
        """Return what each node dials to reach each other one; "" where there is no route. May block."""

    def direct(self, one: int, other: int) -> bool:
        """Whether two nodes reach each other directly."""

    def missing(self, one: int, other: int) -> str:
        """Return which route is missing between two nodes, and why; nothing if there is one."""


def dialled_at(address: str) -> str:
    """Return where others dial what listens at an address: a wildcard stands for this machine's name."""
    port = address.rpartition(":")[2]
    return f"tcp://{socket.gethostname()}:{port}" if host_of(address) in ("*", "0.0.0.0", "::") else address


def worker_command(address: str, *, dials: bool) -> str:
    """Return the command of a worker that dials an address, or listens there."""
    return (
        f"distruntime-worker --master {dialled_at(address)}"
        if dials
        else f"distruntime-worker --listen {address}"
    )
