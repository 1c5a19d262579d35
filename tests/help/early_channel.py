"""A data channel whose calls return before the others are there, as NCCL's do: the stream waits, and the host
does not. A CPU has no stream, so whoever reads a result must have waited for it in another way.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

import distruntime as dr
from distruntime_worker.collectives.data_channel.gloo import Gloo

dist: Any = torch.distributed


class Call:
    """One operation that a thread runs."""

    def __init__(self, act: Callable[[], object], aborted: threading.Event) -> None:
        self.act, self.aborted = act, aborted
        self.done = threading.Event()

    def run(self) -> None:
        """Run it. What fails holds the stream until its group is aborted, as on a GPU."""
        try:
            self.act()
        except RuntimeError:
            self.aborted.wait()
            return
        self.done.set()

    def is_completed(self) -> bool:
        """Return whether the bytes have moved."""
        return self.done.is_set()


class Stream:
    """All groups of a worker queue their operations here, as on one stream of a GPU."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        """Run what is queued, one after the other."""
        while True:
            self.calls.get().run()


def stream() -> Stream:
    """Return this process's stream. Each group's class is unpickled anew, and so has globals of its own."""
    found: Stream = vars(dist).setdefault("_stream_of_early_channels", None) or Stream()
    vars(dist)["_stream_of_early_channels"] = found
    return found


class Early(dr.distributed.DataChannel):
    """All of gloo's sums, and a barrier, by a thread in their order."""

    capabilities = dr.distributed.Capabilities(
        frozenset({"send", "barrier", "broadcast", "all_reduce", "all_gather"}),
        {"SUM": frozenset({torch.float32, torch.int64})},
        tags=False,
    )

    def __init__(self, membership: dr.distributed.Membership) -> None:
        super().__init__(membership)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=membership.host)]
        options._timeout = timedelta(seconds=600)
        self.gloo = dist.ProcessGroupGloo(membership.store, self.rank, self.size, options)
        self.begun = 0
        self.stream, self.aborted = stream(), threading.Event()

    def put(self, act: Callable[[], object]) -> Call:
        """Queue an operation."""
        self.begun += 1
        call = Call(act, self.aborted)
        self.stream.calls.put(call)
        return call

    def send(self, data: torch.Tensor, to: int, tag: int) -> Call:
        return self.put(lambda: self.gloo.send([data], to, 0).wait())

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Call:
        return self.put(lambda: self.gloo.recv([data], source, 0).wait())

    def barrier(self) -> Call:
        return self.put(lambda: self.gloo.barrier().wait())

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Alone of all, it returns when everything before it on the stream has run."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.put(lambda: self.gloo.broadcast([data], options).wait()).done.wait(60)

    def all_reduce(self, data: torch.Tensor, op: dr.distributed.Reduction) -> Call:
        return self.put(lambda: self.gloo.allreduce([data]).wait())

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Call:
        return self.put(lambda: self.gloo._allgather_base(output, data).wait())

    def abort(self) -> None:
        """What is under way ends with an error, as gloo's own channel does it."""
        self.aborted.set()
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self.gloo.recv([torch.empty(1)], peer, (1 << 31) - 1).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Nothing is under way that anyone waits for."""


class Lingering:
    """A call that has ended, and says so only when some others of its channel have begun."""

    def __init__(self, channel: Late) -> None:
        channel.begun += 1
        self.channel, self.number = channel, channel.begun

    def is_completed(self) -> bool:
        """Return whether it says so yet."""
        return self.channel.begun > self.number + 2


class Late(dr.distributed.DataChannel):
    """Gloo, whose calls say for a while that the bytes have not moved. So some are under way all the time."""

    capabilities = Gloo.capabilities

    def __init__(self, membership: dr.distributed.Membership) -> None:
        super().__init__(membership)
        self.gloo, self.begun = Gloo(membership), 0

    def send(self, data: torch.Tensor, to: int, tag: int) -> Lingering:
        self.gloo.send(data, to, tag)
        return Lingering(self)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Lingering:
        self.gloo.receive(data, source, tag)
        return Lingering(self)

    def broadcast(self, data: torch.Tensor, root: int) -> Lingering:
        self.gloo.broadcast(data, root)
        return Lingering(self)

    def all_gather(self, output: torch.Tensor, data: torch.Tensor) -> Lingering:
        self.gloo.all_gather(output, data)
        return Lingering(self)

    def gather(self, output: torch.Tensor | None, data: torch.Tensor, root: int) -> Lingering:
        self.gloo.gather(output, data, root)
        return Lingering(self)

    def scatter(self, output: torch.Tensor, data: torch.Tensor | None, root: int) -> Lingering:
        self.gloo.scatter(output, data, root)
        return Lingering(self)

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, output_splits: list[int], data_splits: list[int]
    ) -> Lingering:
        self.gloo.all_to_all(output, data, output_splits, data_splits)
        return Lingering(self)

    def barrier(self) -> Lingering:
        self.gloo.barrier()
        return Lingering(self)

    def all_reduce(self, data: torch.Tensor, op: dr.distributed.Reduction) -> Lingering:
        self.gloo.all_reduce(data, op)
        return Lingering(self)

    def reduce(self, data: torch.Tensor, root: int, op: dr.distributed.Reduction) -> Lingering:
        self.gloo.reduce(data, root, op)
        return Lingering(self)

    def reduce_scatter(
        self, output: torch.Tensor, data: torch.Tensor, op: dr.distributed.Reduction
    ) -> Lingering:
        self.gloo.reduce_scatter(output, data, op)
        return Lingering(self)

    def abort(self) -> None:
        self.gloo.abort()

    def close(self) -> None:
        self.gloo.close()
