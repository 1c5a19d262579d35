"""Workers that dial this process: which node each of them becomes, and which finds no place."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from ..errors import ConnectionFailed
from ..log.node import Node
from ..session.session import Session
from ..wire.messages import Goodbye, Join, Refused
from .connection import Connection


@final
class Joins:
    """Gives workers that have dialled their places. The thread that reads the socket calls it.

    Args:
        connections: those of the session's nodes.
        nodes: the nodes that have had a worker.
        wanted: returns the mode of the greeting with which a node's worker is sought; None: it is not sought.
        one_more: returns the connection of one node more; None: the session may have no more.
    """

    def __init__(
        self,
        session: Session,
        connections: list[Connection],
        nodes: dict[int, Node],
        wanted: Callable[[Connection], str | None],
        one_more: Callable[[], Connection | None],
    ) -> None:
        self._session, self._connections, self._nodes = session, connections, nodes
        self._wanted, self._one_more = wanted, one_more
        # These workers have dialled while all places seemed to be taken.
        self._surplus: dict[bytes, Join] = {}
        # These of them have been told that the session has all its workers.
        self._spare: set[bytes] = set()

    def surplus(self) -> dict[bytes, Join]:
        """Return those that have found no place so far, to be tried again."""
        found, self._surplus = self._surplus, {}
        return found

    def disconnected(self, peer: bytes) -> None:
        """Forget a connection that has ended."""
        self._surplus.pop(peer, None)
        self._spare.discard(peer)

    def place(self, peer: bytes, join: Join, *, met: bool) -> Connection | None:
        """Return the connection of the node that a worker becomes; None: it has no place so far.

        `met` says whether each node has had a worker. Raise `ConnectionFailed` for a number that cannot be.
        """
        for node in self._nodes.values():
            if node.failed is None and node.welcome.incarnation == join.incarnation:
                if node.link.peer is not None:
                    # This connection may be the older one, delayed. Then the worker hears of it on the other,
                    # and joins again.
                    self._session.greet(node.link.peer, Refused("the worker has connected anew", False))
                    self._session.cut(node, "the worker has connected anew")
                return self._connections[node.index]
        if met:
            self._displace(peer, join)
        found = self._vacant(join) if met else self._unmet(join)
        if found is None and met:
            found = self._one_more()
        if found is None:
            if met and peer not in self._spare:
                self._spare.add(peer)
                self._session.greet(peer, Goodbye("the session has all its workers"))
                self._session.strangers.note(
                    f"a worker on {join.host} (pid {join.pid}) has dialled, and the session has all its "
                    "workers. It gets no place until one of them is lost"
                )
            # A place may become free again. The worker may even have been started in the place of one that
            # is not known to be lost so far.
            self._surplus[peer] = join
        else:
            self._spare.discard(peer)
        return found

    def _displace(self, peer: bytes, join: Join) -> None:
        """Give up an absent node whose number another worker asks for, unless that one has waited for it.

        A launcher elsewhere has seen the first one end, and has started another with its number. From here it
        is only silent, and would be waited for as long as a network may be cut.
        """
        node = self._nodes.get(join.node) if join.node is not None else None
        if node is None or node.failed is not None or node.presence.absence is None or peer in self._spare:
            return
        self._session.lose(
            node,
            f"(pid {node.welcome.pid}) was unreachable ({node.presence.absence.why}), and another worker was "
            f"started with its number: {join.host}, pid {join.pid}",
        )

    def _vacant(self, join: Join) -> Connection | None:
        """Return the connection of a node that is lost, or new: the one asked for, or the first free one."""
        free = [
            c
            for c in self._connections
            if (self._nodes[c.number].failed is not None if c.number in self._nodes else not c.address)
        ]
        wanted = [c for c in free if join.node in (None, c.number) and self._wanted(c) is not None]
        return min(wanted, key=lambda connection: len(connection.attempts), default=None)

    def _unmet(self, join: Join) -> Connection | None:
        """Return the connection of a node without a worker so far: the one asked for, or a free one."""
        wish = join.node
        if wish is not None and not 0 <= wish < len(self._connections):
            count = len(self._connections)
            raise ConnectionFailed(
                f"a worker on {join.host} asks to be node {wish}; this session has nodes 0 to {count - 1}"
            )
        there = None if wish is None else self._nodes.get(wish)
        if there is not None and there.failed is not None:
            # The worker comes in a lost worker's place, which is free once all have met. Another place is
            # another's.
            return None
        late = [connection for connection in self._connections if connection.first]
        same = [connection for connection in late if connection.has_joined(join.incarnation)]
        free = [connection for connection in late if not connection.attempts]
        return next(iter([*same, *(c for c in free if c.number == wish), *free]), None)
