"""DTensors in a checkpoint: which part of the whole each file has, and which parts a mesh's members need.

What is written does not depend on the mesh: each distinct shard, with the place of its first element in the
whole. So a load can cut the whole in another way.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import NotSupportedError
from ..log.handle import Residence
from ..python.weights import Mesh, Placements, as_dtensor, cuts_after, is_late, slices_of
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, together
from .tree import Json

# A placement in the index: the dimension of a Shard, or this.
_REPLICATE = -1
# Under it: a dimension that is cut after the mesh's later dimensions have cut it. -2 is dimension 0.
_LATE = -2
Part = list[tuple[int, int]]


@dataclass
class Sharded:
    """A DTensor as the index has it.

    `placements` has a dimension for each that is cut, -1 for a replica, and -2 - dim for a dimension that the
    mesh's later dimensions have cut before. `shards` has the name of each distinct shard, and where it begins
    in the whole.
    """

    size: list[int]
    placements: list[int]
    shards: list[tuple[str, list[int]]]

    def form(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {
            "size": [*self.size],
            "placements": [*self.placements],
            "shards": [[name, [*start]] for name, start in self.shards],
        }

    @classmethod
    def parsed(cls, form: Json) -> Sharded:
        """Return what `form` has made; raise `ValueError` or `KeyError` for anything else."""
        if not isinstance(form, dict):
            raise ValueError(f"not a DTensor: {str(form)[:80]}")
        shards = []
        for pair in _list(form["shards"]):
            name, start = _list(pair)
            shards.append((str(name), integers(start)))
        return cls(integers(form["size"]), integers(form["placements"]), shards)


def _list(form: Json) -> list[Json]:
    if not isinstance(form, list):
        raise ValueError(f"not a list: {str(form)[:80]}")
    return form


def integers(value: Json) -> list[int]:
    """Return what must be a list of numbers; raise `ValueError` for anything else."""
    if not isinstance(value, list):
        raise ValueError(f"not a list of numbers: {str(value)[:80]}")
    numbers = [n for n in value if isinstance(n, int)]
    if len(numbers) != len(value):
        raise ValueError(f"not a list of numbers: {str(value)[:80]}")
    return numbers


class _DTensor(torch.Tensor):
    """What a save needs of a DTensor, whose class is imported late."""

    _local_tensor: torch.Tensor
    placements: Placements
    device_mesh: Mesh


def sharded(tensor: torch.Tensor, path: str) -> tuple[DistributedTensor | UnevenTensor, Sharded, list[int]]:
    """Return the shards of a DTensor, what the index says of it, and which members write it.

    The names of its shards are still to be given.
    """
    given: _DTensor = tensor  # type: ignore[assignment]
    local = given._local_tensor
    if not isinstance(local, (DistributedTensor, UnevenTensor)):
        raise NotSupportedError(
            f"tensor {path!r} is a DTensor of this process: expected one on a mesh of the session; save "
            "x.full_tensor()"
        )
    mesh, placements = given.device_mesh, []
    for k, placement in enumerate(given.placements):
        kind, dim = type(placement).__name__, getattr(placement, "dim", None)
        if kind == "Replicate":
            placements.append(_REPLICATE)
        elif kind == "Shard" and isinstance(dim, int):
            placements.append(dim % tensor.ndim)
        elif is_late(mesh, k, given.placements) and isinstance(dim, int):
            placements.append(_LATE - dim % tensor.ndim)
        else:
            raise NotSupportedError(
                f"tensor {path!r} is a DTensor with {placement!r}, and a checkpoint holds Shard(dim) and "
                "Replicate(): redistribute it first, x.redistribute(placements=[...])"
            )
    found: dict[tuple[int, ...], int] = {}
    for k, at in enumerate(mesh.coordinates()):
        part = slices_of(mesh, at, [*tensor.shape], given.placements)
        if all(cut is None or cut[0] < cut[1] for cut in part) or not tensor.numel():
            found.setdefault(tuple(0 if cut is None else cut[0] for cut in part), k)
    about = Sharded([*tensor.shape], placements, [("", [*start]) for start in found])
    return local, about, [*found.values()]


def parts_for(about: Sharded, mesh: Mesh | None) -> list[Part]:
    """Return the part of the whole that each member of a mesh holds; without a mesh, the whole."""
    if mesh is None:
        return [[(0, n) for n in about.size]]
    laid = placements_on(about, mesh)
    return [
        [cut or (0, n) for cut, n in zip(slices_of(mesh, at, about.size, laid), about.size)]
        for at in mesh.coordinates()
    ]


def placements_on(about: Sharded, mesh: Mesh) -> Placements:
    """Return how a mesh shares a tensor: as it was, or on a mesh of other dimensions along the same ones.

    If these are more than the mesh's, it takes the first ones. If they are fewer, the last one is cut by the
    others, too.
    """
    dims = about.placements
    if len(mesh.shape) != len(dims):
        cut = [*dict.fromkeys(_LATE - dim if dim <= _LATE else dim for dim in dims if dim != _REPLICATE)]
        dims = [cut[min(k, len(cut) - 1)] if cut else _REPLICATE for k in range(len(mesh.shape))]
    kinds = importlib.import_module("torch.distributed.tensor")
    laid = [
        kinds.Replicate() if dim == _REPLICATE else kinds.Shard(_LATE - dim if dim <= _LATE else dim)
        for dim in dims
    ]
    late = importlib.import_module("torch.distributed.tensor.placement_types")._StridedShard
    for k, dim in enumerate(dims):
        if dim <= _LATE:
            laid[k] = late(_LATE - dim, split_factor=cuts_after(mesh, k, laid))
    return laid


def overlap(start: Sequence[int], size: Sequence[int], part: Part) -> Part | None:
    """Return what a shard and a part have in common, in the whole; None for nothing."""
    common = [(max(s, a), min(s + n, b)) for s, n, (a, b) in zip(start, size, part)]
    return common if all(a < b for a, b in common) else None


def assembled(
    pieces: Sequence[tuple[list[int], torch.Tensor]], part: Part, place: Residence | None
) -> torch.Tensor:
    """Return a part of the whole, of shards that cover it and where these begin. Return at once."""
    size = [b - a for a, b in part]
    start, first = pieces[0]
    if start == [a for a, _ in part] and [*first.shape] == size:
        return first
    made = torch.empty(size, dtype=first.dtype, device="cpu" if place is None else place.place)
    for start, shard in pieces:
        common = overlap(start, shard.shape, part)
        if common is None:
            continue
        into = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, part))
        out = tuple(slice(a - low, b - low) for (a, b), low in zip(common, start))
        made[into] = shard[out]
    return made


def on_mesh(about: Sharded, mesh: Mesh, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the DTensor of the members' shards."""
    return as_dtensor(together(shards, mesh._home), mesh, about.size, placements_on(about, mesh))
