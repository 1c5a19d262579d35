"""The shape and the members that a mesh is asked for, checked, and where in it each member stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any

from ..errors import PlacementError, UsageError
from ..log.current import ACCELERATOR, is_of_kind
from ..log.handle import Place
from ..session.session import Session
from ..session.spelling import homes_of


def shape_of(
    mesh_shape: object, mesh_dim_names: Sequence[str] | None
) -> tuple[list[int], tuple[str, ...] | None]:
    """Return the sizes of a mesh's dimensions and their names; raise `UsageError` if they are none."""
    sizes: list[Any] = list(mesh_shape) if isinstance(mesh_shape, Iterable) else []
    if sizes and all(isinstance(row, (tuple, list)) and len(row) == 2 for row in sizes):
        if mesh_dim_names is not None:
            raise UsageError("the dimensions' names were given twice, in the shape and as mesh_dim_names")
        mesh_dim_names, sizes = [str(row[0]) for row in sizes], [row[1] for row in sizes]
    # A size is often what a division leaves: `world / (2 * pipe)` is 4.0.
    sizes = [int(n) if isinstance(n, float) and n.is_integer() else n for n in sizes]
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise UsageError(
            f"a mesh's shape is sizes above 0, (2, 4), or [('data', 2), ('tensor', 4)]; got {mesh_shape!r}"
        )
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if names is not None and (len(names) != len(sizes) or len(set(names)) != len(names)):
        raise UsageError(f"a mesh of {len(sizes)} dimensions has as many names, each another; got {names}")
    return sizes, names


def members_for(
    session: Session, device_type: str | Sequence[int | Place], sizes: Sequence[int]
) -> list[Place]:
    """Return the members of a mesh of these sizes: devices of one type, node by node, or the places given.

    Raise `PlacementError` if there are too few.
    """
    need = prod(sizes)
    if not isinstance(device_type, str):
        have = [home.place for home in homes_of(session, list(device_type), "a mesh")]
        if len(have) != need:
            raise UsageError(f"a mesh of shape {tuple(sizes)} has {need} members, got {len(have)} places")
    else:
        every = [
            session.places.place(node.index, name)
            for node in session.nodes
            if node.failed is None
            for name in session.places.devices(node.index)
        ]
        have = [place for place in every if is_of_kind(place.local_device, device_type)]
        if not have and device_type not in ("cpu", "cuda", ACCELERATOR):
            raise UsageError(
                'device_type is "cpu" or "cuda", the devices of the nodes that make up the mesh, or a '
                f"list; got {device_type!r}"
            )
    if need > len(have):
        alive = sum(node.failed is None for node in session.nodes)
        raise PlacementError(
            f"a mesh of shape {tuple(sizes)} has {need} members, and this session has {len(have)} "
            f"{device_type} device{'s' if len(have) != 1 else ''} on {alive} node{'s' if alive != 1 else ''}"
            + (f" ({len(session.nodes) - alive} lost)" if alive < len(session.nodes) else "")
            + (": make it smaller, or start" if have else ": name a kind that they have, or start")
            + " with more workers (world_size=, workers=); dr.nodes() shows what there is"
            + ("" if have or device_type == "cpu" else ". simulate_cuda=2 pretends two of each worker")
        )
    return have[:need]


def rank_along(dims: Sequence[int], sizes: Sequence[int], at: Sequence[int]) -> int:
    """Return the rank along some dimensions, row by row, of the member with these coordinates."""
    return reduce(lambda found, dim: found * sizes[dim] + at[dim], dims, 0)


def ranks_along(dims: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return each member's rank along some dimensions of a mesh."""
    return [rank_along(dims, sizes, at) for at in product(*map(range, sizes))]


def dims_along(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return along which dimensions of a mesh the members have these ranks; None if along none."""
    # A step along one of its dimensions is a step of as many ranks, and an outer one's is larger.
    steps = [ranks[prod(sizes[dim + 1 :])] if size > 1 else 0 for dim, size in enumerate(sizes)]
    dims = tuple(sorted(filter(steps.__getitem__, range(len(sizes))), key=steps.__getitem__, reverse=True))
    return dims if ranks_along(dims, sizes) == list(ranks) else None
