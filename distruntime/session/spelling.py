"""What users mean by the words with which they name a place, and how they say where new tensors go.

A `Place`, "remote", "remote:3" and the device of a remote tensor name a place by themselves: `named` reads
these for everybody. A number does not, so each function says what it stands for. To a stream, a load and a
send it is a node (`on_node`). To a factory and to `x.to` it is a device of one's own node (`device_name`). To
`torch.remote` it is the index by which torch knows a place (`indexed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copyreg import pickle as register
from typing import TypeGuard

import torch

from ..errors import PlacementError, UsageError, of_caller, without_our_frames
from ..log.current import ACCELERATOR, DeviceLike, device_context, device_name, node_context
from ..log.handle import REMOTE_TYPES, Place, Residence
from ..log.node import Node
from .places import Places
from .session import Session, active, active_session

Where = int | str | torch.device | None


class DeviceIndex(int):
    """The number that `x.get_device()` returns: -1 for a node's CPU and k for its GPU `cuda:k`.

    It remembers its place, since torch's checkpointing hands the number alone to `torch.remote`.
    """

    place: Place


def is_remote(where: object) -> TypeGuard[str | torch.device]:
    """Whether this is "remote" or "remote:3", as a text or as a torch device."""
    if isinstance(where, torch.device):
        return where.type in REMOTE_TYPES
    return isinstance(where, str) and where.partition(":")[0] in ("remote", "lazy")


def is_node(where: object) -> TypeGuard[int]:
    """Whether this can be the number of a node."""
    return isinstance(where, int) and not isinstance(where, bool)


def named(places: Places, where: object) -> Residence | None:
    """Return the place that a spelling names by itself; None where it is no such spelling.

    Raises `PlacementError` if there is no such place.
    """
    if isinstance(where, Place):
        return places.residence(where)
    if is_remote(where):
        return places.meant(torch.device(where))
    return None


def require_alone(where: object, name: str, other: object) -> None:
    """Raise `PlacementError` if something is named beside a place, which says both node and device."""
    if other is not None:
        raise PlacementError(
            f"{where!r} names a node and its device, and {name}={other!r} was given besides: "
            "expected one of the two. dr.place(node, device) is the place of a node's device"
        )


def indexed(places: Places, where: object) -> Residence:
    """Return the place that a function of `torch.remote` is given: a place, its device, or its number.

    None is the current place. Raises `PlacementError` for anything else.
    """
    if where is None:
        return places.current()
    if isinstance(where, DeviceIndex):
        return places.residence(where.place)
    found = named(places, where)
    if found is not None:
        return found
    if isinstance(where, int) and not isinstance(where, bool):
        return places.numbered(where)
    raise PlacementError(
        f'torch.remote knows places: got {where!r}, expected "remote:1", its number 1, x.device or '
        'dr.place(node, device), as in dr.place(0, "cuda:1")'
    )


def _first(have: Sequence[str]) -> str:
    return next((name for name in have if name != "cpu"), "cpu")


def on_node(
    places: Places, node: int, device: object = None, *, like: str | None = None, otherwise: str | None = None
) -> Place:
    """Return the place of a node, and of a device there if one is named.

    Without `device` it is the device that is called as `like`. A node that has none such offers `otherwise`.
    By default that is its first GPU, or its CPU if it has no GPU. Raises `PlacementError` if there is no such
    node.
    """
    have = places.devices(node)
    if device is not None:
        return places.place(node, device_name(device))
    if like in have:
        return places.place(node, like)
    return places.place(node, otherwise or _first(have))


def living(session: Session, node: int | None) -> list[Node]:
    """Return the node of a number, or all that are not lost.

    Raise `PlacementError` if there is no such node, and `NodeFailed` if it is lost.
    """
    if node is None:
        return [n for n in session.nodes if n.failed is None]
    session.places.devices(node)
    session.nodes[node].require_alive()
    return [session.nodes[node]]


def homes_of(
    session: Session, nodes_or_places: Sequence[int | Place] | None, what: str = "a group"
) -> list[Residence]:
    """Return the places of a new group, or of `what` is made of places like one.

    Raise `UsageError` or `PlacementError`.
    """
    if nodes_or_places is None:
        nodes_or_places = [node.index for node in session.nodes]
    listed = isinstance(nodes_or_places, Iterable) and not isinstance(nodes_or_places, str)
    if not listed or not all(isinstance(w, (int, Place)) for w in nodes_or_places):
        raise UsageError(
            f"{what} is made of a list of node numbers or places, [0, 1] or [dr.place(0, 'cuda:0'), "
            f"...], got {nodes_or_places!r}"
            + (": those of a mesh are mesh.places" if hasattr(nodes_or_places, "places") else "")
        )
    homes = [
        session.places.residence(where if isinstance(where, Place) else on_node(session.places, where))
        for where in nodes_or_places
    ]
    if not homes:
        raise UsageError(f"{what} has at least one member, got an empty list")
    for k, home in enumerate(homes):
        if home in homes[:k]:
            raise UsageError(f"{home.place} was given twice: each member of {what} is another place")
    return homes


def home_of_stream(node: Where, device: DeviceLike | None) -> Residence:
    """Return the place of a stream: the current one where neither a node nor a device is named.

    Raises `PlacementError` if there is no such place.
    """
    places = active_session().places
    for place, name, other in ((node, "device", device), (device, "node", node)):
        found = named(places, place)
        if found is not None:
            require_alone(place, name, other)
            return found
    if isinstance(node, (str, torch.device)):
        raise PlacementError(
            "a stream belongs to a device of a node: "
            f'node=1, device="cuda:0", or x.device of a remote tensor; got {node}'
        )
    if node is None and device is None:
        return places.current()
    current = places.current().place
    index = current.node if node is None else node
    like = current.local_device if index == current.node else None
    return places.residence(on_node(places, index, device, like=like))


def twin_on(places: Places, node: int, device: object, own: Place) -> Place:
    """Return where `.to(node=, device=)` takes what is at `own`.

    Without a device that is the node's device of the same name. What is on a GPU goes to a GPU, so a node
    without one refuses it.
    """
    on_gpu = own.local_device != "cpu" and not own.members
    if on_gpu and device is None and places.devices(node) == ["cpu"]:
        raise PlacementError(
            f"node {node} has no GPU, and {own} is one: expected a device of that node, as in "
            f'.to(node={node}, device="cpu")'
        )
    return on_node(
        places,
        node,
        device,
        like=own.local_device,
        otherwise=_first(places.devices(node)) if on_gpu else "cpu",
    )


def _numbered(device: object) -> bool:
    """Whether a device is an accelerator of a node by its number alone."""
    return isinstance(device, int) or (isinstance(device, str) and device.partition(":")[0] == ACCELERATOR)


def destination(target: DeviceLike | None, node: int | None, own: Residence) -> Residence | torch.device:
    """Return the place to which `.to` takes what is at `own`, or the device of this process that it names.

    Raises `PlacementError` if there is no such place.
    """
    places = active_session().places
    found = named(places, target)
    if found is not None:
        require_alone(target, "node", node)
        return found
    if node is not None:
        return places.residence(twin_on(places, node, target, own.place))
    assert target is not None
    try:
        device = target if _numbered(target) else torch.device(target)
    except RuntimeError as error:
        raise of_caller(error) from None
    if not isinstance(device, torch.device) or device.type not in ("cpu", "meta"):
        if own.node.members:
            raise PlacementError(
                f"{own.place} have a shard each, and a GPU of one's own is one member's business: "
                "x.member(k).cuda()"
            )
        return places.residence(places.place(own.place.node, device_name(device)))
    return device


def _single(place: Place) -> tuple[str, int]:
    if place.node < 0:
        raise PlacementError(
            f"{place} are a mesh, and this takes one place: enter the mesh instead, `with mesh:`"
        )
    return place.local_device, place.node


@without_our_frames
def place(node: int, device: DeviceLike = "cpu") -> Place:
    """Return the place of a node's device: "cpu", "cuda:1", or as a number (-1 is the CPU).

    torch takes it as a device: `torch.ones(2, device=dr.place(1))`.
    """
    return active_session().places.place(node, device_name(device))


def _unpickled(node: int, device: str, members: tuple[Place, ...]) -> Place:
    """Return a place with the number that it has in this process's session.

    It has none without a session, and if the session does not have the place. A mesh's place is part of a
    session, and has none either. distruntime's own functions read only the node and the device.
    """
    if members or not active:
        return Place(node, device, members=members)
    return active[0].places.known(node, device)


_Named = tuple[int, str, tuple[Place, ...]]


def _pickled(place: Place) -> tuple[Callable[[int, str, tuple[Place, ...]], Place], _Named]:
    return _unpickled, (place.node, place.local_device, place.members)


# The class cannot know the session, which is a room above it.
register(Place, _pickled)


@without_our_frames
def node(index: int) -> AbstractContextManager[None]:
    """Return a context in which new tensors go to node `index`. Operations run where their operands are."""
    active_session().places.devices(index)
    return node_context(index, None)


@without_our_frames
def device(name: DeviceLike) -> AbstractContextManager[None]:
    """Return a context in which new tensors go to a device of the current node: "cpu", "cuda:1", or 1."""
    return device_context(device_name(name))


@without_our_frames
def on(node: int | Place, device: DeviceLike | None = None) -> AbstractContextManager[None]:
    """Return a context in which new tensors, torch's own factories included, go to this node and device.

    `device` left out is the node's first GPU, if it has one, else its CPU.
    """
    if isinstance(node, Place):
        require_alone(node, "device", device)
        device, node = _single(node)
    found = on_node(active_session().places, node, device)
    return node_context(found.node, found.local_device, default=True)


@without_our_frames
def set_place(node: int | Place, device: DeviceLike | None = None) -> None:
    """Make this node, and device, the default for new tensors of the session: what a REPL wants."""
    if isinstance(node, Place):
        require_alone(node, "device", device)
        device, node = _single(node)
    places = active_session().places
    if device is None:
        # It raises if there is no such node.
        places.devices(node)
        places.default = (node, None)
    else:
        places.default = (node, places.place(node, device_name(device)).local_device)
