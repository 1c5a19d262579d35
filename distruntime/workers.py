"""The workers themselves: how they start, more of them, others in their place, your packages there."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.workers import add_worker, restart
    from .python.shipping import ship
    from .session.launcher import Launcher, LaunchSpec, WorkerProcess

_first_use.lend(__name__)

__all__ = [
    "LaunchSpec",
    "Launcher",
    "WorkerProcess",
    "add_worker",
    "restart",
    "ship",
]
