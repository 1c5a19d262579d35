"""A group: places whose tensors take part in collectives together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from ..errors import NodeFailed, UsageError
from ..log.handle import Place, Residence
from ..log.log import Log
from ..log.node import Node
from ..log.spec import NO_TENSOR
from ..log.storage import Storage
from ..session.session import Session
from ..session.spelling import on_node
from ..streams.stream import Stream
from ..wire.data_channel import Capabilities
from .mail import Mail

# A member, as users name it: a node stands for its first GPU, or for its CPU if it has none.
Where = int | Place


class ProcessGroup:
    """Places, in the order of their ranks, that take part in collectives together: what `new_group` returns.

    `places` has each member's, `backend` the name of its data channel. Closed by `close()`, with the session,
    or once nobody holds it, after what has been issued to it.
    """

    # It takes a group that nobody holds any more.
    _let_go: Callable[[ProcessGroup], None] | None = None

    def __init__(
        self,
        session: Session,
        number: int,
        homes: Sequence[Residence],
        backend: str,
        capabilities: Capabilities,
        timeout: float,
        close: Callable[[ProcessGroup], None],
    ) -> None:
        self.session, self.number, self.homes, self.backend = session, number, list(homes), backend
        self.capabilities, self.timeout, self._close = capabilities, timeout, close
        self.places: tuple[Place, ...] = tuple(home.place for home in homes)
        self.ranks: dict[Place, int] = {place: rank for rank, place in enumerate(self.places)}
        self.sequence = count(1).__next__
        # point_to_point.py keeps here what has been sent and not received.
        self.mail: Mail | None = None
        self.broken = ""
        self.closed = False
        # operation.py keeps here what it has compiled, by what makes operations differ.
        self.templates: dict[tuple[object, ...], dict[Node, tuple[bytes, list[object]]]] = {}
        # Operations that the caller does not wait for run on these streams.
        self.streams: dict[Place, Stream] = {}
        # These are each node's own ranks, in order: one instruction there covers all of them.
        self.own: dict[Node, list[int]] = {}
        for rank, home in enumerate(homes):
            self.own.setdefault(home.worker, []).append(rank)
        self.serial: dict[Node, Storage] = {node: Storage(NO_TENSOR) for node in self.own}
        # The greatest has been used last: see `Groups.of`.
        self.used = 0
        # Operations in it, copies or a mesh's lines, stand in these logs, in no order with its closing.
        self.unordered: Sequence[Log] = ()

    def __del__(self) -> None:
        # The group lives on until it is closed. This only appends, as the collector may run it inside any
        # lock.
        if self._let_go is not None and not self.closed:
            self._let_go(self)

    def size(self) -> int:
        """Return the number of members."""
        return len(self.places)

    def rank(self, place: Place) -> int:
        """Return the rank of a place; -1 if it is no member, as in torch."""
        return self.ranks.get(place, -1)

    @property
    def nodes(self) -> list[int]:
        """The members' nodes, by rank."""
        return [place.node for place in self.places]

    def __repr__(self) -> str:
        state = "closed, " if self.closed else "broken, " if self.broken else ""
        shown = ", ".join(map(str, self.places[:4])) + (
            f", and {self.size() - 4} more" if self.size() > 4 else ""
        )
        return f"<distruntime.distributed.ProcessGroup {self.number}, {state}{self.backend}: {shown}>"

    def close(self) -> None:
        """Close the group, after what has been issued to it.

        Return at once; `dr.distributed.destroy_process_group(group)` does the same.
        """
        self._close(self)

    def require(self) -> None:
        """Raise what using the group raises, if it cannot be used."""
        self.session.require_open()
        if self.closed:
            raise UsageError(f"{self!r} was closed; make it again: dr.distributed.new_group([...])")
        if self.broken:
            left = [place for place in self.places if self.session.nodes[place.node].failed is None]
            plain = all(place == on_node(self.session.places, place.node) for place in left)
            shown = [f"dr.place({place.node}, {place.local_device!r})" for place in left]
            members = ", ".join(str(place.node) for place in left) if plain else ", ".join(shown)
            raise NodeFailed(
                f"{self!r} cannot go on: {self.broken}. Make a group of the members that are left: "
                f"dr.distributed.new_group([{members}])"
            )
