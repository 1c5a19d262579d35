"""The data channel for CUDA devices: torch's ProcessGroupNCCL, for any number of groups and no global one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed

from distruntime.wire.data_channel import (
    MOVES,
    REDUCES,
    Capabilities,
    DataChannel,
    Membership,
    Reduction,
    numbers,
)

from ..interfaces import interface_of

# Torch's stubs leave out what is used here.
dist: Any = torch.distributed  # type: ignore[explicit-any]

_REDUCED = numbers(torch.int16)


@final
class NCCL(DataChannel):
    """Every collective of torch.distributed, on the current CUDA stream's order."""

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
        self._device = membership.device
        _bind(membership.host)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=membership.timeout)
        with torch.cuda.device(self._device):
            self._group = dist.ProcessGroupNCCL(membership.store, self.rank, self.size, options)

    def _finish(self, work: torch.distributed.Work) -> None:
        # The current stream waits for NCCL's; this thread does not.
        work.wait()

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        with torch.cuda.device(self._device):
            self._finish(self._group.send([data], to, 0))

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        with torch.cuda.device(self._device):
            self._finish(self._group.recv([data], source, 0))

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with torch.cuda.device(self._device):
            self._finish(self._group.broadcast([data], options))

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            self._finish(self._group._allgather_base(output, data))

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        with torch.cuda.device(self._device):
            self._finish(
                self._group.gather(
                    [list(output.chunk(self.size))] if output is not None else [[]], [data], options
                )
            )

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        with torch.cuda.device(self._device):
            self._finish(
                self._group.scatter(
                    [output], [list(data.chunk(self.size))] if data is not None else [[]], options
                )
            )

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> None:
        with torch.cuda.device(self._device):
            self._finish(self._group.alltoall_base(output, data, output_splits, data_splits))

    def barrier(self) -> None:
        options = dist.BarrierOptions()
        options.device_ids = [self._device.index]
        with torch.cuda.device(self._device):
            self._finish(self._group.barrier(options))

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _op(op)
        with torch.cuda.device(self._device):
            self._finish(self._group.allreduce([data], options))

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> None:
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, _op(op)
        with torch.cuda.device(self._device):
            self._finish(self._group.reduce([data], options))

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _op(op)
        with torch.cuda.device(self._device):
            self._finish(self._group._reduce_scatter_base(output, data, options))

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()


def _bind(host: str) -> None:
    """Have NCCL use the interface where other workers reach this one, unless the user has said which.

    NCCL asks once in a process.
    """
    name = interface_of(host)
    if name:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _op(op: Reduction) -> object:
    return getattr(dist.ReduceOp, op.name) if op.factor is None else dist._make_nccl_premul_sum(op.factor)
