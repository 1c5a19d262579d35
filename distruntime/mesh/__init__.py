"""Tensors on many members: meshes, their shards, and places in a Cartesian shape."""

from __future__ import annotations

import typing

from .. import first_use as _first_use

if typing.TYPE_CHECKING:
    from ..collectives.partition import Partition
    from .mesh import DeviceMesh, init_device_mesh
    from .sharding import from_shards, shards

_first_use.lend(__name__)

__all__ = [
    "DeviceMesh",
    "Partition",
    "from_shards",
    "init_device_mesh",
    "shards",
]
