"""Where time and memory go: traces, profiles, waits and stacks."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .cluster.stacks import stacks as stacks
    from .compiled.graph import CompiledGraph as CompiledGraph
    from .compiled.graph import compiled_graphs as compiled_graphs
    from .session.stalls import Stall as Stall
    from .session.stalls import get_sync_debug_mode as get_sync_debug_mode
    from .session.stalls import set_sync_debug_mode as set_sync_debug_mode
    from .session.stalls import stalls as stalls
    from .timeline.trace import Trace as Trace
    from .timeline.trace import trace as trace
    from .timeline.why_slow import WhySlow as WhySlow
    from .timeline.why_slow import why_slow as why_slow

_first_use.lend(__name__)
