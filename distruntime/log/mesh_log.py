"""The command log of a mesh: one that goes to the workers of all its members, encoded once.

To whoever issues, it is a log like a worker's, with templates, a window and positions of its own. What it
sends becomes a segment of each worker, between that worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol, TypeVar, final

from ..errors import NodeFailed
from ..wire.channel import for_many
from ..wire.codec import encode
from ..wire.link import Delivery, Part
from ..wire.messages import MeshBody, MeshSegment, Message, OpenMesh, Plain, stream_number
from ..wire.shield import RLock, shield
from .handle import Place, Residence
from .log import Log, Signatures
from .node import Node, NodeOwner
from .progress import go_on, land
from .segment import Flight
from .total_order import TotallyOrdered

# The pump leaves a log alone for so many looks in a row, of a millisecond each.
_LOOKS = 8
# The predictions of mesh k are numbered from (k + 1) times this: workers report them among their own.
CHECKS = 1 << 40


class MeshPlaces(Signatures, Protocol):
    """The places of a session, as a mesh needs them."""

    def entered(self, place: Place, log: Log) -> Residence:
        """Return the place of a mesh in use, numbered."""

    def residence(self, place: Place, numbered: bool = True) -> Residence:
        """Return the place of a node's device in use."""


class MeshOwner(NodeOwner, TotallyOrdered, Protocol):
    """What a mesh's log needs of its session besides."""

    meshes: list[MeshLog]
    # They hear of each new mesh.
    on_mesh: list[Callable[[MeshLog], None]]

    @property
    def places(self) -> MeshPlaces:
        """The places of its workers and meshes."""

    def post(self, node: Node, message: Message) -> Delivery:
        """Send one message without payload to a worker."""


class Rows(Protocol):
    """The groups of a mesh's members along dimensions."""

    def __init__(self, mesh_log: MeshLog, number: int, rows: Sequence[Sequence[int]]) -> None: ...

    @property
    def broken(self) -> str | None:
        """Why they cannot be used any more, or None while they can."""

    def close(self) -> None:
        """Close them, after what has been issued. Return at once."""


R = TypeVar("R", bound=Rows)


@final
class MeshLog(Log):
    """The members of a mesh, in its order, and the log of what all of them run.

    `ranks` has, by worker, the indices of the members there; `lanes`, by member, its worker and its number
    among those.
    """

    session: MeshOwner
    members: tuple[Place, ...]

    def __init__(self, session: MeshOwner, number: int, places: Sequence[Place]) -> None:
        # The workers' own logs are active.
        super().__init__(
            session, -1 - number, self._compose, self._send_to_all, active=False, checks=CHECKS * (number + 1)
        )
        self.number = number
        self.members = tuple(places)
        self.ranks: dict[Node, list[int]] = {}
        self.lanes: list[tuple[Node, int]] = []
        for k, place in enumerate(places):
            node = session.nodes[place.node]
            mine = self.ranks.setdefault(node, [])
            self.lanes.append((node, len(mine)))
            mine.append(k)
        self.asynchronous = any(node.asynchronous for node in self.ranks)
        self.place = Place(self.index, "member", members=self.members)
        # These are the members' groups along dimensions, by their rows.
        self.lines: dict[tuple[tuple[int, ...], ...], Rows] = {}
        self._making, self._lines_numbers = RLock(), count().__next__
        # These are torch's groups of such rows: see mesh.py.
        self.torch_groups: dict[tuple[tuple[int, ...], ...], object] = {}
        # The pump saw these at its last look: `base`, how often it was that, and the position after the last
        # word.
        self._seen = (0, 0, 0)
        lost = [node for node in self.ranks if node.failed is not None]
        if lost:
            self.failed = f"has a lost member: {lost[0]} {lost[0].failed}"
        self.deserted = len(lost) == len(self.ranks)
        for node, ranks in self.ranks.items():
            if node.failed is None:
                session.post(node, OpenMesh(number, [places[k].local_device for k in ranks]))
        with self.lock:
            for node in self.ranks:
                node.meshes.append(self)
            session.meshes.append(self)
            for callback in session.on_mesh:
                callback(self)

    def _compose(
        self, _: int, start: int, templates: list[Plain], words: list[Plain], stretches: list[list[int]]
    ) -> MeshBody:
        return MeshBody(self.number, start, templates, words, stretches)

    @property
    def host(self) -> str:
        """How many they are, and on which workers."""
        return str(self.place)

    @property
    def simulated(self) -> bool:
        """Whether the GPUs of all its workers are simulated ones."""
        return all(node.simulated for node in self.ranks)

    def __str__(self) -> str:
        return f"the mesh of {self.place}"

    def lines_of(self, rows: list[list[int]], make: type[R]) -> R:
        """Return the groups of these rows of members, of the class `make`, once for all meshes of them.

        Where it has broken, it is made anew.
        """
        key = tuple(map(tuple, rows))
        found = self.lines.get(key)
        if not isinstance(found, make) or found.broken is not None:
            # A second thread may want the same ones meanwhile.
            with self._making:
                found = self.lines.get(key)
                if found is not None and found.broken is not None:
                    found.close()
                    found = None
                if not isinstance(found, make):
                    found = self.lines[key] = make(self, self._lines_numbers(), rows)
        return found

    def residence(self) -> Residence:
        """Return where its tensors live, with a number of its own."""
        return self.session.places.entered(self.place, self)

    def stream_on_wire(self, stream: int) -> int:
        """Return the number by which the workers know a stream of this log."""
        return stream_number(self.number, stream)

    def gathering(self) -> bool:
        """Whether more has been issued since the pump's last look, while the members are busy.

        It says so 8 times in a row at most. A segment costs the master 20 to 40 us for each member. One every
        millisecond, some 120 operators, would cost 0.2 us an operator and member. A full one takes some 7 ms
        to gather.
        """
        base, looks, end = self._seen
        looks, now = looks + 1 if base == self.base else 1, self.base + len(self.words)
        self._seen = self.base, looks, now
        return bool(self.words and self.flights) and now != end and looks < _LOOKS

    def workers(self) -> list[Node]:
        """Return the members' workers that are there."""
        return [node for node in self.ranks if node.failed is None]

    def openings(self) -> list[tuple[Node, str, int]]:
        """Return for each worker: itself, the device where it opens a stream of this mesh, and the mesh."""
        return [
            (node, self.members[self.ranks[node][0]].local_device, self.number) for node in self.workers()
        ]

    def siblings(self) -> Sequence[Log]:
        """Return the logs of its workers, and of the other meshes with a member there."""
        others = dict.fromkeys(mesh for node in self.ranks for mesh in node.meshes if mesh is not self)
        return [*self.ranks, *others]

    def _send_to_all(self, frames: Sequence[Part], *, copy: bool) -> None:
        """Send the segment that was made last to every member's worker; those that are lost count as done."""
        body, whole = frames[0], self.flights[-1]
        assert isinstance(body, bytes)
        frame = for_many(body)
        # Ctrl-C between two workers would leave one without what the others have. Ctrl-C acts when the shield
        # ends, and by then the segment is sent.
        with shield:
            releases: list[Callable[[], None]] = [partial(self._ran, whole)]
            whole.waiting = len(self.ranks)
            # Workers that are in the same meshes, and in no other work, have the same numbers.
            by_number: dict[int, list[Node]] = {}
            # Most workers share one part. One of its own for each took a third of this loop.
            parts: dict[tuple[int, int, int], Flight[Log]] = {}
            for node in self.ranks:
                number = node.carry(self, whole.line_table, releases, parts)
                by_number.setdefault(number, []).append(node)
            # These workers are lost.
            by_number.pop(0, None)
            for number, nodes in by_number.items():
                head = encode(MeshSegment(number))
                deliveries = self.session.channel.send_to_all([node.link for node in nodes], [head, frame])
                for node, delivery in zip(nodes, deliveries):
                    node.outlet.last = delivery
            self.outlet.unsent = None

    def _ran(self, whole: Flight[Log]) -> None:
        """Take note that a worker has run a segment, or is lost. Called under `lock`."""
        whole.waiting -= 1
        if whole.waiting == 0:
            while self.flights and self.flights[0].waiting == 0:
                land(self, self.flights.popleft())
            go_on(self)

    def fail(self, why: str) -> None:
        """Mark a member as lost.

        The others run what has been issued, and free what is let go of: their shards are there.
        """
        with self.lock:
            self.deserted = not self.workers()
            if self.failed is None:
                self.failed = why
                self.session.places.forget(self)
            self.flush()

    def lost_error(self) -> NodeFailed:
        """Return the error of whatever lived on all of the members."""
        return NodeFailed(
            f"{self} {self.failed}. No operation can run on all of its members any more. t.member(k) still "
            "gives the value of another member. Make a new mesh of those that are left: "
            "dr.init_device_mesh(...), dr.from_shards([t.member(k), ...], mesh)"
        )


def mesh_log_of(session: MeshOwner, places: Sequence[Place]) -> MeshLog:
    """Return the log of these members, in this order, made at the first use."""
    wanted = tuple(places)
    with session.lock:
        for mesh in session.meshes:
            if mesh.members == wanted:
                return mesh
        return MeshLog(session, len(session.meshes), wanted)


def workers_of(log: Log) -> list[Node]:
    """Return the workers that run a log and are there."""
    assert isinstance(log, (Node, MeshLog))
    return log.workers()
