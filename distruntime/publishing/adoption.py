"""How a lookup makes proxies of tensors that their workers have published."""

from __future__ import annotations

from itertools import count

import torch

from ..errors import ProtocolError, UntrustedError, UsageError
from ..log.handle import Handle, Residence, next_ref
from ..log.issue import issue_default
from ..log.line import user_line
from ..log.node import Node
from ..log.spec import spec_from_wire
from ..log.storage import ReadOnlyStorage, Storage
from ..operators.proxies import wrap
from ..session.session import Session
from ..tensors.tensor import DistributedTensor
from ..wire.codec import dtype_name
from ..wire.messages import ADOPT, DaemonRecord, FindPublished
from .envelope import Key, Opened, Registry, open_envelope
from .listing import StoredVersions, ask, unknown
from .structure import load, unpack_local

_token = count(1).__next__


def process_of(node: Node) -> tuple[str, int]:
    """Return the host and the process that a node is."""
    welcome = node.welcome
    assert welcome is not None
    return welcome.host, welcome.pid


def look_up(
    session: Session, registry: Registry, name: str, owner: str, own_name: str, foreign: bool
) -> object:
    """Return what is published, by one round of answers.

    Raises `Replaced` where the name was given anew between two of them.
    """
    token, waiting = _token(), [node for node in session.nodes if node.failed is None]
    try:
        answers = ask(session, FindPublished, owner if foreign else "", own_name, token)
        stored = {node: StoredVersions(answer) for node, answer in answers.items()}
        homes = registry.homes.get(name, [])
        opened, nodes = _newest(session, homes, name, owner if foreign else session.name, own_name, stored)
        adoption = _Adoption(session, registry, name if foreign else None, opened.version, nodes, stored)
        leaves = [adoption.leaf(form) for form in opened.leaves]
        adoption.issue(token)
        waiting = [node for node in waiting if node not in nodes]
    finally:
        # Workers hold what they have found until they hear of it.
        for node in waiting:
            issue_default([ADOPT, token, 0, []], (), (), node, user_line())
    if not foreign:
        remote = [leaf for leaf in leaves if isinstance(leaf, DistributedTensor)]
        registry.pinned[own_name] = [leaf._handle.storage for leaf in remote]
        registry.homes[own_name] = nodes
    return load(opened.pickled, leaves)


class Replaced(Exception):
    """A name was given anew between the answers of two workers.

    The first had the version before, and the second has the next one.
    """


def _newest(
    session: Session,
    homes: list[Node],
    name: str,
    owner: str,
    own_name: str,
    stored: dict[Node, StoredVersions],
) -> tuple[Opened, list[Node]]:
    """Return the newest version that is whole, and its nodes; raise for one that nobody has, or has whole."""
    by_identity = {one.identity: node for node, one in stored.items()}
    missing: list[DaemonRecord] = []
    parts: set[str] = set()
    for version in sorted({v for one in stored.values() for v in one.envelopes}, reverse=True):
        envelopes = [one.envelopes[version] for one in stored.values() if version in one.envelopes]
        opened = open_envelope(envelopes[0], owner, own_name, version, name)
        if any(other != envelopes[0] for other in envelopes):
            raise UntrustedError(
                f"the workers hold different things as version {version} of {name!r}: one of them has "
                "changed it"
            )
        nodes = [by_identity.get(daemon.identity) for daemon in opened.daemons]
        whole = [node for node in nodes if node is not None and version in stored[node].envelopes]
        if len(whole) == len(nodes):
            return opened, whole
        if not missing:
            parts = {daemon.identity for daemon in opened.daemons}
            missing = [
                daemon
                for daemon, node in zip(opened.daemons, nodes)
                if node is None or version not in stored[node].envelopes
            ]
    for node in homes:
        node.require_alive()
    if missing and all(daemon.identity in by_identity for daemon in missing):
        raise Replaced
    for daemon in missing:
        for node in session.nodes:
            if process_of(node) == (daemon.host, daemon.pid):
                node.require_alive()
        raise UsageError(
            f"some of {name!r} is on node {daemon.node} of the session that has published it "
            f"({daemon.host}, process {daemon.pid}), which is not among this session's nodes: connect to "
            f"that worker too{_in_its_place(session, daemon, parts, stored)}"
        )
    raise unknown(session, name, session.nodes)


def _in_its_place(
    session: Session, daemon: DaemonRecord, parts: set[str], stored: dict[Node, StoredVersions]
) -> str:
    """Return what is said of a node on a missing daemon's host that has no part of the publication."""
    for node in session.nodes:
        host, process = process_of(node)
        if host == daemon.host and (node not in stored or stored[node].identity not in parts):
            return (
                f". Node {node.index} here is process {process} of that host: if it has taken the other's "
                "place, its part is lost until it is published again"
            )
    return ""


class _Adoption:
    """Makes proxies for the tensors of a publication. Those that are here already serve again.

    The workers are told the refs of the new ones. With `name`, another session has published it, and its
    memory can only be read.
    """

    def __init__(
        self,
        session: Session,
        registry: Registry,
        name: str | None,
        version: int,
        nodes: list[Node],
        stored: dict[Node, StoredVersions],
    ) -> None:
        self._session, self._registry, self._name = session, registry, name
        self._nodes, self._version = nodes, version
        self._identities = {node: stored[node].identity for node in nodes}
        self._tensors = {node: stored[node].tensors[version] for node in nodes}
        self._refs = {node: [0] * len(tensors) for node, tensors in self._tensors.items()}
        self._fresh: dict[Node, list[Handle]] = {node: [] for node in nodes}
        # Each tensor's key leads to the key of its memory and to its proxy.
        self._new: dict[Key, tuple[Key, DistributedTensor]] = {}
        self._storages: dict[Key, Storage] = {}

    def leaf(self, form: list[object]) -> object:
        """Return what stands in a structure for this leaf, which is in the form that `_packed` gives it."""
        match form:
            case ["local", *fields]:
                return unpack_local(fields)
            case ["place", int(number), str(device)]:
                return self._residence(self._nodes[number], device).device
            case ["remote", int(number), int(index), str(device), list(wire), bool(grad), bool(is_parameter)]:
                return self._remote(self._nodes[number], index, device, wire, grad, is_parameter)
        raise ProtocolError("what should be a leaf of a publication is none")

    def _residence(self, node: Node, device: str) -> Residence:
        return self._session.places.residence(self._session.places.place(node.index, device))

    def _remote(
        self, node: Node, index: int, device: str, wire: list[object], wants_grad: bool, is_parameter: bool
    ) -> DistributedTensor:
        """Return the proxy of a tensor that its node has listed at `index`."""
        tensors, identity = self._tensors[node], self._identities[node]
        if index >= len(tensors):
            raise ProtocolError(f"{node} has fewer tensors than were published")
        tensor, memory, real = tensors[index]
        key, memory_key = (identity, tensor), (identity, memory)
        proxy = self._registry.proxy(key) if key not in self._new else self._new[key][1]
        if proxy is not None:
            return proxy
        spec = spec_from_wire(wire)
        if real is not None and real != wire:
            now = spec_from_wire(real)
            raise UsageError(
                f"a tensor has become {dtype_name(now.dtype)} {tuple(now.size)} since it was published, as "
                f"{dtype_name(spec.dtype)} {tuple(spec.size)}: publish it again"
            )
        storage = self._storages.get(memory_key) or self._registry.storage(memory_key)
        if storage is None:
            storage = Storage(spec) if self._name is None else ReadOnlyStorage(spec, self._name)
        self._storages[memory_key] = storage
        handle = Handle(next_ref(), spec, self._residence(node, device), storage)
        self._refs[node][index] = handle.ref
        self._fresh[node].append(handle)
        with torch.inference_mode(False):
            made: DistributedTensor = wrap(DistributedTensor, handle).requires_grad_(wants_grad)
        if is_parameter:
            made._is_param = True
        self._new[key] = memory_key, made
        return made

    def issue(self, token: int) -> None:
        """Give the values their refs, in the order of the log."""
        line = user_line()
        with self._session.lock:
            for node in self._nodes:
                issue_default(
                    [ADOPT, token, self._version, self._refs[node]], self._fresh[node], (), node, line
                )
            for key, (memory, proxy) in self._new.items():
                self._registry.add(key, memory, proxy)
