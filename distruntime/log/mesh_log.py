"""The command log of a mesh: one that goes to the workers of all its members, encoded once.

To whoever issues, it is a node: the same log, templates and window, with positions of its own. What it sends is a segment of each
worker, between that worker's own. Of the logs that go to one worker only one holds unsent words at a time: see `Node.take_turn`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from ..errors import NodeFailed
from ..wire.channel import for_many
from ..wire.codec import encode
from ..wire.messages import MeshBody, OpenTeam, stream_number
from ..wire.shield import shield
from .handle import Place, Residence
from .node import Node, _enough, _Flight

WINDOW = 1 << 18  # words in flight, as a node's
_LOOKS = 8  # of the pump, a millisecond each
CHECKS = (
    1 << 40
)  # the checks of mesh k are numbered from (k + 1) times this: workers report them among their own


@dataclass(frozen=True)
class MeshPlace(Place):
    """Where a mesh's tensors live: on each of its members."""

    members: tuple[Place, ...] = ()

    def __str__(self) -> str:
        nodes = list(dict.fromkeys(place.node for place in self.members))
        return f"{len(self.members)} member{'s' if len(self.members) > 1 else ''} on node{'s' if len(nodes) > 1 else ''} {_ranges(nodes)}"


class Team(Node):
    """The members of a mesh, in its order, and the log of what all of them run.

    `ranks` has, by worker, the indices of the members there; `lanes`, by member, its worker and its number among those.
    """

    def __init__(self, session: Any, number: int, places: Sequence[Place]) -> None:
        super().__init__(-1 - number, b"", "", _never, session.lock)
        self.session, self.number = session, number
        self.members = tuple(places)
        self.ranks: dict[Node, list[int]] = {}
        self.lanes: list[tuple[Node, int]] = []
        for k, place in enumerate(places):
            node = session.nodes[place.node]
            mine = self.ranks.setdefault(node, [])
            self.lanes.append((node, len(mine)))
            mine.append(k)
        self.asynchronous = any(node.asynchronous for node in self.ranks)
        self.throttle = session.throttle
        self.stir, self.parked = session.stir, session.parked
        self.place = MeshPlace(self.index, "member", self.members)
        self.forgetters.append(partial(session.places.forget, self))
        self.along: dict[tuple[tuple[int, ...], ...], Any] = {}  # see lines.py
        self.spoken: dict[tuple[tuple[int, ...], ...], Any] = {}  # torch's groups of such rows: see mesh.py
        self._meeting, self._lines = threading.RLock(), count().__next__
        self._seen = (
            0,
            0,
            0,
        )  # by the pump: `base`, how often it was that, and the position after the last word
        self.enough = -1  # it is the turn of the workers' own logs
        self.failed = next(
            (f"has a lost member: {node} {node.failed}" for node in self.ranks if node.failed is not None),
            None,
        )
        for node, ranks in self.ranks.items():
            if node.failed is None:
                session.post(node, OpenTeam(number, [places[k].device for k in ranks]))
        with self.lock:
            for node in self.ranks:
                node.teams.append(self)
            session.teams.append(self)

    @property
    def host(self) -> str:
        """How many they are, and on which workers."""
        return str(self.place)

    def __str__(self) -> str:
        return f"the mesh of {self.place}"

    def lines_of(self, rows: list[list[int]], make: Callable[[Team, int, list[list[int]]], Any]) -> Any:
        """Return what `make` makes of these rows of members, once for all meshes of these members; anew where it has broken."""
        key = tuple(map(tuple, rows))
        found = self.along.get(key)
        if found is None or found.broken is not None:
            with self._meeting:  # a second thread may want the same ones meanwhile
                found = self.along.get(key)
                if found is not None and found.broken is not None:
                    found.close()
                    found = None
                if found is None:
                    found = self.along[key] = make(self, self._lines(), rows)
        return found

    def residence(self) -> Residence:
        """Return where its tensors live, with a number of its own."""
        found: Residence = self.session.places.entered(self.place, self)
        return found

    def on_wire(self, stream: int) -> int:
        """Return the number by which the workers know a stream of this log."""
        return stream_number(self.number, stream)

    def gathering(self) -> bool:
        """Whether more has been issued since the pump's last look, while the members are busy; 8 looks in a row at most.

        A segment costs the master 20 to 40 us for each member: one every millisecond, some 120 operators, would be 0.2 us an operator
        and member. A full one takes some 7 ms to gather.
        """
        base, looks, end = self._seen
        looks, now = looks + 1 if base == self.base else 1, self.base + len(self.log)
        self._seen = self.base, looks, now
        return bool(self.log and self.flights) and now != end and looks < _LOOKS

    def workers(self) -> list[Node]:
        """Return the members' workers that are there."""
        return [node for node in self.ranks if node.failed is None]

    def openings(self) -> list[tuple[Node, str, int]]:
        """Return, for each worker, the device on which a stream of this mesh is opened, and this mesh's number."""
        return [
            (node, self.members[ranks[0]].device, self.number)
            for node, ranks in self.ranks.items()
            if node.failed is None
        ]

    def rivals(self) -> Sequence[Node]:
        """Return the other logs that go to a worker of this one."""
        return [
            *self.ranks,
            *dict.fromkeys(team for node in self.ranks for team in node.teams if team is not self),
        ]

    def flush(self, upto: int | None = None) -> None:
        """Send what has gathered to every member's worker that is there. Never blocks."""
        with self.lock:
            if self._flushing:
                return
            if self.enough < 0 and not self.take_turn():
                return
            self._flushing = True
            try:
                order, stretches = self.order, []
                if order is not None:
                    order.settle()
                freed = self.freed
                while freed:
                    self.log.append(-freed.pop())
                log: Any = self.log
                if not log:
                    return
                workers = self.workers()
                if not workers:
                    log.clear()
                    self.lines, self._new_templates = [], []
                    return
                taken, lines = len(log), len(self.lines)
                if order is not None:
                    stretches = log.stretched(taken)
                frame = for_many(
                    encode(MeshBody(self.number, self.base, self._new_templates, log[:taken], stretches))
                )
                rest = log[taken:] if order is None else log.rest(taken)
                while order is not None and len(rest) + taken != len(
                    log
                ):  # a finalizer ran in there and issued something
                    rest = log.rest(taken)
                with shield:  # Ctrl-C between two workers would leave one without what the others have
                    whole = _Flight(0, self.lines[:lines], taken, self.base + taken, 0, self._checks, [])
                    whole.releases.append(_Part(self, len(workers)))
                    self.base += taken
                    self.log, self.lines, self._new_templates = rest, self.lines[lines:], []
                    self.flights.append(whole)
                    self._words += taken
                    self.busy = self._words > WINDOW
                    self.enough = _enough(len(self.flights))
                    for node in workers:
                        node.carry(whole, frame)
                if self.parked[0]:
                    self.stir()
            finally:
                self._flushing = False
            if self.late is not None:
                self._let_late()

    def check(self, correct: Callable[[int | None, list[Any]], None]) -> int:
        """As a node's; the members' workers bring the corrections, the first of them counts."""
        number = super().check(correct) + CHECKS * (self.number + 1)
        self.checks[number] = self.checks.pop(self._checks)
        for node in self.ranks:
            node.checks[number] = correct
        return number

    def landed(self) -> None:
        """Take note of segments that every member has run. Call under `lock`."""
        flights: deque[_Flight] = self.flights
        while flights and flights[0].releases[0].left == 0:  # type: ignore[attr-defined]
            flight = flights.popleft()
            self._words -= flight.words
            if not self.asynchronous:
                self.executed = flight.end
            for number in [n for n in self.checks if n <= CHECKS * (self.number + 1) + flight.checks]:
                self.checks.pop(number)(None, [])
                for node in self.ranks:
                    node.checks.pop(number, None)
        self.busy = self._words > WINDOW
        if self.enough >= 0:
            self.enough = _enough(len(flights))
            if self.log and len(self.log) > self.enough:
                self.flush()

    def fail(self, why: str) -> None:
        """Mark a member as lost. The others run what has been issued, and free what is let go of: their shards are there."""
        with self.lock:
            if self.failed is None:
                self.failed = why
                for drop in self.forgetters:
                    drop()
            self.flush()

    def lost_error(self) -> NodeFailed:
        """Return the error of whatever lived on all of the members."""
        return NodeFailed(
            f"{self} {self.failed}. Nothing can run on all of its members any more; the values of the others are there, t.member(k), "
            "and a new mesh of those that are left can be made: dr.init_device_mesh(...), dr.from_shards([t.member(k), ...], mesh)"
        )


class _Part:
    """Counts the workers that have not run a mesh's segment, and are there."""

    def __init__(self, team: Team, left: int) -> None:
        self.team, self.left = team, left

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.team.landed()


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("a mesh sends through its members")


def team_of(session: Any, places: Sequence[Place]) -> Team:
    """Return the log of these members, in this order, made at the first use."""
    wanted = tuple(places)
    with session.lock:
        teams: list[Team] = session.teams
        for team in teams:
            if team.members == wanted:
                return team
        return Team(session, len(teams), wanted)


def _ranges(numbers: Sequence[int]) -> str:
    """Return "0 to 3, 7" of [0, 1, 2, 3, 7]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in found)
