"""The data channels over torch's process groups: one for one group's member, and no global one.

Those of accelerators are here, too. Their calls are queued on the device, and return at once:
ProcessGroupNCCL for CUDA devices, which is RCCL on ROCm, and ProcessGroupXCCL for Intel's GPUs.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import AbstractContextManager, nullcontext
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
    Unfinished,
    numbers,
)

from ...machine import accelerator
from ..listening import interface_of

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


log = logging.getLogger("distruntime.worker")


class Queued:
    """A call that the device has yet to carry out."""

    def __init__(self, work: torch.distributed.Work, event: torch.Event) -> None:
        self._work, self._event = work, event

    def is_completed(self) -> bool:
        """Return whether the bytes have moved; raise `ConnectionError` where the library gives up."""
        # A library's own word that it has completed also stands for an error.
        if self._event.query():
            return True
        if self._work.is_completed() and not self._event.query() and self._failed():
            raise ConnectionError("its library reports an error: see the worker's log")
        return False

    def _failed(self) -> bool:
        try:
            return self._work.exception() is not None
        except TypeError:
            # Some builds of torch cannot hand the error over.
            return True


class DeviceGroup(TorchGroup):
    """Every collective of torch.distributed, in the order of the device's current stream.

    Subclasses make `_group`.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._device = membership.device

    def _here(self) -> AbstractContextManager[object]:
        found: AbstractContextManager[object] = torch.get_device_module(self._device).device(self._device)
        return found

    def _options(self, of: Any) -> Any:  # type: ignore[explicit-any]
        options = of.Options()
        options._timeout = timedelta(seconds=self.membership.timeout)
        return options

    def _done(self, work: torch.distributed.Work) -> Queued:
        # The current stream waits for the library's. This thread does not.
        work.wait()
        return Queued(work, accelerator.current_stream(self._device).record_event())

    def barrier(self) -> Unfinished | None:
        options = dist.BarrierOptions()
        options.device_ids = [self._device.index]
        with self._here():
            return self._done(self._group.barrier(options))

    def abort(self) -> None:
        # It waits for the library's threads, for as long as the group's timeout in the worst case, and the
        # thread that aborts may be the one who hears the master.
        threading.Thread(target=self._abort, name="aborts", daemon=True).start()

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("a data channel on %s does not abort: %s", self._device, error)

    def close(self) -> None:
        self._group.shutdown()


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
