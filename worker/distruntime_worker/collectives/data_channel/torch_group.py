"""What the data channels over torch's process groups have in common: one for one group's member, and no
global one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed

from distruntime.wire.data_channel import DataChannel, Reduction, Unfinished

# Torch's stubs leave out what is used here.
dist: Any = torch.distributed  # type: ignore[explicit-any]


class TorchGroup(DataChannel):
    """Every collective of torch.distributed. Subclasses make `_group`, and say when a call is done."""

    _group: Any  # type: ignore[explicit-any]

    def _done(self, work: torch.distributed.Work) -> Unfinished | None:
        """Block until the bytes have moved, or return what tells that they have."""
        work.wait()
        return None

    def _here(self) -> AbstractContextManager[object]:
        """Stand around each call."""
        return nullcontext()

    def _op(self, op: Reduction) -> object:
        return getattr(dist.ReduceOp, op.name)

    def send(self, data: torch.Tensor, to: int, tag: int) -> Unfinished | None:
        with self._here():
            return self._done(self._group.send([data], to, tag if self.capabilities.tags else 0))

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Unfinished | None:
        with self._here():
            return self._done(self._group.recv([data], source, tag if self.capabilities.tags else 0))

    def broadcast(self, data: torch.Tensor, root: int) -> Unfinished | None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._here():
            return self._done(self._group.broadcast([data], options))

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Unfinished | None:
        with self._here():
            return self._done(self._group._allgather_base(output, data))

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> Unfinished | None:
        options = dist.GatherOptions()
        options.rootRank = root
        rows = [] if output is None else [list(output.chunk(self.size))]
        with self._here():
            return self._done(self._group.gather(rows, [data], options))

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> Unfinished | None:
        options = dist.ScatterOptions()
        options.rootRank = root
        rows = [] if data is None else [list(data.chunk(self.size))]
        with self._here():
            return self._done(self._group.scatter([output], rows, options))

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> Unfinished | None:
        with self._here():
            return self._done(self._group.alltoall_base(output, data, output_splits, data_splits))

    def barrier(self) -> Unfinished | None:
        with self._here():
            return self._done(self._group.barrier())

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> Unfinished | None:
        options = dist.AllreduceOptions()
        options.reduceOp = self._op(op)
        with self._here():
            return self._done(self._group.allreduce([data], options))

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> Unfinished | None:
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, self._op(op)
        with self._here():
            return self._done(self._group.reduce([data], options))

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> Unfinished | None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._op(op)
        with self._here():
            return self._done(self._group._reduce_scatter_base(output, data, options))
