"""The workers of one session that ssh reaches: their keys, their start, and where they appear here.

How they reach each other, where ssh leads to some of them, is here too: a worker tries the others directly.
Where that fails, the workers' own channel goes through ssh and this machine: from a port of the one's
loopback to a socket here, and from there to the other worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from ..errors import ConfigurationError, ConnectionFailed, DistruntimeError
from ..session.launcher import LaunchSpec
from ..session.session import Session
from ..wire.address import host_of
from ..wire.keys import KeyPair, choose, default_path, is_local
from .ssh import SshLauncher, SshWorker
from .ssh_address import SshAddress, is_ssh
from .ssh_agent import network, reach

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
            and (not is_local(address) or self._network(k) == network)
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
        return not is_local(address) and (back is None or back.get(one, False))

    def _network(self, number: int) -> str:
        """Return what is the same for workers that share a loopback, as far as it is known."""
        worker = self._worker(number)
        if worker is not None:
            return worker.network or f"node {number}"
        # A daemon that is dialled at a loopback is on this machine.
        return _own_network() if is_local(self._session.nodes[number].address) else f"node {number}"

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


def _own_network() -> str:
    return network() or "this machine"


# A dot is shown so often while workers start, and so often somebody looks.
_DOT, _LOOK = 0.25, 0.02
# Workers that are busy with a step that takes long, as making an environment, are not late.
_LONG_STEPS = 3600.0
# A worker has so many seconds more than its step, to say what was wrong.
_LAST_WORDS = 2.0


def need_ssh(addresses: Sequence[str]) -> bool:
    """Whether ssh leads to one of these addresses."""
    return any(map(is_ssh, addresses))


@final
class SshSession:
    """Which nodes of a session are reached by ssh.

    Args:
        addresses: those of all nodes.
        directory: a folder here that only this user can enter, for sockets and for a key that is made now.
        name: the session's name, or None.
        key: the file with the key that the user has named.
        insecure: whether the user wants no key.
    """

    def __init__(
        self, addresses: Sequence[str], directory: Path, *, name: str | None, key: Path | None, insecure: bool
    ) -> None:
        self.addresses = [SshAddress.parse(text) if is_ssh(text) else None for text in addresses]
        self.directory, self._name = directory, name or ""
        self.endpoints = {
            k: f"ipc://{directory}/worker-{k}" for k, one in enumerate(self.addresses) if one is not None
        }
        if insecure:
            raise ConfigurationError(
                "insecure=True does not go with addresses of ssh://: their workers always have a key, which "
                "ssh hands over. Leave insecure out"
            )
        others = [text for text in addresses if not is_ssh(text)]
        if key is None and not others and name is None:
            # It serves this session alone, and goes with it.
            key = directory / "key"
            KeyPair.generate().save(key)
        elif key is None:
            # A later master of this session, and the workers that run already, have this one.
            for text in others or ["tcp://127.0.0.1:0"]:
                if choose(text) is None:
                    raise ConfigurationError(
                        f"{text} needs no key, and a worker that ssh reaches has one: a session has one key "
                        "for all. Name the key file with key="
                    )
            key = default_path()
        self.key = key
        self.keys = KeyPair.load(key)
        self._launcher: SshLauncher | None = None

    def start(
        self,
        session: Session,
        spec: LaunchSpec,
        *,
        must_run: bool,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        """Start the workers, or find those that run. Block until all listen; raise why one does not."""
        self._launcher = launcher = SshLauncher(
            self.addresses, session=self._name, must_run=must_run, patience=patience, say=say
        )
        spec = replace(spec, key=self.key)
        session.workers.launch = lambda k: launcher.start(replace(spec, node=k, listen=self.endpoints[k]))
        session.workers.startable = frozenset(self.endpoints)
        session.routes = SshRoutes(session, self.directory)
        session.workers += [None] * len(self.addresses)
        for k in self.endpoints:
            session.workers.start(k)
        self._wait([launcher.workers[k] for k in self.endpoints], patience, say)

    @contextmanager
    def older_ones_stay(self) -> Iterator[None]:
        """Let go of the workers that ran before, if a `with` block fails: the values there are not lost."""
        try:
            yield
        except BaseException:
            for worker in self._launcher.workers.values() if self._launcher is not None else ():
                if worker.found:
                    worker.leave()
            raise

    def _wait(self, workers: Sequence[SshWorker], patience: float, say: Callable[[str], None]) -> None:
        began = time.monotonic()
        dot, deadline = began + _DOT, began + patience
        while late := [worker for worker in workers if not worker.ready.is_set()]:
            for worker in late:
                worker.require_started()
                if (ended := worker.poll()) is not None:
                    words = worker.last_lines(5)
                    raise ConnectionFailed(
                        f"{worker.address.shown}: the worker ended before it was ready ({ended})"
                        + (f"; the last lines of its log:\n{words}" if words else "")
                    )
            now = time.monotonic()
            if any(worker.takes_long for worker in late):
                deadline = max(deadline, now + patience)
            # A worker says by itself what has taken too long, and knows more.
            if now > min(deadline + _LAST_WORDS, began + _LONG_STEPS):
                raise ConnectionFailed(
                    f"{late[0].address.shown} was not ready within {now - began:.0f} s; it was "
                    f"{late[0].step}. Give it longer: timeout="
                )
            if now > dot:
                say(".")
                dot = now + _DOT
            late[0].ready.wait(_LOOK)
