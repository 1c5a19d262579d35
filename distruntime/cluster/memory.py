"""`dr.memory()`: what memory the devices have, and which lines, layers and sessions hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError, without_our_frames
from ..log.handle import Place
from ..log.node import Node
from ..session.holders import Holder, held, held_by_layer
from ..session.session import Session, active_session
from ..session.spelling import living
from ..session.tables import Rows, table_html, table_text
from ..wire.deadlines import ASK
from ..wire.messages import Activity, AskActivity
from ..wire.units import size_text
from .nodes import node_info

By = Literal["line", "module", "session"]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device in bytes. This process has `values` values there, of `held` bytes.

    `allocated` and `reserved` are what torch's caching allocator has given out on a GPU and holds in all, 0
    elsewhere.
    """

    place: Place
    total: int
    free: int
    allocated: int
    reserved: int
    values: int
    held: int


@dataclass(frozen=True)
class SessionMemory:
    """What this session holds on a device of a node, or all others together do (`yours` is False), in bytes.

    `sessions` is how many they are.
    """

    node: int
    device: str
    yours: bool
    sessions: int
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """What `dr.memory` found. It prints as two tables: the devices, and who holds most.

    `left_out` counts those that the second table leaves out. `sessions` is there by="session".
    """

    devices: tuple[DeviceMemory, ...]
    lines: tuple[Holder, ...]
    left_out: int
    by: By = "line"
    sessions: tuple[SessionMemory, ...] = ()

    def _device_rows(self) -> list[list[str]]:
        cached = any(d.reserved for d in self.devices)
        rows = [
            [
                "node",
                "device",
                "total",
                "free",
                *(["allocated", "reserved"] if cached else []),
                "values",
                "held",
            ]
        ]
        for d in self.devices:
            cache = [size_text(d.allocated), size_text(d.reserved)] if cached else []
            sizes = [size_text(d.total), size_text(d.free), *cache, str(d.values), size_text(d.held)]
            rows.append([str(d.place.node), d.place.local_device, *sizes])
        return rows

    def _line_rows(self) -> list[list[str]]:
        rows = [[size_text(h.nbytes), str(h.tensors), str(h.place), h.line] for h in self.lines]
        rest = sum(d.held for d in self.devices) - sum(h.nbytes for h in self.lines)
        of_modules = self.by == "module"
        if self.left_out or (of_modules and rest):
            what = (
                f"{self.left_out} more {'layer' if of_modules else 'line'}{'s' if self.left_out > 1 else ''}"
            )
            outside = "what no module has"
            named = outside if not self.left_out else f"{what}, and {outside}" if of_modules else what
            rows.append([size_text(rest), "", "", named])
        return [["held", "tensors", "where", "layer" if of_modules else "made by"], *rows]

    def _session_rows(self) -> list[list[str]]:
        rows = [["held", "node", "device", "session"]]
        for one in self.sessions:
            others = f"{one.sessions} other session{'s' if one.sessions != 1 else ''}"
            where = [str(one.node), one.device]
            rows.append([size_text(one.nbytes), *where, "this one" if one.yours else others])
        return rows

    def _tables(self) -> list[Rows]:
        if self.by == "session":
            return [self._device_rows(), self._session_rows()]
        return [self._device_rows(), *([self._line_rows()] if self.lines else [])]

    def __repr__(self) -> str:
        return "\n\n".join(map(table_text, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(map(table_html, self._tables()))


@without_our_frames
def memory(node: int | None = None, *, top: int = 10, by: By = "line") -> Memory:
    """Return who holds the memory of a node's devices, or of every node's.

    Block for two round trips, at most 2 s a node; for three by="session".

    Values are counted as this process knows them, those included that are issued and not computed yet: each
    storage once, views with their base, under the line that made the oldest value in it. What a worker keeps
    for the backward of attention and recurrent layers is not among them.

    Args:
        node: a node's number; all nodes if left out, but for lost ones.
        top: how many lines or layers to name, the biggest first.
        by: "line" names the lines of your program that made the values. "module" names the layers of your
            modules, with their gradients and the state of their optimizers. A layer's name ends with the
            first number in its path. "session" tells what this session holds, as its workers count it, and
            what all other sessions of them do together.

    Raises:
        UsageError: `by` is something else. PlacementError: there is no such node. NodeFailed: it is lost.
    """
    if by not in get_args(By):
        raise UsageError(f'got by={by!r}, expected "line", "module" or "session"')
    session = active_session()
    asked = living(session, node)
    infos = [node_info(session, n) for n in asked]
    hollow = frozenset[tuple[int, ...]]().union(*(session.poisoned(n) for n in asked))
    lines, values = held(asked, poisoned=hollow)
    there: Counter[Place] = Counter()
    for line in lines:
        there[line.place] += line.nbytes
    devices = tuple(
        DeviceMemory(place, d.total, d.free, d.allocated, d.reserved, values[place], there[place])
        for info in infos
        for d in info.devices
        for place in [session.places.known(info.index, d.name)]
    )
    if by == "session":
        return Memory(devices, (), 0, by, sessions=_of_sessions(session, _activities(session, asked)))
    if by == "module":
        lines = held_by_layer(asked, poisoned=hollow)
    return Memory(devices, tuple(lines[:top]), max(0, len(lines) - top), by)


def _activities(session: Session, nodes: Sequence[Node]) -> list[tuple[int, Activity]]:
    """Return what workers tell of their sessions, by node. Who does not answer in time is left out."""
    asked = [(node, session.ask(node, AskActivity)) for node in nodes]
    found = []
    for node, request in asked:
        if not session.result(request, ASK.get()):
            session.requests.discard(request)
        elif request.cause is None and request.lost is None:
            found.append((node.index, request.value))
    return found


def _of_sessions(session: Session, answers: Sequence[tuple[int, Activity]]) -> tuple[SessionMemory, ...]:
    rows = []
    for node, activity in answers:
        mine = [one for one in activity.sessions if one.name == session.name]
        others = [one for one in activity.sessions if one.name != session.name]
        for yours, some in ((True, mine), (False, others)):
            devices: Counter[str] = Counter()
            for one in some:
                devices.update(one.held)
            rows += [
                SessionMemory(node, d, yours, len(some), nbytes) for d, nbytes in sorted(devices.items())
            ]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))
