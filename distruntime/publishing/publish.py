"""Publishing gives a name to what is to outlive this process or to be shared; a lookup brings it back.

Tensors stay where they are. What travels is the structure around them, signed by whoever has published it. A
version of a name is whole when every daemon that it lists has it, and a lookup takes the highest version that
is whole. So a master that dies half-way leaves the version before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import UsageError, without_our_frames
from ..log.handle import Place
from ..log.issue import issue_default
from ..log.line import user_line
from ..log.node import Node
from ..log.storage import ReadOnlyStorage
from ..session.requests import Request
from ..session.session import Session, active_session
from ..session.spelling import named
from ..tensors.tensor import DistributedTensor
from ..wire.messages import PUBLISH, DaemonRecord, DropOlder, DropPublished, ListVersions
from .adoption import Replaced, look_up, process_of
from .envelope import registry_of, seal
from .listing import Publications, ask, nonsense, published, unknown
from .structure import Leaf, described, dump, pack_local

# A name has at most so many characters.
_LONGEST = 200
# A lookup asks the workers again for so many seconds, if somebody gives the name anew while they are asked.
# Where the workers answer at unlike times and the name changes all the time, twenty tries in a row met two
# versions.
_PATIENCE = 10.0


@without_our_frames
def names() -> Publications:
    """Return what is published: this session's own, and what other sessions share on its workers.

    Block for one round trip.
    """
    return published(active_session())


@without_our_frames
def publish(name: str, thing: object, *, shared: bool = False) -> None:
    """Give a name to a module, an optimizer, or a tree of them and of remote tensors.

    Block until the workers have done so. The tensors stay where they are, and stay in use: what is done to
    them in place later, a lookup sees. `copy.deepcopy(thing)` is published as it is now. Publishing under a
    name that exists replaces it, on all nodes at once.

    Args:
        name: at most 200 characters, without "/".
        shared: let other sessions on its workers look it up, as "owner/name", to read it; the owner is
            `session.name`.

    Raises:
        UsageError: there is a local tensor in it, or what cannot be pickled.
        NodeFailed: a node of it is lost.
        Whatever an operation failed with: a tensor of it is poisoned, and nothing is published.
    """
    _check_name(name)
    session = active_session()
    structure = dump(thing, lambda device: _place_of(session, device))
    leaves = structure.leaves
    remote = [leaf for leaf in leaves if isinstance(leaf, DistributedTensor)]
    _check_remote(name, thing, remote)
    places = [leaf._handle.place.place if isinstance(leaf, DistributedTensor) else leaf for leaf in leaves]
    nodes = [
        session.nodes[k] for k in dict.fromkeys(place.node for place in places if isinstance(place, Place))
    ]
    registry = registry_of(session)
    with registry.lock:
        registry.drop_unused()
        answers = ask(session, ListVersions, name)
        for node in nodes:
            node.require_alive()
        version = 1 + max((n for answer in answers.values() for n in answer.versions), default=0)
        own: dict[Node, list[DistributedTensor]] = {node: [] for node in nodes}
        packed = [_packed(session, leaf, own) for leaf in leaves]
        daemons = [_record(answers[node].identity, node, own[node]) for node in nodes]
        envelope = seal(session.name, name, version, daemons, packed, structure.pickled)
        before = registry.pinned.get(name, [])
        pinned = [leaf._handle.storage for leaf in remote]
        registry.pinned[name] = [*before, *pinned]
        try:
            numbers = _issue(session, [name, version, shared, described(thing), daemons, envelope], own)
        except Exception:
            # After Ctrl-C it may be published all the same, so a KeyboardInterrupt goes past here.
            registry.pinned[name] = before
            ask(session, DropPublished, name, version)
            raise
        for node, tensors in own.items():
            identity = answers[node].identity
            for leaf, (tensor, memory) in zip(tensors, numbers[node]):
                registry.add((identity, tensor), (identity, memory), leaf)
        registry.pinned[name], registry.homes[name] = pinned, nodes
        ask(session, DropOlder, name, version)


@without_our_frames
def unpublish(name: str) -> None:
    """Take a name away. Block for one round trip.

    What it stood for lives on as long as somebody holds it, a reader in another session included.

    Raises:
        UsageError: there is no such name among the session's own.
    """
    _check_name(name)
    session = active_session()
    registry = registry_of(session)
    with registry.lock:
        dropped = ask(session, DropPublished, name, 0)
        registry.pinned.pop(name, None)
        homes = registry.homes.pop(name, [])
        registry.drop_unused()
    if not any(answer.any for answer in dropped.values()) and not homes:
        raise unknown(session, name, session.nodes)


def _check_name(name: object, most: int = _LONGEST) -> None:
    if not isinstance(name, str) or not name or len(name) > most or not name.isprintable():
        raise UsageError(f"a name is a text of 1 to {most} printable characters, got {name!r:.220}")
    if most == _LONGEST and "/" in name:
        raise UsageError(f'a name has no "/" in it, as "owner/name" is what others look up; got {name!r}')


def _check_remote(name: str, thing: object, remote: Sequence[DistributedTensor]) -> None:
    if not remote:
        raise UsageError(
            f"there is no remote tensor in what is to be published as {name!r} (of class "
            f'{type(thing).__name__}): send it first, .to("remote")'
        )
    for tensor in remote:
        storage, node = tensor._handle.storage, tensor._handle.place.node
        if type(storage) is ReadOnlyStorage:
            raise UsageError(
                f"{name!r} would hold a tensor of {storage.name!r}, which is another session's: publish a "
                "copy, copy.deepcopy(x)"
            )
        node.session.require_open()
        node.require_alive()


def _place_of(session: Session, device: torch.device) -> Place | None:
    # A bare "remote" is the current place, wherever it is read again.
    home = named(session.places, device) if device.index is not None else None
    return None if home is None or home.node.members else home.place


def _record(identity: str, node: Node, tensors: Sequence[DistributedTensor]) -> DaemonRecord:
    return DaemonRecord(
        identity, node.index, *process_of(node), sorted({t.place.local_device for t in tensors})
    )


def _packed(session: Session, leaf: Leaf, own: dict[Node, list[DistributedTensor]]) -> list[object]:
    """Return one leaf as it travels. A remote one is added to the list of its node."""
    nodes = list(own)
    if isinstance(leaf, Place):
        return ["place", nodes.index(session.nodes[leaf.node]), leaf.local_device]
    if not isinstance(leaf, DistributedTensor):
        return ["local", *pack_local(leaf)]
    home = leaf._handle.place
    own[home.worker].append(leaf)
    flags = bool(leaf.requires_grad), bool(getattr(leaf, "_is_param", False))
    return [
        "remote",
        nodes.index(home.worker),
        len(own[home.worker]) - 1,
        home.place.local_device,
        leaf._handle.spec.wire(),
        *flags,
    ]


def _issue(
    session: Session, fields: list[object], own: dict[Node, list[DistributedTensor]]
) -> dict[Node, list[tuple[int, int]]]:
    """Have the workers keep their tensors, all at one moment of the program.

    Return the numbers by which they know each tensor and its memory.
    """
    line = user_line()
    requests: dict[Node, Request[list[list[int]]]] = {}
    try:
        with session.lock:
            for node, tensors in own.items():
                requests[node] = session.requests.new(node, "published")
                handles = [leaf._handle for leaf in tensors]
                issue_default(
                    [PUBLISH, requests[node].number, fields, [h.ref for h in handles]],
                    (),
                    handles,
                    node,
                    line,
                )
                node.flush()
    except BaseException:
        # Nobody waits for them.
        for request in requests.values():
            session.requests.discard(request)
        raise
    # This waits for all of them first, so that what comes after a failure finds no worker half-way.
    for request in requests.values():
        session.result(request, quietly=True)
    numbers = {}
    for node, request in requests.items():
        session.raise_for(request)
        numbers[node] = [(tensor, memory) for tensor, memory in request.value]
        if len(numbers[node]) != len(own[node]):
            raise nonsense(node)
    return numbers


# -- back ----------------------------------------------------------------------------------------------------


# What a user has published is of any class, so its users would have to convert an `object` on each line.
@without_our_frames
def lookup(name: str) -> Any:  # type: ignore[explicit-any]
    """Return what was published under a name: modules as modules, ties and views as they were.

    Block for one round trip, or up to 10 seconds while another process gives the name anew. One tensor of a
    worker is one object here, in whatever it was published and however often it is looked up. "owner/name" is
    what another session shares: it can be read and not written.

    Raises:
        UsageError: there is no such name, or its tensors have changed their shapes since.
        UntrustedError: it is signed neither by you nor by somebody whom you trust.
        NodeFailed: some of it was on a node that is lost.
    """
    _check_name(name, 2 * _LONGEST)
    session = active_session()
    owner, _, own_name = name.rpartition("/")
    foreign = owner not in ("", session.name)
    registry = registry_of(session)
    with registry.lock:
        registry.drop_unused()
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with suppress(Replaced):
                return look_up(session, registry, name, owner, own_name, foreign)
    raise UsageError(
        f"{name!r} is incomplete. Another process publishes it again and again, or its publisher died "
        "half-way. Look it up again, or publish it again"
    )
