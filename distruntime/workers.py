"""The workers themselves: how they start, more of them, others in their place, your packages there."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.workers import add_worker as add_worker
    from .cluster.workers import restart as restart
    from .python.shipping import ship as ship
    from .session.launcher import Launcher as Launcher
    from .session.launcher import LaunchSpec as LaunchSpec
    from .session.launcher import WorkerProcess as WorkerProcess

_first_use.lend(__name__)
