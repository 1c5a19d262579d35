"""Tensors on many members: meshes, their shards, and places in a Cartesian shape."""

from __future__ import annotations

import typing

from .. import first_use as _first_use

if typing.TYPE_CHECKING:
    from ..collectives.partition import Partition as Partition
    from .mesh import DeviceMesh as DeviceMesh
    from .mesh import init_device_mesh as init_device_mesh
    from .sharding import from_shards as from_shards
    from .sharding import shards as shards

_first_use.lend(__name__)
