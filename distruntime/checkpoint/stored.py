"""What an index says of its tensors, and where tensors go that were remote."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import PlacementError
from ..log.handle import Residence
from ..python.weights import Mesh, is_mesh
from ..session.session import Session
from ..session.spelling import is_node, named, on_node
from .sharded import Sharded, integers
from .tree import Json


class Target:
    """Where tensors go that were remote."""

    def __init__(self, session: Session, place: object) -> None:
        self._session = session
        # It is True if they come into this process.
        self.here = False
        self.mesh: Mesh | None = None
        self._node: int | None = None
        self._residence: Residence | None = None
        if place is None:
            return
        if is_mesh(place):
            self.mesh = place
        elif is_node(place):
            session.places.devices(place)
            self._node = place
        elif isinstance(place, (str, torch.device)) and str(place) in ("cpu", "cpu:0"):
            self.here = True
        else:
            self._residence = named(session.places, place)
            if self._residence is None:
                raise PlacementError(
                    'the place of a load is a Place, "remote:1", a node by its number, a mesh, "cpu" for '
                    f"this process, or None for where each tensor was; got {place!r:.80}"
                )
            self._residence.node.require_alive()

    def place_for(self, node: int, device: str) -> Residence:
        """Return where a tensor goes that was on this device of this node."""
        if self._residence is not None:
            return self._residence
        places = self._session.places
        if self._node is not None:
            first = places.devices(self._node)[0]
            return places.residence(on_node(places, self._node, like=device, otherwise=first))
        if (
            0 <= node < len(self._session.nodes)
            and self._session.nodes[node].failed is None
            and device in places.devices(node)
        ):
            return places.residence(places.place(node, device))
        return places.current()


def leaf_fields(form: list[Json]) -> tuple[str, int, int, int, Sharded | None]:
    """Return a tensor's key, alias, flags and members, as `save` writes them into the tree, and what a
    DTensor was.
    """
    match form:
        case [str(key), int(alias), int(flags), int(members)]:
            return key, alias, flags, members, None
        case [str(key), int(alias), int(flags), int(members), about]:
            return key, alias, flags, members, Sharded.parsed(about)
    raise ValueError(f"not a tensor of a tree: {str(form)[:80]}")


@dataclass
class TensorEntry:
    """What an index says of one tensor. `file` is the position of its file among all of the checkpoint."""

    dtype: str
    shape: list[int]
    file: int
    stride: list[int] | None
    place: tuple[int, str] | None

    @classmethod
    def parsed(cls, about: Json) -> TensorEntry:
        """Return what `save` has written; raise `ValueError` or `KeyError` for anything else."""
        if not isinstance(about, dict):
            raise ValueError(f"not a tensor: {str(about)[:80]}")
        match about["dtype"], about["file"], about.get("place"):
            case str(dtype), int(file), None:
                place = None
            case str(dtype), int(file), [int(node), str(device)]:
                place = node, device
            case _:
                raise ValueError(f"not a tensor: {str(about)[:80]}")
        stride = about.get("stride")
        return cls(dtype, integers(about["shape"]), file, None if stride is None else integers(stride), place)
