"""How workers reach each other where ssh leads to some of them.

A worker tries the others directly. Where that fails, the workers' own channel goes through ssh and this
machine: from a port of the one's loopback to a socket here, and from there to the other worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import final

from ..errors import ConnectionFailed, DistruntimeError
from ..session.session import Session
from ..wire.address import host_of
from .ssh import SshWorker
from .ssh_agent import reach

log = logging.getLogger("distruntime")

# So many workers are asked side by side.
_SIDE_BY_SIDE = 16


@final
class SshRoutes:
    """The routes of one session. `Meeting` asks for them each time that workers say where they listen."""

    def __init__(self, session: Session, directory: Path) -> None:
        self._session, self._directory = session, directory
        # These pairs of nodes, the one that dials first, have no direct route. The text says why there is
        # none through ssh either, and is "" where there is one.
        self._indirect: dict[tuple[int, int], str] = {}

    def settle(self, listening: Mapping[int, str]) -> dict[int, list[str]]:
        """Return what each node dials to reach each other one; "" where there is no route.

        Block for some seconds at most.
        """
        count = len(self._session.nodes)
        rows = {k: [listening.get(other, "") for other in range(count)] for k in listening}
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            looked = dict(zip(listening, pool.map(lambda k: self._looked(k, listening), listening)))
        indirect: dict[tuple[int, int], str] = {}
        for k in listening:
            for other in listening:
                if other == k or self._is_direct(k, other, listening[other], looked):
                    continue
                try:
                    rows[k][other] = self._through_here(k, other, listening[other])
                    indirect[k, other] = ""
                except DistruntimeError as error:
                    rows[k][other], indirect[k, other] = "", str(error)
        self._indirect = indirect
        return rows

    def direct(self, one: int, other: int) -> bool:
        """Whether two nodes reach each other without this machine."""
        return not {(one, other), (other, one)} & self._indirect.keys()

    def missing(self, one: int, other: int) -> str:
        """Return which route is missing between two nodes, and why; nothing if there is one both ways."""
        for here, there in ((one, other), (other, one)):
            why = self._indirect.get((here, there), "")
            if why:
                nodes = self._session.nodes
                return f"there is no route from {nodes[here]} to {nodes[there]}: {why}"
        return ""

    def _worker(self, number: int) -> SshWorker | None:
        workers = self._session.workers
        found = workers[number] if number < len(workers) else None
        return found if isinstance(found, SshWorker) else None

    def _looked(self, number: int, listening: Mapping[int, str]) -> Mapping[int, bool] | None:
        """Return which other nodes a node reaches; None where nobody can look from there."""
        network, worker = self._network(number), self._worker(number)
        asked = {
            k: (host_of(address), int(address.rpartition(":")[2]))
            for k, address in listening.items()
            if k != number
            and address.startswith("tcp://")
            # A loopback is that of the machine on which one looks.
            and (not _is_loopback(address) or self._network(k) == network)
        }
        if worker is not None:
            found = worker.ways.reaches(list(asked.values())) if asked else []
        elif network == _own_network():
            found = reach(list(asked.values()))
        else:
            return None
        return dict(zip(asked, found))

    def _is_direct(
        self, one: int, other: int, address: str, looked: Mapping[int, Mapping[int, bool] | None]
    ) -> bool:
        there, back = looked[one], looked[other]
        if there is not None:
            # Sockets in a folder are for workers of one machine.
            return there.get(
                other, address.startswith("ipc://") and self._network(one) == self._network(other)
            )
        # Nobody can look from a daemon on another machine. What does not reach it is not reached by it.
        return not _is_loopback(address) and (back is None or back.get(one, False))

    def _network(self, number: int) -> str:
        """Return what is the same for workers that share a loopback, as far as it is known."""
        worker = self._worker(number)
        if worker is not None:
            return worker.network or f"node {number}"
        # A daemon that is dialled at a loopback is on this machine.
        return _own_network() if _is_loopback(self._session.nodes[number].address) else f"node {number}"

    def _through_here(self, one: int, other: int, address: str) -> str:
        """Make the way from one node to another through this machine; return what the first one dials."""
        worker, target = self._worker(one), self._worker(other)
        here = f"{host_of(address)}:{address.rpartition(':')[2]}"
        if target is not None:
            # A worker that has come in the place of a lost one listens elsewhere.
            path = self._directory / f"peer-{other}-{address.rpartition(':')[2]}"
            target.ways.lead_there(path, host_of(address), int(address.rpartition(":")[2]))
            here = str(path)
        elif not address.startswith("tcp://"):
            here = address.removeprefix("ipc://")
        if worker is not None:
            return f"tcp://127.0.0.1:{worker.ways.lead_back(here)}"
        if target is not None and self._network(one) == _own_network():
            return f"ipc://{here}"
        raise ConnectionFailed(
            f"it does not reach {address}, and ssh does not lead to it. Let it be reached by ssh as well "
            "(workers=['ssh://...']), or give the other one an address that it reaches: ssh://HOST?address=HOST"
        )


def _is_loopback(address: str) -> bool:
    try:
        return address.startswith("ipc://") or ip_address(host_of(address).partition("%")[0]).is_loopback
    except ValueError:
        return host_of(address) == "localhost"


def _own_network() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot + os.readlink("/proc/self/ns/net")
    except OSError:
        return "this machine"
