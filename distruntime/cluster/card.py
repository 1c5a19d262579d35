"""The card of a session: what a notebook shows of it.

Nodes and their memory, what runs, and the names that are published.
"""

from __future__ import annotations

import html

from ..errors import DistruntimeError
from ..publishing.listing import published
from ..session.session import Session
from ..session.tables import Rows, table_html
from ..wire.units import size_text, span
from .nodes import Nodes, node_info

# A card shows so many names.
_NAMES = 8


def card_html(session: Session) -> str:
    """Return the card as HTML. Block for one round trip to each node, at most 1 s."""
    head, tables, notes = _parts(session)
    texts = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return f"<div><b>{html.escape(head)}</b>{''.join(table_html(rows) for rows in tables)}{texts}</div>"


def _parts(session: Session) -> tuple[str, list[Rows], list[str]]:
    """Return the head of a card, its tables, and the lines below them."""
    name = f' "{session.name}"' if session.lasting else ""
    count = len(session.nodes)
    head = f"distruntime session{name}: {count} node{'s' if count != 1 else ''}"
    if session.closed is not None or session.foreign:
        return f"{head}, {session.closed or 'of another process'}", [], []
    found = Nodes(node_info(session, node) for node in session.nodes)
    age = max(node.welcome.age for node in session.nodes)
    notes = [f"node {node.index}: {node.why}" for node in found if node.why]
    tables: list[Rows] = [_node_rows(found)]
    try:
        rows = [one for one in published(session) if one.owner == session.name]
    except DistruntimeError as error:
        rows = []
        notes.append(f"the names are not known now: {error}")
    if rows:
        shown = [
            [one.name, one.what, size_text(one.nbytes), ", ".join(map(str, one.places[:4]))] for one in rows
        ]
        tables.append([["name", "what", "size", "where"], *shown[:_NAMES]])
    if len(rows) > _NAMES:
        notes.append(f"and {len(rows) - _NAMES} more names: dr.names()")
    notes.append(f"new tensors go to {session.places.current().place}")
    return f"{head}, begun {span(age)} before this process came" if age > 1 else head, tables, notes


def _node_rows(nodes: Nodes) -> Rows:
    rows = [["node", "host", "devices", "state", "doing", "queued", "memory free"]]
    for node in nodes:
        devices = ", ".join(device.name for device in node.devices[:8])
        free = " + ".join(size_text(d.free) for d in node.devices[: 1 if node.simulated else 8])
        known = node.doing is not None
        rows.append(
            [
                *[str(node.index), node.host, devices, node.state, node.doing or ""],
                *([str(node.queued), free] if known else ["", ""]),
            ]
        )
    return rows
