"""What the workers hold under names: how a master asks them, and what `names()` shows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from ..errors import ProtocolError, UsageError
from ..log.handle import Place
from ..log.node import Node
from ..session.session import Session
from ..session.tables import table_html, table_text
from ..wire.messages import DaemonRecord, FoundVersions, ListPublished, Question
from ..wire.units import size_text

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Publication:
    """One name, as `names()` shows it: what it is, its bytes, its places, and its owner, who may share it."""

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


class StoredVersions:
    """What one worker holds under a name: the envelope and the tensors of each version."""

    def __init__(self, answer: FoundVersions) -> None:
        self.identity = answer.identity
        self.envelopes = {one.version: one.envelope for one in answer.versions}
        self.tensors = {one.version: one.tensors for one in answer.versions}


def nonsense(node: Node) -> ProtocolError:
    """Return the error about an answer that cannot be."""
    return ProtocolError(f"{node} answered what makes no sense about what is published")


def ask(
    session: Session, question: Callable[Concatenate[int, P], Question[T]], *fields: P.args, **named: P.kwargs
) -> dict[Node, T]:
    """Return the answer of each worker that is not lost about what is published. Block for one round trip.

    Raise `NodeFailed` if another master has taken them all.
    """
    requests = [
        (node, session.ask(node, question, *fields, **named)) for node in session.nodes if node.failed is None
    ]
    answers: dict[Node, T] = {}
    for node, request in requests:
        session.result(request)
        if request.lost is not None and session.closed is None:
            continue
        session.raise_for(request)
        answers[node] = request.value
    for node in session.nodes if not answers else []:
        # All that is published is still there, and another master has it now.
        if node.presence.taken:
            node.require_alive()
    return answers


def published(session: Session) -> Publications:
    """Return what the session's workers hold under names: its own first, then what others share.

    Block for one round trip.
    """
    here: dict[str, Node] = {}
    # The keys are owner and name, then the version, then the daemon that has a portion of it.
    versions: dict[tuple[str, str], dict[int, dict[str, _Portion]]] = {}
    for node, listing in ask(session, ListPublished).items():
        for row in listing.rows:
            here[row.identity] = node
            of_name = versions.setdefault((_printable(row.owner), _printable(row.name)), {})
            portion = _Portion(row.shared, _printable(row.what), row.listed, row.nbytes)
            of_name.setdefault(row.version, {})[row.identity] = portion
    found = []
    for (owner, name), of_name in sorted(versions.items()):
        for _, portions in sorted(of_name.items(), reverse=True):
            first = next(iter(portions.values()))
            # The newest version that is whole is the one that a lookup finds.
            if all(daemon.identity in portions for daemon in first.daemons):
                places = sorted((here[d.identity].index, name) for d in first.daemons for name in d.devices)
                found.append(
                    Publication(
                        f"{owner}/{name}" if owner else name,
                        first.what,
                        sum(portion.nbytes for portion in portions.values()),
                        tuple(session.places.known(*place) for place in places),
                        first.shared,
                        owner or session.name,
                    )
                )
                break
    return Publications(found)


class _Portion(NamedTuple):
    """What one daemon says of its portion of a version."""

    shared: bool
    what: str
    daemons: list[DaemonRecord]
    nbytes: int


def _printable(text: str) -> str:
    """Return what another session says of itself, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:400])


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
