"""Saying where new tensors go: `node`, `device`, `on`, `place`, `set_place`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..errors import PlacementError
from ..log.current import DeviceLike, device_context, device_name, node_context
from ..log.handle import Place
from .session import active_session
from .spelling import on_node


def _checked(node: int, device: str | None) -> None:
    have = active_session().places.devices(node)
    if device is not None and device not in have:
        raise PlacementError(f"node {node} has no device {device!r}: it has {', '.join(have)}")


def _single(place: Place) -> tuple[str, int]:
    if place.node < 0:
        raise PlacementError(
            f"{place} are a mesh, and this takes one place: enter the mesh instead, `with mesh:`"
        )
    return place.device, place.node


def place(node: int, device: DeviceLike = "cpu") -> Place:
    """Return the place of a node's device: "cpu", "cuda:1", or as a number (-1 is the CPU)."""
    name = device_name(device)
    _checked(node, name)
    return Place(node, name)


def node(index: int) -> AbstractContextManager[None]:
    """Return a context in which new tensors go to node `index`. Operations run where their operands are."""
    _checked(index, None)
    return node_context(index, None)


def device(name: DeviceLike) -> AbstractContextManager[None]:
    """Return a context in which new tensors go to a device of the current node: "cpu", "cuda:1", or 1."""
    return device_context(device_name(name))


def on(node: int | Place, device: DeviceLike | None = None) -> AbstractContextManager[None]:
    """Return a context in which new tensors, torch's own factories included, go to this node and device.

    `device` left out is the node's `cuda:0`, if it has one, else its CPU.
    """
    if isinstance(node, Place):
        device, node = _single(node)
    name = on_node(active_session().places, node, device).device
    _checked(node, name)
    return node_context(node, name, default=True)


def set_place(node: int | Place, device: DeviceLike | None = None) -> None:
    """Make this node, and device, the default for new tensors of the session: what a REPL wants."""
    if isinstance(node, Place):
        device, node = _single(node)
    name = device_name(device) if device is not None else None
    _checked(node, name)
    active_session().places.default = (node, name)
