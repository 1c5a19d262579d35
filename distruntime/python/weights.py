"""Weights that lie at a worker: read there, onto a place or onto the members of a mesh, or into a module."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeGuard

import torch

from ..errors import DistruntimeError, NotSupportedError, PlacementError, ProtocolError, UsageError
from ..log.handle import Place, Residence
from ..log.mesh_log import MeshLog
from ..session.session import active_session
from ..session.spelling import is_node, named, on_node
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import together
from .sent import ask_ahead, run_at
from .sent_weights import Slices, read, sizes_of


class Mesh(Protocol):
    """What a load needs of a mesh. Its class is imported late, with torch.distributed.tensor."""

    _mesh_log: MeshLog
    _home: Residence
    shape: tuple[int, ...]

    @property
    def places(self) -> Sequence[Place]: ...

    @property
    def device(self) -> torch.device: ...

    def coordinates(self) -> list[tuple[int, ...]]: ...

    def _dim(self, dim: int | str) -> int: ...


# DTensor's placements, which are imported as late.
Placements = Sequence[object]
Laid = Placements | Mapping[str, Placements] | Callable[[str, torch.Tensor], Placements] | None


def is_mesh(place: object) -> TypeGuard[Mesh]:
    """Whether this is a mesh of the session."""
    return hasattr(place, "_mesh_log")


def where(node: object) -> Residence:
    """Return the place that weights go to: a node's first GPU, else its CPU, or the place that is named."""
    places = active_session().places
    if is_node(node):
        return places.residence(on_node(places, node))
    found = named(places, node)
    if found is None or found.node.members:
        raise PlacementError(
            f'node={node!r:.80}: expected the number of a node, dr.place(node, device), "remote:1" or a mesh'
        )
    return found


def load_weights(  # type: ignore[explicit-any]
    path: str | os.PathLike[str],
    node: object,
    into: torch.nn.Module | None = None,
    placements: Laid = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return what is in files that lie at a worker; see `dr.load`."""
    text = os.fspath(path)
    if not is_mesh(node):
        if placements is not None:
            raise UsageError(
                "placements say how a mesh's members share tensors: expected node=mesh with them"
            )
        home = where(node)
        home.node.require_alive()
        found = _asked(home, text, None, dtype)()
    else:
        found = _on_mesh(node, text, into, placements, dtype)
    if into is None:
        return found
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise UsageError(
            f"{text} holds more than tensors by name: dr.load(path, node=...) without into=, and then "
            'into.load_state_dict(found["..."], assign=True)'
        )
    missing, more = names_apart(into, found)
    if missing or more:
        raise UsageError(
            f"{text} and the module have other names. Only the module has {_some(missing)}; only the file "
            f"has {_some(more)}. Load the tensors without into=, rename them, and "
            "into.load_state_dict(found, assign=True)"
        )
    fill(into, found)
    return into


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}" or "none"


def _asked(
    home: Residence, path: str, slices: Mapping[str, Slices] | None, dtype: torch.dtype | None
) -> Callable[[], object]:
    """Have a worker read weights. Return at once what blocks for them."""
    cut = None if slices is None else dict(slices)
    return ask_ahead(home, read, "dr.load", path, home.place, cut, dtype, random=False)


# -- on a mesh -----------------------------------------------------------------------------------------------


def _on_mesh(
    mesh: Mesh, path: str, into: torch.nn.Module | None, placements: Laid, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    log, home = mesh._mesh_log, mesh._home
    places = log.session.places
    homes = [places.residence(place, numbered=False) for place in log.members]
    for there in homes:
        there.node.require_alive()
    laid = _laid(mesh, homes[0], path, into, placements)
    parts = [
        _asked(there, path, {name: slices_of(mesh, at, *how) for name, how in laid.items()}, dtype)
        for there, at in zip(homes, mesh.coordinates())
    ]
    # All members read before the first is waited for.
    members = _all(parts)
    joined: dict[str, torch.Tensor] = {}
    for name, shards in _by_name(members, laid):
        whole = together(shards, home)
        if name in laid:
            whole = as_dtensor(whole, mesh, *laid[name])
        joined[name] = whole
    return joined


def _all(parts: Sequence[Callable[[], object]]) -> list[object]:
    try:
        return [part() for part in parts]
    except DistruntimeError:
        # The others' failures are the same one, and nobody is to be told again.
        for part in parts:
            with suppress(DistruntimeError):
                part()
        raise


def _by_name(
    members: Sequence[object], laid: Mapping[str, object]
) -> list[tuple[str, list[DistributedTensor]]]:
    found = []
    first = members[0]
    assert isinstance(first, dict)
    for name in first:
        shards = []
        for k, member in enumerate(members):
            shard = member.get(name) if isinstance(member, dict) else None
            alike = isinstance(shard, DistributedTensor) and (
                (shard.dtype, shard.ndim) == (first[name].dtype, first[name].ndim)
                # What is cut may have other sizes at some members.
                and (name in laid or shard.shape == first[name].shape)
            )
            if not isinstance(shard, DistributedTensor) or not alike:
                raise UsageError(
                    f"the members of the mesh have other weights: {name!r} of member 0 and that of member "
                    f"{k} differ. The same files have to lie at each member's node"
                )
            shards.append(shard)
        found.append((name, shards))
    return found


def _laid(
    mesh: Mesh, home: Residence, path: str, into: torch.nn.Module | None, placements: Laid
) -> dict[str, tuple[list[int], Placements]]:
    """Return the size and the placements of each tensor that becomes a DTensor."""
    if into is not None and placements is None:
        own: dict[str, tuple[list[int], Placements]] = {}
        for name, t in into.state_dict(keep_vars=True).items():
            if hasattr(t, "_local_tensor"):
                own[name] = [*t.shape], t.placements
                if t.device_mesh._mesh_log is not mesh._mesh_log or t.device_mesh.shape != mesh.shape:
                    raise UsageError(
                        f"{name!r} of the module is on {t.device_mesh}: expected node= to be that mesh"
                    )
        return own
    if placements is None:
        return {}
    sizes = fetch(run_at(home, sizes_of, "dr.load", path))
    if not isinstance(sizes, dict):
        raise ProtocolError(f"a worker said {sizes!r:.80} of its weights")
    found: dict[str, tuple[list[int], Placements]] = {}
    for name, size in sizes.items():
        how: Placements | None
        if callable(placements):
            how = placements(name, torch.empty(size, device="meta"))
        elif isinstance(placements, Mapping):
            how = placements.get(name)
        else:
            how = placements
        if how is not None:
            found[name] = size, [*how]
    return found


def slices_of(mesh: Mesh, at: Sequence[int], size: Sequence[int], placements: Placements) -> Slices:
    """Return what a member at some coordinates holds of a tensor.

    `placements` are Shard and Replicate, and what FSDP2 has over tensor parallelism: a cut of what the mesh's
    later dimensions have cut already.
    """
    if len(placements) != len(mesh.shape):
        raise UsageError(
            f"{len(placements)} placements were given for the {len(mesh.shape)} dimensions of {mesh}"
        )
    cut: list[tuple[int, int] | None] = [None] * len(size)
    steps = list(zip(at, mesh.shape, placements))
    late = [k for k, (_, _, placement) in enumerate(steps) if is_late(mesh, k, placements)]
    for k in [*(k for k in range(len(steps)) if k not in late), *reversed(late)]:
        number, count, placement = steps[k]
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        dim = getattr(placement, "dim", None)
        if (kind != "Shard" and k not in late) or not isinstance(dim, int):
            raise NotSupportedError(
                f"{placement}: weights are read as Shard(dim) or Replicate(); load them so, and redistribute"
            )
        if not -len(size) <= dim < len(size):
            raise UsageError(
                f"{placement} was given for a tensor {tuple(size)}: expected one of its dimensions"
            )
        dim %= len(size)
        start, stop = cut[dim] or (0, size[dim])
        # torch cuts so: the last parts are smaller, or empty.
        each = -(-(stop - start) // count)
        cut[dim] = min(start + number * each, stop), min(start + (number + 1) * each, stop)
    return cut


def is_late(mesh: Mesh, k: int, placements: Placements) -> bool:
    """Whether a dimension of the mesh cuts what its later dimensions have cut, as FSDP2 does."""
    factor = getattr(placements[k], "split_factor", None)
    return isinstance(factor, int) and factor == cuts_after(mesh, k, placements)


def cuts_after(mesh: Mesh, k: int, placements: Placements) -> int:
    """Return into how many parts the later dimensions of a mesh cut what dimension `k` cuts, too."""
    dim = getattr(placements[k], "dim", None)
    return math.prod(
        count
        for count, other in zip(mesh.shape[k + 1 :], placements[k + 1 :])
        if getattr(other, "dim", None) == dim
    )


def as_dtensor(local: torch.Tensor, mesh: Mesh, size: Sequence[int], placements: Placements) -> torch.Tensor:
    """Return a DTensor of that size, made of a mesh's tensor of its shards."""
    whole = torch.empty([*size], device="meta")
    kind = importlib.import_module("torch.distributed.tensor").DTensor
    made: torch.Tensor = kind.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


# -- into a module -------------------------------------------------------------------------------------------


def _ties(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each tensor that a module has."""
    names: dict[int, list[str]] = {}
    for name, t in module.state_dict(keep_vars=True).items():
        if isinstance(t, torch.Tensor):
            names.setdefault(id(t), []).append(name)
    return [*names.values()]


def names_apart(module: torch.nn.Module, found: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the names of tensors that only a module has, and those that only `found` has.

    Of a tied tensor one name is enough.
    """
    groups = _ties(module)
    own = {name for group in groups for name in group}
    missing = [group[0] for group in groups if not any(name in found for name in group)]
    return missing, [name for name in found if name not in own]


def fill(module: torch.nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Put tensors into a module, tied ones as one.

    What the module had there is let go. So it may be on `meta`.
    """
    given: dict[str, torch.Tensor] = {}
    groups = [group for group in _ties(module) if any(name in found for name in group)]
    for group in groups:
        given.update(dict.fromkeys(group, next(found[name] for name in group if name in found)))
    module.load_state_dict(given, strict=False, assign=True)
    for group in groups:
        if len(group) > 1:
            _tie(module, group)


def _tie(module: torch.nn.Module, group: Sequence[str]) -> None:
    """Let several names be one parameter again."""
    first = module.state_dict(keep_vars=True)[group[0]]
    for name in group[1:]:
        owner, _, last = name.rpartition(".")
        below = module.get_submodule(owner)
        if last in below._parameters and isinstance(first, torch.nn.Parameter):
            below._parameters[last] = first
        elif last in below._buffers:
            below._buffers[last] = first
