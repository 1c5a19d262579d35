"""`dr.memory()`: what memory the devices have, and which lines, layers and sessions hold it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError, without_our_frames
from ..log.handle import Place
from ..log.node import Node
from ..session.holders import Holder, held, held_by_layer
from ..session.session import Session, active_session
from ..session.tables import Rows, curve, table_html, table_text
from ..wire.deadlines import ASK
from ..wire.messages import Activity, AskActivity
from ..wire.units import size_text, span
from .nodes import node_info

By = Literal["line", "module", "session", "time"]

# A curve has so many bars.
_BARS = 40


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
class MemoryOverTime:
    """The memory that a worker's process has had of a device, oldest first: seconds ago, and bytes."""

    node: int
    device: str
    looks: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Memory:
    """What `dr.memory` found. It prints as two tables: the devices, and who holds most.

    `left_out` counts those that the second table leaves out. `sessions` is there by="session", and `history`
    by="time". By time, `lines` are those that hold more than `since` seconds ago, with what they hold more.
    """

    devices: tuple[DeviceMemory, ...]
    lines: tuple[Holder, ...]
    left_out: int
    by: By = "line"
    sessions: tuple[SessionMemory, ...] = ()
    history: tuple[MemoryOverTime, ...] = ()
    since: float | None = None

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

    def _time_rows(self) -> list[list[str]]:
        rows = [["node", "device", "for", "least", "most", "now", "the worker's memory over time"]]
        for one in self.history:
            values = [nbytes for _, nbytes in one.looks]
            sizes = [size_text(min(values)), size_text(max(values)), size_text(values[-1])]
            rows.append(
                [str(one.node), one.device, span(one.looks[0][0]), *sizes, curve(_even(one.looks), _BARS)]
            )
        return rows

    def _grown_rows(self) -> list[list[str]]:
        rows = [[size_text(h.nbytes), str(h.tensors), str(h.place), h.line] for h in self.lines]
        if self.left_out:
            rows.append(["", "", "", f"{self.left_out} more line{'s' if self.left_out > 1 else ''}"])
        return [[f"more than {span(self.since or 0.0)} ago", "tensors", "where", "made by"], *rows]

    def _parts(self) -> tuple[list[Rows], str]:
        """Return the tables, and a line below them."""
        match self.by:
            case "session":
                return [self._device_rows(), self._session_rows()], ""
            case "time":
                tables = [self._device_rows(), *([self._time_rows()] if self.history else [])]
                if self.lines:
                    return [*tables, self._grown_rows()], ""
                note = (
                    'call dr.memory(by="time") again later: it says which lines have grown since now'
                    if self.since is None
                    else f"no line holds more than {span(self.since)} ago"
                )
                return list(tables), note
        return [self._device_rows(), *([self._line_rows()] if self.lines else [])], ""

    def __repr__(self) -> str:
        tables, note = self._parts()
        return "\n\n".join([*map(table_text, tables), *([f" {note}"] if note else [])])

    def _repr_html_(self) -> str:
        tables, note = self._parts()
        return "".join(map(table_html, tables)) + (f"<p>{note}</p>" if note else "")


class _Before:
    """What each line held when `dr.memory(by="time")` was last called."""

    def __init__(self) -> None:
        # It is that session's, by its name and its identity here.
        self.session: tuple[str, int] | None = None
        self.at = 0.0
        self.held: dict[tuple[Place, str], Holder] = {}


_before = _Before()


@without_our_frames
def memory(node: int | None = None, *, top: int = 10, by: By = "line") -> Memory:
    """Return who holds the memory of a node's devices, or of every node's.

    Block for two round trips, at most 2 s a node; for three by="session" and by="time".

    Values are counted as this process knows them, those included that are issued and not computed yet: each
    storage once, views with their base, under the line that made the oldest value in it. What a worker keeps
    for the backward of attention and recurrent layers is not among them.

    Args:
        node: a node's number; all nodes if left out, but for lost ones.
        top: how many lines or layers to name, the biggest first.
        by: "line" names the lines of your program that made the values. "module" names the layers of your
            modules, with their gradients and the state of their optimizers. A layer's name ends with the
            first number in its path. "session" tells what this session holds, as its workers count it, and
            what all other sessions of them do together. "time" shows the workers' memory since they were
            started, and which lines hold more than when you last asked by="time".

    Raises:
        UsageError: `by` is something else. PlacementError: there is no such node. NodeFailed: it is lost.
    """
    if by not in get_args(By):
        raise UsageError(f'got by={by!r}, expected "line", "module", "session" or "time"')
    session = active_session()
    asked = session.living(node)
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
    if by == "time":
        history = tuple(_over_time(_activities(session, asked)))
        grown, since = _grown(session, lines)
        return Memory(devices, tuple(grown[:top]), max(0, len(grown) - top), by, history=history, since=since)
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


def _over_time(answers: Sequence[tuple[int, Activity]]) -> list[MemoryOverTime]:
    found = []
    for node, activity in answers:
        for k, device in enumerate(activity.devices):
            looks = [(one.ago, one.nbytes[k]) for one in activity.memory if k < len(one.nbytes)]
            known = tuple((ago, nbytes) for ago, nbytes in looks if nbytes is not None)
            if known:
                found.append(MemoryOverTime(node, device, known))
    return found


def _even(looks: Sequence[tuple[float, int]]) -> list[float]:
    """Return what was had at even steps of time: the looks lie further apart the longer the worker runs."""
    whole = looks[0][0]
    if whole <= 0:
        return [float(nbytes) for _, nbytes in looks]
    found, k = [], 0
    for step in range(_BARS):
        ago = whole * (1 - step / (_BARS - 1))
        while k + 1 < len(looks) and looks[k + 1][0] >= ago - 1e-9:
            k += 1
        found.append(float(looks[k][1]))
    return found


def _grown(session: Session, lines: Sequence[Holder]) -> tuple[list[Holder], float | None]:
    """Return what lines hold more than at the last look at this session, and how long ago that was."""
    now = time.monotonic()
    before, since = dict[tuple[Place, str], Holder](), None
    mine = session.name, id(session)
    if _before.session == mine:
        before, since = _before.held, now - _before.at
    held_now = {(line.place, line.line): line for line in lines}
    _before.session, _before.at, _before.held = mine, now, held_now
    if since is None:
        return [], None
    return grown(before, held_now), since


def grown(before: dict[tuple[Place, str], Holder], now: dict[tuple[Place, str], Holder]) -> list[Holder]:
    """Return what lines hold more than before, in bytes and tensors, the most first."""
    found = []
    for key, line in now.items():
        old = before.get(key)
        nbytes = line.nbytes - (0 if old is None else old.nbytes)
        if nbytes > 0:
            found.append(
                Holder(nbytes, line.tensors - (0 if old is None else old.tensors), line.place, line.line)
            )
    return sorted(found, key=lambda line: -line.nbytes)
