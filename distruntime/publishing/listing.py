"""What the workers hold under names: how a master asks them, and what `names()` shows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ProtocolError, UsageError
from ..log.handle import Place
from ..log.node import Node
from ..session.session import Session
from ..session.tables import table_html, table_text
from ..wire.units import size_text


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


class DaemonRecord(NamedTuple):
    """A daemon that has tensors of a publication.

    `node` is its number in the session that has published them.
    """

    identity: str
    node: int
    host: str
    pid: int
    devices: list[str]


def daemons_from(rows: list[object]) -> list[DaemonRecord] | None:
    """Return the daemons that rows of a message stand for; None if some row stands for none."""
    found = []
    for row in rows:
        match row:
            case [str(identity), int(node), str(host), int(pid), list(devices)]:
                found.append(DaemonRecord(identity, node, host, pid, [str(name) for name in devices]))
            case _:
                return None
    return found


class Answer(NamedTuple):
    """A worker's answer: which daemon has what was asked about, and what it says of that."""

    identity: str
    content: object


class StoredTensor(NamedTuple):
    """A published tensor as its worker lists it. `spec` is None if the worker has no tensor there."""

    tensor: int
    memory: int
    spec: list[object] | None


class StoredVersions:
    """What one worker holds under a name: the envelope and the tensors of each version."""

    def __init__(self, node: Node, answer: Answer) -> None:
        self.identity = answer.identity
        self.envelopes: dict[int, bytes] = {}
        self.tensors: dict[int, list[StoredTensor]] = {}
        for row in rows_of(node, answer.content):
            match row:
                case [int(version), bytes(envelope), list(rows)] if type(version) is int:
                    self.envelopes[version] = envelope
                    self.tensors[version] = [_stored(node, fields) for fields in rows]
                case _:
                    raise nonsense(node)


def _stored(node: Node, fields: object) -> StoredTensor:
    match fields:
        case [int(tensor), int(memory), (None | list()) as spec] if type(tensor) is type(memory) is int:
            return StoredTensor(tensor, memory, spec)
    raise nonsense(node)


def nonsense(node: Node) -> ProtocolError:
    """Return the error about an answer that cannot be."""
    return ProtocolError(f"{node} answered what makes no sense about what is published")


def rows_of(node: Node, content: object) -> list[object]:
    """Return the rows of an answer; raise `ProtocolError` if it has none."""
    if not isinstance(content, list):
        raise nonsense(node)
    return content


def ask(session: Session, *detail: object) -> dict[Node, Answer]:
    """Return the answer of each worker that is not lost about what is published. Block for one round trip."""
    requests = [
        (node, session.ask(node, "published", detail)) for node in session.nodes if node.failed is None
    ]
    answers: dict[Node, Answer] = {}
    for node, request in requests:
        session.result(request)
        if request.lost is not None and session.closed is None:
            continue
        session.raise_for(request)
        match request.value:
            case [str(identity), content]:
                answers[node] = Answer(identity, content)
            case _:
                raise nonsense(node)
    return answers


def published(session: Session) -> Publications:
    """Return what the session's workers hold under names: its own first, then what others share.

    Block for one round trip.
    """
    here: dict[str, Node] = {}
    # The keys are owner and name, then the version, then the daemon that has a portion of it.
    versions: dict[tuple[str, str], dict[int, dict[str, _Portion]]] = {}
    for node, answer in ask(session, "names").items():
        for row in rows_of(node, answer.content):
            match row:
                case [
                    str(owner),
                    str(identity),
                    str(name),
                    int(version),
                    bool(shared),
                    str(what),
                    list(listed),
                    int(nbytes),
                ] if (daemons := daemons_from(listed)) is not None:
                    here[identity] = node
                    of_name = versions.setdefault((_printable(owner), _printable(name)), {})
                    portion = _Portion(shared, _printable(what), daemons, nbytes)
                    of_name.setdefault(version, {})[identity] = portion
                case _:
                    raise nonsense(node)
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
                        tuple(Place(*place) for place in places),
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
