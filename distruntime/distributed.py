"""Groups and their collectives, as in `torch.distributed`, and the channels that carry them."""

from __future__ import annotations

import typing

from . import first_use as _first_use

if typing.TYPE_CHECKING:
    from .collectives.group import ProcessGroup as ProcessGroup
    from .collectives.groups import new_group as new_group
    from .collectives.in_place import all_gather as all_gather
    from .collectives.in_place import all_gather_into_tensor as all_gather_into_tensor
    from .collectives.in_place import all_reduce as all_reduce
    from .collectives.in_place import all_to_all as all_to_all
    from .collectives.in_place import all_to_all_single as all_to_all_single
    from .collectives.in_place import barrier as barrier
    from .collectives.in_place import broadcast as broadcast
    from .collectives.in_place import destroy_process_group as destroy_process_group
    from .collectives.in_place import gather as gather
    from .collectives.in_place import reduce as reduce
    from .collectives.in_place import reduce_scatter as reduce_scatter
    from .collectives.in_place import reduce_scatter_tensor as reduce_scatter_tensor
    from .collectives.in_place import scatter as scatter
    from .collectives.point_to_point import irecv as irecv
    from .collectives.point_to_point import isend as isend
    from .collectives.point_to_point import recv as recv
    from .collectives.point_to_point import send as send
    from .collectives.reductions import ReduceOp as ReduceOp
    from .collectives.reductions import premul_sum as premul_sum
    from .collectives.work import Work as Work
    from .wire.data_channel import Capabilities as Capabilities
    from .wire.data_channel import DataChannel as DataChannel
    from .wire.data_channel import Membership as Membership
    from .wire.data_channel import Reduction as Reduction
    from .wire.data_channel import register_data_channel as register_data_channel

_first_use.lend(__name__)
