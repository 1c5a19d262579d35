"""How workers come to speak to each other, and who waits for a signal of a worker that is lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from itertools import combinations

from ..errors import ConfigurationError, ConnectionFailed
from ..log.log import Log
from ..log.node import Node
from ..wire.address import host_of
from ..wire.deadlines import MEET
from ..wire.messages import ListenForPeers, Peers, Signal
from ..wire.shield import Lock
from .launcher import Routes
from .requests import Request
from .session import Session
from .timeouts import deadline_in, left_until

log = logging.getLogger("distruntime")

# So many signals are remembered, before those that have come are dropped.
_MOST_SIGNALS = 1024


class Meeting:
    """Where each worker listens for the others, and the signals that they send each other."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.done = False
        self._secret = os.urandom(16)
        self._asked: list[Request[str]] = []
        # The keys are the signals' numbers. Each value has who waits, at which position, for whom, in which
        # log.
        self._signals: dict[int, tuple[Node, int, Node, Log]] = {}
        # It is set once the workers have been told of each other. Only `routes` makes that take a while.
        self._told = threading.Event()
        self._settling = Lock()
        session.on_loss.append(self._lost)
        session.on_return.append(self.returned)

    def start(self) -> None:
        """Have every worker told where the others listen. Return at once; `done` says when that is so."""
        session = self.session
        if len(session.nodes) < 2:
            self.done = True
            return
        self._asked = [
            session.ask(node, ListenForPeers, proposed(node)) for node in session.nodes if node.failed is None
        ]
        for request in self._asked:
            request.when_done(self._listens)

    def returned(self, node: Node) -> None:
        """Have every worker told where one listens that has come. Return at once."""
        if len(self.session.nodes) < 2:
            return
        self.done = False
        self._told.clear()
        others = [request for request in self._asked if request.node.index != node.index]
        known = {request.node.index for request in others}
        # A node that was alone until now has not been asked.
        asked = [
            self.session.ask(one, ListenForPeers, proposed(one))
            for one in self.session.nodes
            if one is node or (one.index not in known and one.failed is None)
        ]
        self._asked = [*others, *asked]
        for request in asked:
            request.when_done(self._listens)

    def _listens(self, request: Request[str]) -> None:
        if not self.done and all(request.done for request in self._asked):
            # All of them are read: some may have been answered before anyone was told of it.
            listening = {
                r.node.index: str(r.value)
                for r in self._asked
                if r.cause is None and r.lost is None and r.node.failed is None
            }
            routes = self.session.routes
            if routes is None:
                addresses = [listening.get(k, "") for k in range(len(self.session.nodes))]
                self._tell(dict.fromkeys(listening, addresses))
                return
            # To look for routes takes longer than the thread that reads may wait.
            threading.Thread(
                target=self._settle, args=(routes, listening), name="distruntime-routes", daemon=True
            ).start()

    def _settle(self, routes: Routes, listening: Mapping[int, str]) -> None:
        with self._settling:
            asked = self._asked
            try:
                found = routes.settle(listening)
            except Exception as error:
                # The thread has nobody to raise to. Whoever needs the workers to meet hears that they do not.
                log.warning("the routes between the workers are not known: %s", error)
                return
            # Another worker may have come meanwhile, and another thread waits to look again.
            if asked is self._asked:
                self._tell(found)

    def _tell(self, addresses: Mapping[int, list[str]]) -> None:
        """Tell each worker where it dials the others."""
        for node in self.session.nodes:
            if node.index in addresses and node.failed is None:
                self.session.post(node, Peers(node.index, self._secret, addresses[node.index]))
        self.done = True
        self._told.set()

    def require(self) -> None:
        """Block until every worker says where it listens, or is lost.

        Raise `ConfigurationError` if one cannot listen there, `ConnectionFailed` if one does not say so
        within half a minute.
        """
        patience = MEET.get()
        for request in [r for r in self._asked if r.done and r.cause is not None and r.node.failed is None]:
            # Its port may have become free, so ask once more.
            self.returned(request.node)
        deadline = deadline_in(patience)
        for request in self._asked:
            if not self.session.result(request, left_until(deadline), quietly=True):
                raise ConnectionFailed(
                    f"{request.node} did not say within {patience:.0f} s where it listens for other workers"
                )
            cause = request.cause
            if cause is not None and cause.failure.kind.endswith("ConfigurationError"):
                raise ConfigurationError(f"{request.node}: {cause.failure.text}")
            # A node that is gone need not be met.
            if request.lost is None:
                self.session.raise_for(request)
        if self.session.routes is not None and not self.done and not self._told.wait(left_until(deadline)):
            raise ConnectionFailed(
                f"it is not known within {patience:.0f} s how the workers reach each other: is a connection "
                "of ssh's away?"
            )

    def addresses(self, late: Node, nodes: Iterable[Node]) -> str:
        """Return sentences that say where these nodes listen for each other, and how `late` tries an address.

        Nothing where they meet in another way than by TCP.
        """
        found = {
            request.node: str(request.value)
            for request in self._asked
            if request.done and request.cause is None and request.lost is None
        }
        tcp = {node: found[node] for node in nodes if found.get(node, "").startswith("tcp://")}
        others = [address for node, address in tcp.items() if node is not late]
        if self.session.routes is not None or late not in tcp or not others:
            return ""
        told = ", ".join(f"{node} at {address}" for node, address in tcp.items())
        host, port = host_of(others[0]), others[0].rpartition(":")[2]
        return (
            f" They listen for each other: {told}. Each must reach the others there, and at the ports that "
            f"the data channel opens on these hosts. On {late.host}, this shows it: nc -vz {host} {port}. A "
            "worker that others reach elsewhere starts with --data-address HOST"
        )

    def require_routes(self, nodes: Iterable[int], direct: str = "") -> None:
        """Raise `ConnectionFailed` unless these nodes reach each other.

        Block until that is known.

        Args:
            direct: what needs a direct route, as "the data channel 'gloo'"; "": one through this machine will
                do.
        """
        routes, pairs = self.session.routes, list(combinations(sorted(set(nodes)), 2))
        if routes is None or not pairs:
            return
        self.require()
        for one, other in pairs:
            if why := routes.missing(one, other):
                raise ConnectionFailed(why)
            if direct and not routes.direct(one, other):
                raise ConnectionFailed(
                    f"{direct} needs a direct route between {self.session.nodes[one]} and "
                    f"{self.session.nodes[other]}, and they reach each other only through ssh and this "
                    "machine. Open the ports between the two, or name the address by which they reach each "
                    "other: ssh://HOST?address=HOST (docs/ssh.md)"
                )

    def has_route(self, here: Node, there: Node) -> bool:
        """Whether one worker reaches another, directly or not."""
        return self.session.routes is None or not self.session.routes.missing(here.index, there.index)

    def reach_directly(self, nodes: Iterable[int]) -> bool:
        """Whether these nodes reach each other without this machine. Block until that is known."""
        routes, pairs = self.session.routes, list(combinations(sorted(set(nodes)), 2))
        if routes is None or not pairs:
            return True
        self.require()
        return all(routes.direct(one, other) for one, other in pairs)

    def remember(self, number: int, here: Node, there: Node, position: int, log: Log) -> None:
        """Note that `here` waits at a position of `log` for a signal of `there`, which may be lost."""
        if len(self._signals) >= _MOST_SIGNALS:
            passed = [n for n, (_, at, _, of) in self._signals.items() if at <= of.acknowledged]
            for n in passed:
                # Another thread may have removed it.
                self._signals.pop(n, None)
        self._signals[number] = here, position, there, log
        # It may have been lost just now.
        if there.failed is not None:
            self._unsignalled(number)

    def _unsignalled(self, number: int) -> None:
        """Tell who waits for a signal of a lost node that it will not come."""
        waits = self._signals.pop(number, None)
        if waits is not None and waits[0].failed is None:
            here, _, there, _ = waits
            self.session.post(
                here,
                Signal(number, f"the node of an event that was waited for is lost: {there} {there.failed}"),
            )

    def _lost(self, node: Node) -> None:
        for number, (_, _, there, _) in list(self._signals.items()):
            if there is node:
                self._unsignalled(number)


def proposed(node: Node) -> str:
    """Return the host by which this process has dialled a worker, if it has."""
    return host_of(node.address)
