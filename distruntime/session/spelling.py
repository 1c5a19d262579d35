"""What users mean by the words with which they name a place. Every function that takes a place asks here.

A `Place`, "remote", "remote:3" and the device of a remote tensor name a place by themselves: `named` reads
these for everybody. A number does not, so each function says what it stands for. To a stream, a load and a
send it is a node (`on_node`). To a factory and to `x.to` it is a device of one's own node (`device_name`).
To `torch.remote` it is the index by which torch knows a place (`indexed`).
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from ..log.current import device_name
from ..log.handle import Place, Residence
from .places import Places


class DeviceIndex(int):
    """The number that `x.get_device()` returns: -1 for a node's CPU and k for its `cuda:k`.

    It remembers its place, since torch's checkpointing hands the number alone to `torch.remote`.
    """

    place: Place


def is_remote(where: object) -> TypeGuard[str | torch.device]:
    """Whether this is "remote" or "remote:3", as a text or as a torch device."""
    if isinstance(where, torch.device):
        # "lazy" is what proxies claim in C++.
        return where.type in ("remote", "lazy")
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
        return places.numbered(torch.device(where).index)
    return None


def indexed(places: Places, where: int | str | torch.device | None) -> Residence:
    """Return the place that a function of `torch.remote` is given: an index, or a device with that index.

    None and index 0 are the current place.
    """
    if isinstance(where, DeviceIndex):
        return places.residence(where.place)
    if isinstance(where, (str, torch.device)):
        return places.numbered(torch.device(where).index)
    return places.numbered(where)


def on_node(
    places: Places,
    node: int,
    device: object = None,
    *,
    like: str | None = None,
    otherwise: str | None = None,
) -> Place:
    """Return the place of a node, and of a device there if one is named.

    Without `device` it is the device that is called as `like`. A node that has none such offers `otherwise`.
    By default that is its `cuda:0`, or its CPU if it has no GPU. Raises `PlacementError` if there is no such
    node.
    """
    have = places.devices(node)
    if device is not None:
        return Place(node, device_name(device))
    if like in have:
        return Place(node, like)
    return Place(node, otherwise or ("cuda:0" if "cuda:0" in have else "cpu"))


def twin_on(places: Places, node: int, device: object, own: Place) -> Place:
    """Return where `.to(node=, device=)` takes what is at `own`.

    Without a device that is the node's device of the same name. What is on a GPU goes to a GPU, so a node
    without one refuses it.
    """
    on_gpu = own.device.partition(":")[0] == "cuda"
    return on_node(places, node, device, like=own.device, otherwise="cuda:0" if on_gpu else "cpu")
