"""Where time and memory go: traces, profiles, waits and stacks."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.stacks import stacks
    from .compiled.compiled_graphs import CompiledGraph, compiled_graphs
    from .session.stalls import Stall, get_sync_debug_mode, set_sync_debug_mode, stalls
    from .timeline.memory_snapshot import memory_snapshot, record_memory_history
    from .timeline.trace import Trace, trace
    from .timeline.why_slow import WhySlow, why_slow

_first_use.lend(__name__)

__all__ = [
    "CompiledGraph",
    "Stall",
    "Trace",
    "WhySlow",
    "compiled_graphs",
    "get_sync_debug_mode",
    "memory_snapshot",
    "record_memory_history",
    "set_sync_debug_mode",
    "stacks",
    "stalls",
    "trace",
    "why_slow",
]
