"""The classes of what other functions return, for annotations and `isinstance`."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.memory import Memory as Memory
    from .cluster.nodes import NodeInfo as NodeInfo
    from .cluster.settings import Settings as Settings
    from .cluster.user_session import Session as Session
    from .log.handle import Place as Place
    from .programs.program import Program as Program
    from .publishing.listing import Publication as Publication
    from .publishing.listing import Publications as Publications
    from .python.objects import RemoteObject as RemoteObject
    from .python.remote import RemoteFunction as RemoteFunction
    from .python.spmd import SpmdFunction as SpmdFunction
    from .tensors.fetch import Fetched as Fetched

_first_use.lend(__name__)
