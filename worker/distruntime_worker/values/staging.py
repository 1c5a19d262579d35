"""Copies between the host and a device that wait for nothing: pinned buffers in main memory, used again once
the copy has run.

A copy from or to ordinary memory waits until everything before it on the stream has run; one from or to
pinned memory is queued. Pinning is slow, so the buffers are kept, up to a bound. Nothing of this is for
devices that read the host's memory: a CPU's tensors are made where they stay.
"""

from __future__ import annotations

from collections import deque

import torch

from distruntime.wire.shield import Lock

from ..machine import accelerator, hardware, lost

# The smallest buffer has so many bytes, and the sizes are powers of two.
_LEAST = 1 << 12
# So many bytes are copied at a time: the next piece of a large tensor is filled while this one travels.
_PIECE = 1 << 24
# At most so many bytes are pinned in all.
_MOST = 1 << 28
# Copies to the host may take so many: one of a large value is not in pieces, and stays until it is fetched.
_MOST_DOWN = 1 << 30

_Queue = deque[tuple[torch.Event, torch.Tensor]]


class Staging:
    """The pinned buffers of one worker. Any thread may call.

    Invariant: a buffer is either being used by one thread or one `HostCopy`, or in the queue of its size
    together with the event that was recorded behind the last copy; until the event has happened, the device
    may read or write it. No thread holds the lock while it waits for a device, or for the driver that pins
    memory or lets it go: either may take as long as all that the device has yet to run.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._queues: dict[int, _Queue] = {}
        self._lock = Lock()
        # All buffers have so many bytes together.
        self.pinned = 0

    def to(self, device: torch.device, source: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a CPU tensor on a device, in the order of that device's current stream.

        `source` may change as soon as this returns. Blocks only where `most` bytes are on their way; raises
        `torch.OutOfMemoryError`.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        if not source.numel():
            return target
        if not hardware.has_pinned_memory(device):
            return target.copy_(source)
        stream = accelerator.current_stream(device)
        here = source.contiguous().reshape(-1).view(torch.uint8)
        there = target.reshape(-1).view(torch.uint8)
        for start in range(0, here.numel(), _PIECE):
            piece = here[start : start + _PIECE]
            nbytes = piece.numel()
            buffer, copied = self._take(nbytes), torch.Event(device)
            try:
                buffer[:nbytes].copy_(piece)
                there[start : start + nbytes].copy_(buffer[:nbytes], non_blocking=True)
                copied.record(stream)
            finally:
                # An event that was not recorded counts as one that has happened.
                self.give(copied, buffer)
        return target

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer of at least so many bytes, to be given back by `give`; None if there is no room."""
        return self._free(_size(nbytes))

    def give(self, copied: torch.Event, buffer: torch.Tensor) -> None:
        """Take back a buffer, to be used again when `copied` has happened."""
        with self._lock:
            self._queues.setdefault(buffer.numel(), deque()).append((copied, buffer))

    def empty(self) -> None:
        """Let go of the buffers that nobody uses, after the copies that are under way."""
        with self._lock:
            queues = list(self._queues.values())
        for queue in queues:
            # What is given back meanwhile stays, as another session is at work.
            for _ in range(len(queue)):
                self._drop_first(queue)

    def _drop_first(self, queue: _Queue) -> None:
        """Let go of the first buffer of a queue, after its copy."""
        with self._lock:
            first = queue[0] if queue else None
        if first is None:
            return
        first[0].synchronize()
        with self._lock:
            # Another thread may have taken it.
            if queue and queue[0] is first:
                self.pinned -= queue.popleft()[1].numel()

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes. Where there is no room, wait for a copy first."""
        size = _size(nbytes)
        while (found := self._free(size)) is None:
            with self._lock:
                copied = self._under_way(size)
                if copied is None:
                    # Other threads are filling all the buffers. One more may exceed the bound.
                    self.pinned += size
            if copied is None:
                return self._new(size)
            copied.synchronize()
        return found

    def _free(self, size: int) -> torch.Tensor | None:
        """Return a buffer that is free now, or a new one where there is room."""
        with self._lock:
            queue = self._queues.get(size)
            if queue and queue[0][0].query():
                return queue.popleft()[1]
            dropped = self._make_room(size)
            room = self.pinned + size <= self._most
            self.pinned += size * room
        if dropped:
            # Torch would keep them pinned, for buffers of just their size.
            hardware.empty_pinned()
        return self._new(size) if room else None

    def _new(self, size: int) -> torch.Tensor:
        """Return a new buffer, which is counted already."""
        try:
            return hardware.pinned((size,), torch.uint8)
        except BaseException:
            with self._lock:
                self.pinned -= size
            raise

    def _make_room(self, size: int) -> bool:
        """Let go of buffers that are free now, large ones first, until there is room; say if any went."""
        before = self.pinned
        for _, queue in sorted(self._queues.items(), reverse=True):
            while queue and self.pinned + size > self._most and queue[0][0].query():
                self.pinned -= queue.popleft()[1].numel()
        return self.pinned < before

    def _under_way(self, size: int) -> torch.Event | None:
        """Return the event of a copy that is under way: of this size if there is one, else of a large one."""
        own = self._queues.get(size)
        others = (queue for _, queue in sorted(self._queues.items(), reverse=True) if queue)
        queue = own or next(others, None)
        return queue[0][0] if queue else None


def _size(nbytes: int) -> int:
    return max(_LEAST, 1 << (nbytes - 1).bit_length())


# The worker's own, for uploads and for copies to the host. After a device was lost they are others.
_ours = [Staging(), Staging(_MOST_DOWN)]


def uploads() -> Staging:
    """Return the worker's buffers for uploads."""
    return _ours[0]


def downloads() -> Staging:
    """Return the worker's buffers for copies to the host."""
    return _ours[1]


def _renew(device: torch.device, text: str) -> None:
    """Begin with other buffers: nobody can tell when a lost device has read or written the old ones."""
    for old in _ours:
        lost.keep_for_ever(old)
    _ours[:] = [Staging(), Staging(_MOST_DOWN)]


# A device may be found lost while the worker has no session.
lost.watch(_renew)
