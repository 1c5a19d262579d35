"""What the data channels of accelerators have in common: a process group of torch's for one group's member on
one device, and no global one. Its calls are queued on the device, and return at once.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distruntime.wire.data_channel import DataChannel, Membership, Reduction

from ...machine import accelerator

log = logging.getLogger("distruntime.worker")

# Torch's stubs leave out what is used here.
dist: Any = torch.distributed  # type: ignore[explicit-any]


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


class DeviceGroup(DataChannel):
    """Every collective of torch.distributed, in the order of the device's current stream.

    Subclasses make `_group`.
    """

    _group: Any  # type: ignore[explicit-any]

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self._device = membership.device

    def _on_device(self) -> AbstractContextManager[object]:
        found: AbstractContextManager[object] = torch.get_device_module(self._device).device(self._device)
        return found

    def _options(self, of: Any) -> Any:  # type: ignore[explicit-any]
        options = of.Options()
        options._timeout = timedelta(seconds=self.membership.timeout)
        return options

    def _queued(self, work: torch.distributed.Work) -> Queued:
        # The current stream waits for the library's. This thread does not.
        work.wait()
        return Queued(work, accelerator.current_stream(self._device).record_event())

    def _op(self, op: Reduction) -> object:
        return getattr(dist.ReduceOp, op.name)

    def send(self, data: torch.Tensor, to: int, tag: int) -> Queued:
        with self._on_device():
            return self._queued(self._group.send([data], to, 0))

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Queued:
        with self._on_device():
            return self._queued(self._group.recv([data], source, 0))

    def broadcast(self, data: torch.Tensor, root: int) -> Queued:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._on_device():
            return self._queued(self._group.broadcast([data], options))

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Queued:
        with self._on_device():
            return self._queued(self._group._allgather_base(output, data))

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> Queued:
        options = dist.GatherOptions()
        options.rootRank = root
        with self._on_device():
            return self._queued(
                self._group.gather(
                    [list(output.chunk(self.size))] if output is not None else [], [data], options
                )
            )

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> Queued:
        options = dist.ScatterOptions()
        options.rootRank = root
        with self._on_device():
            return self._queued(
                self._group.scatter(
                    [output], [list(data.chunk(self.size))] if data is not None else [], options
                )
            )

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> Queued:
        with self._on_device():
            return self._queued(self._group.alltoall_base(output, data, output_splits, data_splits))

    def barrier(self) -> Queued:
        options = dist.BarrierOptions()
        options.device_ids = [self._device.index]
        with self._on_device():
            return self._queued(self._group.barrier(options))

    def all_reduce(self, data: torch.Tensor, op: Reduction) -> Queued:
        options = dist.AllreduceOptions()
        options.reduceOp = self._op(op)
        with self._on_device():
            return self._queued(self._group.allreduce([data], options))

    def reduce(self, data: torch.Tensor, root: int, op: Reduction) -> Queued:
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, self._op(op)
        with self._on_device():
            return self._queued(self._group.reduce([data], options))

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: Reduction) -> Queued:
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._op(op)
        with self._on_device():
            return self._queued(self._group._reduce_scatter_base(output, data, options))

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
