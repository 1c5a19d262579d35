"""The data channel for Intel's GPUs: torch's ProcessGroupXCCL."""

from __future__ import annotations

from typing import final

import torch

from distruntime.wire.data_channel import MOVES, REDUCES, Capabilities, Membership, numbers

from .device_group import DeviceGroup
from .torch_group import dist


@final
class XCCL(DeviceGroup):
    """Every collective of torch.distributed, between XPUs."""

    # It has no tags. That groups may be at work at one time is not promised.
    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        dict.fromkeys(("SUM", "PRODUCT", "MIN", "MAX", "AVG"), numbers(torch.int16)),
        devices=frozenset({"xpu"}),
        tags=False,
        concurrent=False,
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        with self._here():
            self._group = dist.ProcessGroupXCCL(
                membership.store, self.rank, self.size, self._options(dist.ProcessGroupXCCL)
            )
