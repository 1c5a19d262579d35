"""The data channel for CUDA devices: torch's ProcessGroupNCCL. On ROCm this is RCCL."""

from __future__ import annotations

import os
from typing import final

import torch

from distruntime.wire.data_channel import MOVES, REDUCES, Capabilities, Membership, Reduction, numbers

from ..listening import interface_of
from .device_group import DeviceGroup
from .torch_group import dist

_REDUCED = numbers(torch.int16)


@final
class NCCL(DeviceGroup):
    """Every collective of torch.distributed, between CUDA devices."""

    # NCCL knows no tags, and two communicators on one device, begun in different orders on different members,
    # wait for each other.
    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        {
            **dict.fromkeys(("SUM", "PRODUCT", "MIN", "MAX", "AVG"), _REDUCED),
            "PREMUL_SUM": frozenset({torch.float16, torch.float32, torch.float64}),
        },
        devices=frozenset({"cuda"}),
        tags=False,
        concurrent=False,
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        _bind(membership.host)
        with self._here():
            self._group = dist.ProcessGroupNCCL(
                membership.store, self.rank, self.size, self._options(dist.ProcessGroupNCCL)
            )
            # Otherwise the first operation would connect, with the patience of an operation, and no `abort`
            # reaches a communicator that is being made. Copies would make others of their own.
            self._group.eager_connect_single_device(self._device)

    def _op(self, op: Reduction) -> object:
        return super()._op(op) if op.factor is None else dist._make_nccl_premul_sum(op.factor)


def _bind(host: str) -> None:
    """Have NCCL use the interface where other workers reach this one, unless the user has said which.

    NCCL asks once in a process.
    """
    name = interface_of(host)
    if name:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
