"""One group as this worker sees it: its own members' ends, and which operations carry poisoned values."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from distruntime.errors import NodeFailed
from distruntime.wire.codec import failure_fields
from distruntime.wire.data_channel import DataChannel, Unfinished
from distruntime.wire.messages import BreakGroup, Entry, Failure, Message, OpenGroup, Taint
from distruntime.wire.shield import Lock

from ..machine import accelerator
from .store import GroupStore

log = logging.getLogger("distruntime.worker")

# After a data channel has raised, the master has so many seconds to say why the group is broken.
_REASON = 2.0

# So many seconds lie between looks whether a group is broken, while others are told of a poisoned value.
_LOOK = 0.1

# It sends a message to the worker of a node.
Tell = Callable[[int, Message], None]
# It sends a message to the master.
Report = Callable[[Message], None]
Tensors = list[torch.Tensor]
# It takes the channel, the rank, the inputs, the outputs and the sequence. It returns what the channel does.
Act = Callable[[DataChannel, int, Tensors, Tensors, int], Unfinished | None]
# It takes a group that breaks and the reason. It returns what must be done before the group's channels are
# aborted, if there is anything: that may block.
Broken = Callable[["Group", str], Callable[[], None] | None]


class Group:
    """One group as this worker sees it.

    Its own members' ends, and what is known of operations that carry poisoned values.
    """

    def __init__(
        self, message: OpenGroup, own: list[int], report: Report, tell: Tell, on_broken: Broken
    ) -> None:
        self._report, self._on_broken = report, on_broken
        self.number, self.nodes, self.timeout = message.group, message.nodes, message.timeout
        others = set(self.nodes) - {self.nodes[rank] for rank in own}

        def publish(key: str, value: bytes) -> None:
            for node in others:
                tell(node, Entry(self.number, key, value))

        def post(rank: int, key: str, value: bytes) -> None:
            if rank in own:
                self.store.arrived(key, value)
            else:
                tell(self.nodes[rank], Entry(self.number, key, value))

        self.store = GroupStore(self.number, self.timeout, publish, post, len(own))
        # These belong to this worker's own members, by rank.
        self.devices: dict[int, torch.device] = {}
        self.channels: dict[int, DataChannel] = {}
        self.broken = ""
        self.closed = False
        self._ends = threading.Event()
        self._taints: dict[int, Failure] = {}
        self._told: dict[int, tuple[set[int], threading.Event]] = {}
        self._lock = Lock()

    def enter(self, rank: int, channel: DataChannel) -> None:
        """Take the channel of an own member that has joined; abort it if the group has broken meanwhile."""
        with self._lock:
            if not self.broken:
                self.channels[rank] = channel
                return
        channel.abort()

    def run(self, rank: int, act: Act, inputs: Tensors, outputs: Tensors, sequence: int) -> list[Unfinished]:
        """Run one operation for one own member. Return the call if its bytes may not have moved yet.

        Raise `NodeFailed` if the group breaks, or is broken.
        """
        if self.broken or self.closed:
            self.require()
        try:
            call = act(self.channels[rank], rank, inputs, outputs, sequence)
        except Exception as error:
            # A member of this worker's own has failed: the others wait in vain.
            if out_of_memory(error):
                self.fail(f"a member has no memory for its part: {error}")
                raise
            # Most often a member is gone, which the channel notices first and the master can explain.
            self._ends.wait(_REASON)
            self.fail(f"its data channel failed at rank {rank}: {error}")
            self.require()
        # A user's channel may return what another library does, such as True.
        return [call] if call is not None and hasattr(call, "is_completed") else []

    def run_all(self, act: Act, jobs: dict[int, tuple[Tensors, Tensors]], sequence: int) -> list[Unfinished]:
        """As `run`, for each own member of `jobs`, by rank.

        Side by side, as each may wait for the others. Raise what the first raised.
        """
        if len(jobs) == 1:
            ((rank, (inputs, outputs)),) = jobs.items()
            return self.run(rank, act, inputs, outputs, sequence)
        errors: list[Exception] = []
        calls: list[Unfinished] = []

        def work(rank: int, stream: torch.Stream | None) -> None:
            try:
                with torch.no_grad(), accelerator.entered(stream):
                    calls.extend(self.run(rank, act, *jobs[rank], sequence))
            except Exception as error:
                # The thread of the stream raises it, below.
                errors.append(error)

        threads = []
        for rank in jobs:
            device = self.devices[rank]
            stream = accelerator.current_stream(device) if accelerator.asynchronous(device) else None
            threads.append(
                threading.Thread(target=work, args=(rank, stream), name=f"member-{rank}", daemon=True)
            )
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return calls

    def require(self) -> None:
        """Raise `NodeFailed` if the group is broken or closed."""
        if self.broken:
            raise NodeFailed(f"group {self.number} is broken: {self.broken}")
        if self.closed:
            raise NodeFailed(f"group {self.number} is closed")

    def fail(self, reason: str) -> None:
        """Break the group: something has happened here. The master tells the other members why."""
        if self.end(reason):
            self._report(BreakGroup(self.number, reason))

    def end(self, reason: str) -> bool:
        """Break the group.

        Whoever waits in it fails, and whoever comes later. The first reason stays. Any thread.
        """
        with self._lock:
            if self.broken or self.closed:
                return False
            self.broken = reason
            # The channels are let go here. Otherwise their threads and sockets stay until the collector comes
            # by, which on a worker is rare.
            channels, self.channels = self.channels, {}
        self._ends.set()
        self.store.end(reason)
        before = self._on_broken(self, reason)
        if before is None:
            self._abort(channels)
        else:
            # It waits for other workers, and whoever calls this may be the one who hears them.
            threading.Thread(target=self._abort, args=(channels, before), name="aborts", daemon=True).start()
        return True

    def _abort(self, channels: dict[int, DataChannel], before: Callable[[], None] | None = None) -> None:
        if before is not None:
            before()
        while channels:
            _, channel = channels.popitem()
            try:
                channel.abort()
            except Exception:
                log.exception("a data channel of group %d does not abort", self.number)

    def close(self) -> None:
        """Let go of the channels. No call is under way, and what a device has queued runs first.

        Block until then. If the group breaks meanwhile, `end` aborts the channels, which ends the wait. The
        group is closed even if a channel raises: the first error comes through at the end.
        """
        with self._lock:
            if self.broken or self.closed:
                return
            channels = list(self.channels.values())
        errors: list[Exception] = []
        for channel in channels:
            try:
                channel.close()
            except Exception as error:
                errors.append(error)
        with self._lock:
            self.closed = not self.broken
            self.channels.clear()
        self.store.end("it is closed")
        if errors and self.closed:
            for other in errors[1:]:
                log.error("a data channel of group %d does not close", self.number, exc_info=other)
            raise errors[0]

    # -- poisoned values ---------------------------------------------------------------------------

    def taint(self, sequence: int, failure: Failure, me: int, tell: Tell) -> None:
        """Take note that this operation carries a poisoned value, and tell every other worker of the group.

        Return when they know, or the group ends.
        """
        self.tainted(sequence, failure)
        self.tell_of_taint(sequence, failure, me, tell)

    def tell_of_taint(self, sequence: int, failure: Failure, me: int, tell: Tell) -> None:
        """Tell every other worker of the group that this operation carries a poisoned value.

        Return when they know, or the group ends. It is called once for an operation.
        """
        others = set(self.nodes) - {me}
        if not others:
            return
        told = others.copy(), threading.Event()
        with self._lock:
            self._told[sequence] = told
        fields = failure_fields(failure if failure.node >= 0 else replace(failure, node=me))
        for node in others:
            tell(node, Taint(self.number, sequence, fields))
        deadline = time.monotonic() + self.timeout
        while not told[1].wait(_LOOK) and not (self.broken or self.closed):
            if time.monotonic() > deadline:
                late = ", ".join(map(str, sorted(told[0])))
                self.fail(
                    f"node {late} did not answer within {self.timeout:g} s that a value of node {me} is "
                    "poisoned"
                )
        with self._lock:
            del self._told[sequence]

    def tainted(self, sequence: int, failure: Failure) -> None:
        """Take note of a poisoned value in an operation. The first one stays."""
        with self._lock:
            self._taints.setdefault(sequence, failure)

    def answered(self, sequence: int, node: int) -> None:
        """Take note that another worker knows."""
        with self._lock:
            told = self._told.get(sequence)
            if told is not None:
                told[0].discard(node)
                if not told[0]:
                    told[1].set()

    def first_cause(self, sequence: int) -> Failure | None:
        """Return, once an operation has run here, the failure that it carries, if any."""
        if not self._taints:
            return None
        with self._lock:
            return self._taints.pop(sequence, None)


def out_of_memory(error: Exception) -> bool:
    """Return whether an error says that there is no memory left."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
