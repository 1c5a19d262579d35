"""Saying where new tensors go: `node`, `device`, `on`, `place`, `set_place`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copyreg import pickle as register

from ..errors import PlacementError, without_our_frames
from ..log.current import DeviceLike, device_context, device_name, node_context
from ..log.handle import Place
from .session import active, active_session
from .spelling import on_node, require_alone


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
