"""What is published, asked of the workers, and as `names()` shows it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError, UsageError
from ..log.handle import Place
from ..log.node import Node
from ..session.session import Session
from ..session.tables import table_html, table_text
from ..wire.units import size_text


@dataclass(frozen=True)
class Publication:
    """One name, as `names()` shows it: what it is, its bytes, where it lives, whether other sessions may read it, whose it is."""

    name: str
    what: str
    nbytes: int
    places: tuple[Place, ...]
    shared: bool
    owner: str


class Publications(tuple[Publication, ...]):
    """What is published; prints as a table."""

    __slots__ = ()

    def _rows(self) -> list[list[str]]:
        rows = [["name", "what", "bytes", "places", "shared", "owner"]]
        for one in self:
            places = ", ".join(map(str, one.places[:4])) + (
                f", … {len(one.places)} in all" if len(one.places) > 4 else ""
            )
            rows.append(
                [one.name, one.what, size_text(one.nbytes), places, "yes" if one.shared else "no", one.owner]
            )
        return rows

    def __repr__(self) -> str:
        return table_text(self._rows()) if self else "nothing is published"

    def _repr_html_(self) -> str:
        return table_html(self._rows())


class Found:
    """What one worker has found under a name: of each version the envelope and [[tensor, memory, spec or None, device], ...]."""

    def __init__(self, node: Node, answer: list[Any]) -> None:
        self.identity: str = answer[0]
        self.envelopes: dict[int, bytes] = {}
        self.rows: dict[int, list[list[Any]]] = {}
        try:
            for version, envelope, rows in answer[1]:
                if not all(
                    type(number) is int
                    for number in (version, *(n for tensor, memory, _ in rows for n in (tensor, memory)))
                ):
                    raise TypeError
                self.envelopes[version], self.rows[version] = envelope, rows
        except (TypeError, ValueError):
            raise nonsense(node) from None


def nonsense(node: Node) -> ProtocolError:
    """Return the error about an answer that cannot be."""
    return ProtocolError(f"{node} answered what makes no sense about what is published")


def ask(session: Session, *detail: Any) -> dict[Node, list[Any]]:
    """Return each worker's answer about what is published; none of those that are lost. Block for one round trip."""
    requests = [
        (node, session.ask(node, "published", detail)) for node in session.nodes if node.failed is None
    ]
    answers: dict[Node, list[Any]] = {}
    for node, request in requests:
        session.result(request)
        if request.lost is not None and session.closed is None:
            continue
        session.raise_for(request)
        match request.value:
            case [str(), _]:
                answers[node] = request.value
            case _:
                raise nonsense(node)
    return answers


def published(session: Session) -> Publications:
    """Return what the session's workers hold under names, its own first, then what others share. Block for one round trip."""
    here: dict[str, Node] = {}
    versions: dict[tuple[str, str], dict[int, dict[str, tuple[bool, str, list[Any], int]]]] = {}
    for node, (_, rows) in ask(session, "names").items():
        try:
            for owner, identity, name, version, shared, what, listed, nbytes in rows:
                here[identity] = node
                part = (
                    bool(shared),
                    _plain(what),
                    [(str(row[0]), [str(device) for device in row[4]]) for row in listed],
                    int(nbytes),
                )
                versions.setdefault((_plain(owner), _plain(name)), {}).setdefault(int(version), {})[
                    str(identity)
                ] = part
        except (TypeError, ValueError, IndexError):
            raise nonsense(node) from None
    found = []
    for (owner, name), parts in sorted(versions.items()):
        for _, by in sorted(parts.items(), reverse=True):
            shared, what, listed, _ = next(iter(by.values()))
            if all(identity in by for identity, _ in listed):
                places = sorted(
                    (here[identity].index, device) for identity, devices in listed for device in devices
                )
                full, nbytes = f"{owner}/{name}" if owner else name, sum(part[3] for part in by.values())
                found.append(
                    Publication(
                        full, what, nbytes, tuple(Place(*p) for p in places), shared, owner or session.name
                    )
                )
                break
    return Publications(found)


def _plain(text: Any) -> str:
    """Return what another session says of itself, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:400])


def unknown(session: Session, name: str, nodes: Iterable[Node]) -> UsageError:
    """Return the error about a name that is not there: it lists those that are, the most alike first."""
    have = [one.name for one in published(session)]
    alike = difflib.get_close_matches(name, have, n=3, cutoff=0.5)
    names = [*alike, *(one for one in have if one not in alike)]
    shown = ", ".join(names[:20]) + (f", … {len(names)} in all" if len(names) > 20 else "")
    lost = [str(node) for node in nodes if node.failed is not None]
    text = (
        f"nothing is published as {name!r}: there {'is' if len(names) == 1 else 'are'} {shown}"
        if names
        else (
            f"nothing is published as {name!r}, nor under any other name: dr.publish(name, model) gives one"
        )
    )
    return UsageError(
        text
        + (
            f"; {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost, with what was there"
            if lost
            else ""
        )
    )
