"""Publishing: names for what is to outlive this process, or to be shared with others; and what was published, back as it was.

Tensors stay where they are; what travels is the structure around them, signed by whoever has published it. A version of a name is whole
when every daemon that it lists has it, and a lookup takes the highest that is: a master that dies half-way leaves the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from ..errors import ProtocolError, UntrustedError, UsageError
from ..log.handle import Handle, Place, Storage, next_ref
from ..log.issue import issue_default
from ..log.line import user_line
from ..log.node import Node
from ..log.read_only import ReadOnlyStorage
from ..log.spec import Spec, spec_from_wire
from ..operators.proxies import wrap
from ..session.session import Session, active_session
from ..session.spelling import named
from ..tensors.tensor import DistributedTensor
from ..wire.messages import ADOPT, PUBLISH
from .envelope import Opened, open_envelope, seal
from .known import Key, Known, known_of
from .listing import Found, Publications, ask, nonsense, published, unknown
from .structure import described, dump, load, pack_local, unpack_local

_LONGEST = 200  # characters of a name
# So often a lookup asks the workers again, where somebody has given the name anew while they were asked.
_TRIES = 20
_token = count(1).__next__


def names() -> Publications:
    """Return what is published: this session's own, and what other sessions share on its workers. Block for one round trip."""
    return published(active_session())


def publish(name: str, thing: Any, *, shared: bool = False, copy: bool = False) -> None:
    """Give a name to a module, an optimizer, or a tree of them and of remote tensors. Block until its workers have got there.

    The tensors stay where they are, and stay in use: what is done to them in place later, a lookup sees. A name that is taken is given
    anew, on all nodes at once.

    Args:
        name: at most 200 characters, without "/".
        shared: let other sessions on its workers look it up, as "owner/name", to read it; the owner is `session.name`.
        copy: publish a copy as of now, which later training does not change.

    Raises:
        UsageError: there is a local tensor in it, or what cannot be pickled. NodeFailed: a node of it is lost. Whatever an operation
            failed with: a tensor of it is poisoned, and nothing is published.
    """
    _check_name(name)
    session = active_session()
    structure = dump(thing, lambda device: _place_of(session, device))
    leaves = _copies(structure.leaves) if copy else structure.leaves
    remote = [leaf for leaf in leaves if type(leaf) is DistributedTensor]
    _check_remote(name, thing, remote)
    places = [leaf._handle.place.place if type(leaf) is DistributedTensor else leaf for leaf in leaves]
    nodes = [
        session.nodes[k] for k in dict.fromkeys(place.node for place in places if isinstance(place, Place))
    ]
    known = known_of(session)
    with known.lock:
        known.sweep()
        answers = ask(session, "versions", name)
        for node in nodes:
            node.require_alive()
        version = 1 + max(
            (number for node, answer in answers.items() for number in _numbers(node, answer[1])), default=0
        )
        own: dict[Node, list[Any]] = {node: [] for node in nodes}
        packed = [_packed(session, leaf, own) for leaf in leaves]
        listed = [
            [answers[node][0], node.index, *_process(node), sorted({t.place.device for t in own[node]})]
            for node in nodes
        ]
        envelope = seal(session.name, name, version, listed, packed, structure.pickled)
        before = known.pinned.get(name, [])
        pinned = [leaf._handle.storage for leaf in remote]
        known.pinned[name] = [*before, *pinned]
        try:
            numbers = _issue(session, [name, version, shared, described(thing), listed, envelope], own)
        except Exception:  # not Ctrl-C: then it may be published all the same
            known.pinned[name] = before
            ask(session, "drop", name, version)
            raise
        for node, tensors in own.items():
            identity = answers[node][0]
            for leaf, (tensor, memory) in zip(tensors, numbers[node]):
                known.note((identity, tensor), (identity, memory), leaf)
        known.pinned[name], known.homes[name] = pinned, nodes
        ask(session, "settle", name, version)


def unpublish(name: str) -> None:
    """Take a name away. What it stood for lives on where somebody holds it, readers in other sessions too. Block for one round trip.

    Raises:
        UsageError: there is no such name among the session's own.
    """
    _check_name(name)
    session = active_session()
    known = known_of(session)
    with known.lock:
        dropped = ask(session, "drop", name, 0)
        known.pinned.pop(name, None)
        homes = known.homes.pop(name, [])
        known.sweep()
    if not any(answer[1] for answer in dropped.values()) and not homes:
        raise unknown(session, name, session.nodes)


def _numbers(node: Node, found: Any, shape: Any = int) -> Any:
    """Return a list of what `shape` says, if a worker has sent one."""
    if not isinstance(found, list) or not all(
        type(n) is int if shape is int else [type(k) for k in n] == shape for n in found
    ):
        raise nonsense(node)
    return found


def _check_name(name: Any, most: int = _LONGEST) -> None:
    if not isinstance(name, str) or not name or len(name) > most or not name.isprintable():
        raise UsageError(f"a name is a text of 1 to {most} printable characters, got {name!r:.220}")
    if most == _LONGEST and "/" in name:
        raise UsageError(f'a name has no "/" in it, as "owner/name" is what others look up; got {name!r}')


def _check_remote(name: str, thing: Any, remote: Sequence[Any]) -> None:
    if not remote:
        raise UsageError(
            f"there is no remote tensor in what is to be published as {name!r} (of class {type(thing).__name__}): send it first, "
            '.to("remote")'
        )
    for tensor in remote:
        storage, node = tensor._handle.storage, tensor._handle.place.node
        if type(storage) is ReadOnlyStorage:
            raise UsageError(
                f"{name!r} would hold a tensor of {storage.name!r}, which is another session's: publish a copy, copy=True"
            )
        node.session.require_open()
        node.require_alive()


def _place_of(session: Session, device: torch.device) -> Place | None:
    # A bare "remote" is the current place, wherever it is read again.
    home = named(session.places, device) if device.index else None
    return None if home is None or home.node.members else home.place


def _process(node: Node) -> list[Any]:
    welcome = node.welcome
    assert welcome is not None
    return [welcome.host, welcome.pid]


def _packed(session: Session, leaf: Any, own: dict[Node, list[Any]]) -> list[Any]:
    """Return one leaf as it travels; a remote one joins its node's."""
    nodes = list(own)
    if isinstance(leaf, Place):
        return ["place", nodes.index(session.nodes[leaf.node]), leaf.device]
    if type(leaf) is not DistributedTensor:
        return ["local", *pack_local(leaf)]
    home = leaf._handle.place
    own[home.node].append(leaf)
    flags = bool(leaf.requires_grad), bool(getattr(leaf, "_is_param", False))
    return [
        "remote",
        nodes.index(home.node),
        len(own[home.node]) - 1,
        home.place.device,
        leaf._handle.spec.wire(),
        *flags,
    ]


def _issue(session: Session, fields: list[Any], own: dict[Node, list[Any]]) -> dict[Node, list[Any]]:
    """Have the workers keep their tensors, all at one moment of the program; return the numbers by which they know them."""
    line, requests = user_line(), {}
    with session.lock:
        for node, tensors in own.items():
            requests[node] = session.requests.new(node, "published")
            handles = [leaf._handle for leaf in tensors]
            issue_default(
                [PUBLISH, requests[node].number, fields, [h.ref for h in handles]], (), handles, node, line
            )
            node.flush()
    for request in requests.values():  # all, so that what comes after a failure finds no worker half-way
        session.result(request)
    for node, request in requests.items():
        session.raise_for(request)
        if len(_numbers(node, request.value, [int, int])) != len(own[node]):
            raise nonsense(node)
    return {node: request.value for node, request in requests.items()}


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with copies of the remote tensors, in the order of the log; copies of views share memory as the views do."""
    sharing: dict[int, list[Any]] = {}
    for leaf in leaves:
        if type(leaf) is DistributedTensor:
            sharing.setdefault(id(leaf._handle.storage), []).append(leaf)
    twins: dict[int, Any] = {}
    with torch.no_grad():
        for views in sharing.values():
            spec: Spec = views[0]._handle.spec
            if len(views) == 1 or any(v.dtype != spec.dtype or v._handle.spec.bits for v in views):
                twins.update((id(v), v.detach().clone()) for v in views)
                continue
            length = max(v._handle.spec.extent for v in views) // spec.dtype.itemsize
            flat = views[0].detach().as_strided((length,), (1,), 0).clone()
            twins.update((id(v), flat.as_strided(v.size(), v.stride(), v.storage_offset())) for v in views)
    for leaf in leaves:
        if id(leaf) in twins:
            twin = twins[id(leaf)].requires_grad_(leaf.requires_grad)
            twin.__dict__.update((key, value) for key, value in leaf.__dict__.items() if key != "_handle")
    return [twins.get(id(leaf), leaf) for leaf in leaves]


# -- back ------------------------------------------------------------------------------------------------------------------------


def lookup(name: str) -> Any:
    """Return what was published under a name: modules as modules, ties and views as they were. Block for one round trip.

    One tensor of a worker is one object here, in whatever it was published and however often it is looked up. "owner/name" is what
    another session shares: to be read, not written.

    Raises:
        UsageError: there is no such name, or its tensors have changed their shapes since. UntrustedError: it is signed neither by you
            nor by somebody whom you trust. NodeFailed: some of it was on a node that is lost.
    """
    _check_name(name, 2 * _LONGEST)
    session = active_session()
    owner, _, own_name = name.rpartition("/")
    foreign = owner not in ("", session.name)
    known = known_of(session)
    with known.lock:
        known.sweep()
        for _ in range(_TRIES):
            with suppress(_Replaced):
                return _look(session, known, name, owner, own_name, foreign)
    raise UsageError(
        f"{name!r} is not whole: it is being given anew all the time, or who published it died half-way. "
        "Look it up again, or publish it again"
    )


def _look(session: Session, known: Known, name: str, owner: str, own_name: str, foreign: bool) -> Any:
    """Return what is published, by one round of answers; raise `_Replaced` where it was given anew between two of them."""
    token, waiting = _token(), [node for node in session.nodes if node.failed is None]
    try:
        answers = ask(session, "find", owner if foreign else "", own_name, token)
        found = {node: Found(node, answer) for node, answer in answers.items()}
        opened, nodes = _newest(session, known, name, owner if foreign else session.name, own_name, found)
        adoption = _Adoption(session, known, name if foreign else None, opened.version, nodes, found)
        leaves = [adoption.leaf(kind, fields) for kind, *fields in opened.leaves]
        adoption.issue(token)
        waiting = [node for node in waiting if node not in nodes]
    finally:  # workers hold what they have found until they hear of it
        for node in waiting:
            issue_default([ADOPT, token, 0, []], (), (), node, user_line())
    if not foreign:
        known.pinned[own_name] = [leaf._handle.storage for leaf in leaves if type(leaf) is DistributedTensor]
        known.homes[own_name] = nodes
    return load(opened.pickled, leaves)


class _Replaced(Exception):
    """A name was given anew between the answers of two workers: one had the version before, and the other has the next."""


def _newest(
    session: Session, known: Known, name: str, owner: str, own_name: str, found: dict[Node, Found]
) -> tuple[Opened, list[Node]]:
    """Return the newest version that is whole, and its nodes; raise for one that nobody has, or has whole."""
    by_identity = {one.identity: node for node, one in found.items()}
    missing: list[list[Any]] = []
    for version in sorted({v for one in found.values() for v in one.envelopes}, reverse=True):
        envelopes = [one.envelopes[version] for one in found.values() if version in one.envelopes]
        opened = open_envelope(envelopes[0], owner, own_name, version, name)
        if any(other != envelopes[0] for other in envelopes):
            raise UntrustedError(
                f"the workers hold different things as version {version} of {name!r}: one of them has changed it"
            )
        nodes = [by_identity.get(row[0]) for row in opened.listed]
        whole = [node for node in nodes if node is not None and version in found[node].envelopes]
        if len(whole) == len(nodes):
            return opened, whole
        missing = missing or [
            row
            for row, node in zip(opened.listed, nodes)
            if node is None or version not in found[node].envelopes
        ]
    for node in known.homes.get(name, []):
        node.require_alive()
    if missing and all(row[0] in by_identity for row in missing):
        raise _Replaced
    for _, number, host, pid, _ in missing:
        for node in session.nodes:
            if _process(node) == [host, pid]:
                node.require_alive()
        raise UsageError(
            f"some of {name!r} is on node {number} of the session that has published it ({host}, process {pid}), which is not among this "
            "session's nodes: connect to that worker too"
        )
    raise unknown(session, name, session.nodes)


class _Adoption:
    """Proxies for the tensors of a publication: those that are here already, and new ones, whose refs go to the workers.

    `name` is that of another session's: its memory can be read only.
    """

    def __init__(
        self,
        session: Session,
        known: Known,
        name: str | None,
        version: int,
        nodes: list[Node],
        found: dict[Node, Found],
    ) -> None:
        self._session, self._known, self._name = session, known, name
        self._nodes, self._found, self._version = nodes, found, version
        self._rows = {node: found[node].rows[version] for node in nodes}
        self._refs = {node: [0] * len(rows) for node, rows in self._rows.items()}
        self._fresh: dict[Node, list[Handle]] = {node: [] for node in nodes}
        self._new: dict[Key, tuple[Key, Any]] = {}
        self._storages: dict[Key, Storage] = {}

    def leaf(self, kind: str, fields: Sequence[Any]) -> Any:
        """Return what stands in a structure for this leaf."""
        if kind == "local":
            return unpack_local(fields)
        node = self._nodes[fields[0]]
        if kind == "place":
            return self._session.places.residence(Place(node.index, fields[1])).device
        _, index, device, wire, wants_grad, is_parameter = fields
        rows, identity = self._rows[node], self._found[node].identity
        if index >= len(rows):
            raise ProtocolError(f"{node} has fewer tensors than were published")
        tensor, memory, real = rows[index]
        key, place = (identity, tensor), (identity, memory)
        known = self._known.proxy(key) if key not in self._new else self._new[key][1]
        if known is not None:
            return known
        if real is not None and real != wire:
            raise UsageError(
                f"a tensor has become {real[3]} {tuple(real[0])} since it was published, as {wire[3]} {tuple(wire[0])}: publish it again"
            )
        spec = spec_from_wire(wire)
        storage = self._storages.get(place) or self._known.storage(place)
        if storage is None:
            storage = Storage(spec) if self._name is None else ReadOnlyStorage(spec, self._name)
        self._storages[place] = storage
        handle = Handle(next_ref(), spec, self._session.places.residence(Place(node.index, device)), storage)
        self._refs[node][index] = handle.ref
        self._fresh[node].append(handle)
        with torch.inference_mode(False):
            proxy = wrap(DistributedTensor, handle).requires_grad_(wants_grad)
        if is_parameter:
            proxy._is_param = True
        self._new[key] = place, proxy
        return proxy

    def issue(self, token: int) -> None:
        """Give the values their refs, in the order of the log."""
        line = user_line()
        with self._session.lock:
            for node in self._nodes:
                issue_default(
                    [ADOPT, token, self._version, self._refs[node]], self._fresh[node], (), node, line
                )
            for key, (memory, proxy) in self._new.items():
                self._known.note(key, memory, proxy)
