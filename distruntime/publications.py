"""What is published, asked of the workers, and as `names()` shows it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ProtocolError, UsageError
from .handle import Place
from .node import Node
from .session import Session
from .text import size_text, table_html, table_text


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
            places = ", ".join(map(str, one.places[:4])) + (f", … {len(one.places)} in all" if len(one.places) > 4 else "")
            rows.append([one.name, one.what, size_text(one.nbytes), places, "yes" if one.shared else "no", one.owner])
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
        for version, envelope, rows in answer[1]:
            good = all(type(row[0]) is int and type(row[1]) is int and len(row) == 3 for row in rows)
            if type(version) is not int or not good:
                raise ProtocolError(f"{node} answered what makes no sense about what is published")
            self.envelopes[version], self.rows[version] = envelope, rows


def ask(session: Session, *detail: Any) -> dict[Node, list[Any]]:
    """Return each worker's answer about what is published; none of those that are lost. Block for one round trip."""
    requests = [(node, session.ask(node, "published", detail)) for node in session.nodes if node.failed is None]
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
                raise ProtocolError(f"{node} answered what makes no sense about what is published")
    return answers


def published(session: Session) -> Publications:
    """Return what the session's workers hold under names, its own first, then what others share. Block for one round trip."""
    answers = ask(session, "names")
    here: dict[str, Node] = {}
    versions: dict[tuple[str, str], dict[int, dict[str, list[Any]]]] = {}
    for node, (_, rows) in answers.items():
        for owner, identity, name, version, *rest in rows:
            here[identity] = node
            versions.setdefault((owner, name), {}).setdefault(version, {})[identity] = rest
    found = []
    for (owner, name), parts in sorted(versions.items()):
        whole = [v for v, by in parts.items() if all(row[0] in by for row in next(iter(by.values()))[2])]
        if whole:
            by = parts[max(whole)]
            shared, what = next(iter(by.values()))[:2]
            places = sorted((here[row[0]].index, device) for row in next(iter(by.values()))[2] for device in row[4])
            full = f"{owner}/{name}" if owner else name
            nbytes = sum(row[3] for row in by.values())
            found.append(Publication(full, what, nbytes, tuple(Place(*p) for p in places), shared, owner or session.name))
    return Publications(found)


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
        else (f"nothing is published as {name!r}, nor under any other name: dr.publish(name, model) gives one")
    )
    return UsageError(text + (f"; {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost, with what was there" if lost else ""))
