"""The classes of what other functions return, for annotations and `isinstance`."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.memory import Memory
    from .cluster.nodes import NodeInfo
    from .cluster.settings import Settings
    from .cluster.user_session import Session
    from .log.handle import Place
    from .programs.program import Program
    from .publishing.listing import Publication, Publications
    from .python.objects import RemoteObject
    from .python.remote import RemoteFunction
    from .python.spmd import SpmdFunction
    from .tensors.fetch import Fetched

_first_use.lend(__name__)

__all__ = [
    "Fetched",
    "Memory",
    "NodeInfo",
    "Place",
    "Program",
    "Publication",
    "Publications",
    "RemoteFunction",
    "RemoteObject",
    "Session",
    "Settings",
    "SpmdFunction",
]
