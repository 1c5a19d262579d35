"""`dr.nodes()`: what workers a session has, as data and as a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import without_our_frames
from ..log.handle import Place
from ..log.node import Node
from ..log.progress import queued
from ..session.session import Session, active_session
from ..session.tables import table_html, table_text
from ..wire.deadlines import ASK
from ..wire.messages import AskWorker, SessionRow
from ..wire.units import operator_text, size_text


@dataclass(frozen=True)
class Device:
    """A device of a node. `number` is that of `remote:k`, if the place has one; memory is in bytes.

    Of a GPU also its compute capability ("9.0"), what torch's caching allocator has given out there and holds
    in all, and its uuid: two workers whose devices have one uuid share a card. The free memory of a GPU that
    its worker has not used may be more than there is, as only NVIDIA's Python package tells it without a
    context. `lacks` names the dtypes that it cannot compute in, as far as torch says so. `busy` is how much
    of the last second a GPU ran kernels, in percent, and None where nobody knows.
    """

    name: str
    number: int | None
    description: str
    total: int
    free: int
    capability: str
    allocated: int
    reserved: int
    uuid: str = ""
    lacks: tuple[str, ...] = ()
    busy: float | None = None


@dataclass(frozen=True)
class NodeInfo:
    """A worker as `dr.nodes()` shows it. `round_trip` is in seconds, memory in bytes.

    `state` is "ready", "busy", "unreachable" (for now), "lost", "left" (it said goodbye), or "connecting"
    (lost, and another worker has been started or asked for in its place); `why` says how it came to the last
    four.
    """

    index: int
    host: str
    pid: int
    address: str
    devices: tuple[Device, ...]
    simulated: bool
    torch: str
    python: str
    round_trip: float
    state: str
    why: str = ""
    doing: str | None = None
    queued: int | None = None
    sessions: int | None = None
    processor: float | None = None


class Nodes(tuple[NodeInfo, ...]):
    """The nodes of a session; prints as a table."""

    __slots__ = ()

    def _rows(self) -> list[list[str]]:
        rows = [["node", "host", "pid", "state", "devices", "memory free", "torch", "python", "round trip"]]
        for node in self:
            names = ", ".join(
                d.name if d.number is None else f"{d.name} (remote:{d.number})" for d in node.devices[:8]
            )
            if len(node.devices) > 8:
                names += f", … {len(node.devices)} in all"
            if node.simulated:
                names += ", GPUs simulated"
            if node.state in ("ready", "busy"):
                free = size_text(node.devices[0].free) if node.devices else ""
                real = [size_text(d.free) for d in node.devices[1:8]] if not node.simulated else []
                trip = f"{node.round_trip * 1e3:.2f} ms"
            else:
                free, real, trip = "", [], ""
            rows.append(
                [
                    str(node.index),
                    node.host,
                    str(node.pid),
                    node.state,
                    names,
                    " + ".join([free, *real]),
                    node.torch,
                    node.python,
                    trip,
                ]
            )
        cards = [_cards(node) for node in self]
        # Only clusters with GPUs have this column.
        if any(cards):
            for row, text in zip(rows, ["GPUs", *cards]):
                row.insert(5, text)
        return rows

    def __repr__(self) -> str:
        why = [f" node {node.index}: {node.why}" for node in self if node.why]
        looks = self._looks()
        return "\n".join([table_text(self._rows()), *([table_text(looks)] if looks else []), *why])

    def _repr_html_(self) -> str:
        looks = self._looks()
        return table_html(self._rows()) + (table_html(looks) if looks else "")

    def _looks(self) -> list[list[str]]:
        """Return what the nodes do, a row for each; nothing where no node was asked."""
        if all(node.doing is None for node in self):
            return []
        gpus = any(device.busy is not None for node in self for device in node.devices)
        head = ["node", "address", "doing", "queued", "sessions", "CPU", *(["GPU"] if gpus else [])]
        return [head, *(_look(node, gpus) for node in self)]


def _look(node: NodeInfo, gpus: bool) -> list[str]:
    known = node.doing is not None
    return [
        str(node.index),
        node.address,
        node.doing or "",
        str(node.queued) if known else "",
        str(node.sessions) if known else "",
        percent(node.processor),
        *([", ".join(percent(d.busy) for d in node.devices if d.busy is not None)] if gpus else []),
    ]


def percent(share: float | None) -> str:
    """Return "98 %", and nothing where nobody knows."""
    return "" if share is None else f"{share:.0f} %"


def doing(sessions: Sequence[SessionRow], name: str | None = None) -> str:
    """Return what a worker runs: "aten.mm for 0.6 s", and whose that is unless it is session `name`."""
    running = [row for row in sessions if row.running is not None]
    running.sort(key=lambda row: row.name != name)
    if not running:
        return "nothing"
    operator = operator_text(str(running[0].running))
    whose = "" if running[0].name == name else f" (session {running[0].name})"
    return f"{operator} for {running[0].seconds:.1f} s{whose}"


def _cards(node: NodeInfo) -> str:
    """Return "8 × NVIDIA H200 (9.0, 139.8 GiB)" of a node's GPUs, equal ones together."""
    kinds = Counter(
        (d.description, d.capability, d.total, d.lacks) for d in node.devices if d.capability or d.lacks
    )
    texts = []
    for (name, capability, total, lacks), count in kinds.items():
        about = [*([capability] if capability else []), size_text(total), *(f"no {dtype}" for dtype in lacks)]
        texts.append(f"{count} × {name} ({', '.join(about)})")
    return ", ".join(texts)


@without_our_frames
def nodes() -> Nodes:
    """Return the session's nodes with fresh figures. Block for one round trip, at most 1 s."""
    session = active_session()
    return Nodes(node_info(session, node) for node in session.nodes)


def nodes_table(session: Session) -> str:
    """Return the table from what the workers said when they joined."""
    return repr(Nodes(node_info(session, node, fresh=False) for node in session.nodes))


def node_info(session: Session, node: Node, fresh: bool = True) -> NodeInfo:
    """Return what is known of one node. Block for one round trip, at most 1 s, for `fresh` figures.

    Otherwise they are those from when the worker joined.
    """
    welcome = node.welcome
    assert welcome is not None
    devices, report = welcome.devices, None
    if fresh and node.failed is None and node.presence.absence is None:
        started = time.perf_counter()
        # The second answer comes with the first.
        status = session.ask_status(node)
        asked = session.ask(node, AskWorker)
        if session.result(asked, ASK.get()) and asked.lost is None and asked.cause is None:
            node.round_trip = time.perf_counter() - started
            report = asked.value
            devices = report.devices
        else:
            session.requests.discard(asked)
            session.requests.discard(status)
    busy = report.busy if report is not None else [None] * len(devices)
    rows = tuple(
        Device(
            row.name,
            session.places.number_of(Place(node.index, row.name)),
            *row[1:8],
            lacks=tuple(row.lacks),
            busy=share,
        )
        for row, share in zip(devices, busy)
    )
    return NodeInfo(
        node.index,
        welcome.host,
        welcome.pid,
        node.address,
        rows,
        welcome.simulated,
        welcome.torch,
        welcome.python,
        node.round_trip,
        node.state,
        node.failed or (node.presence.absence.text if node.presence.absence is not None else ""),
        *(
            (doing(report.sessions, session.name), queued(node), len(report.sessions), report.processor)
            if report is not None
            else ()
        ),
    )
