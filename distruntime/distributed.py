"""Groups and their collectives, as in `torch.distributed`, and the channels that carry them."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .collectives.group import ProcessGroup, new_group
    from .collectives.in_place import (
        all_gather,
        all_gather_into_tensor,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        destroy_process_group,
        gather,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        scatter,
    )
    from .collectives.point_to_point import irecv, isend, recv, send
    from .collectives.reductions import ReduceOp, premul_sum
    from .collectives.work import Work
    from .wire.data_channel import Capabilities, DataChannel, Membership, Reduction, register_data_channel

_first_use.lend(__name__)

__all__ = [
    "Capabilities",
    "DataChannel",
    "Membership",
    "ProcessGroup",
    "ReduceOp",
    "Reduction",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "irecv",
    "isend",
    "new_group",
    "premul_sum",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_data_channel",
    "scatter",
    "send",
]
