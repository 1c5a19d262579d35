"""The data channel for CPUs: torch's ProcessGroupGloo, for any number of groups and no global one."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, final

import torch
import torch.distributed

from distruntime.wire.data_channel import MOVES, REDUCES, Capabilities, DataChannel, Membership, Reduction, numbers

dist: Any = torch.distributed  # whose stubs leave out what is used here

# What torch 2.11, 2.13 and 2.15 do alike, every pair of reduction and dtype tried: gloo has no int16, AVG is of floating point only, and a
# SUM of bools leaves a 2 where two are true, which is no bool.
_NUMBERS = numbers(torch.int16)
_FLOATS = frozenset(d for d in _NUMBERS if d.is_floating_point)
_INTEGERS = _NUMBERS - _FLOATS
_BOOL = {torch.bool}
_NEVER = (1 << 31) - 1  # a tag that no tensor has


@final
class Gloo(DataChannel):
    """Every collective of torch.distributed, over TCP."""

    capabilities = Capabilities(
        frozenset({*MOVES, *REDUCES}),
        {
            "SUM": _NUMBERS,
            "AVG": _FLOATS,
            **dict.fromkeys(("PRODUCT", "MIN", "MAX"), _NUMBERS | _BOOL),
            **dict.fromkeys(("BAND", "BOR", "BXOR"), _INTEGERS | _BOOL),
        },
    )

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=membership.host)]
        options._timeout = timedelta(seconds=membership.timeout)
        self._group = dist.ProcessGroupGloo(membership.store, self.rank, self.size, options)

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        self._group.send([data], to, tag).wait()

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        self._group.recv([data], source, tag).wait()

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([data], options).wait()

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> None:
        self._group._allgather_base(output, data).wait()

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        self._group.gather([list(output.chunk(self.size))] if output is not None else [], [data], options).wait()

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        self._group.scatter([output], [list(data.chunk(self.size))] if data is not None else [], options).wait()

    def all_to_all(self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]) -> None:
        self._group.alltoall_base(output, data, output_splits, data_splits).wait()

    def barrier(self) -> None:
        self._group.barrier().wait()

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> None:
        self._group.allreduce([data], _all_reduce(op.name)).wait()

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> None:
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, getattr(dist.ReduceOp, op.name)
        self._group.reduce([data], options).wait()

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.name)
        self._group._reduce_scatter_base(output, data, options).wait()

    def abort(self) -> None:
        # gloo has no other way from outside: an operation that times out closes every connection of its group, and what waits raises. With
        # a member that is gone it does not time out but fails, and closes nothing: so with each, until one is there.
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue  # what was wanted

    def close(self) -> None:
        del self._group


@lru_cache(maxsize=16)
def _all_reduce(name: str) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, name)
    return options
