"""Uploads to a GPU that wait for nothing: pinned buffers in main memory, used again once the GPU has read
them.

A copy from ordinary memory makes CUDA wait until everything before it on the stream has run; one from pinned
memory is queued. Pinning is slow, so the buffers are kept. Nothing of this is for other devices: a CPU's
tensors are made where they stay.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

# The smallest buffer has so many bytes, and the sizes are powers of two.
_LEAST = 1 << 16
# So many bytes are copied at a time: the next piece of a large tensor is filled while this one travels.
_PIECE = 1 << 24
# At most so many bytes are pinned in all.
_MOST = 1 << 28


class Staging:
    """The pinned buffers of one worker. Any thread may call.

    Invariant: a buffer is either being filled by one thread, or in the queue of its size together with the
    event that was recorded behind the copy out of it; until the event has happened, the GPU may read it.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._queues: dict[int, deque[tuple[torch.cuda.Event, torch.Tensor]]] = {}
        self._lock = threading.Lock()
        # All buffers have so many bytes together.
        self.pinned = 0

    def to(self, device: torch.device, source: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a CPU tensor on a CUDA device, in the order of that device's current
        stream.

        `source` may change as soon as this returns. Blocks only where `most` bytes are on their way; raises
        `torch.OutOfMemoryError`.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        if not source.numel():
            return target
        stream = torch.cuda.current_stream(device)
        here = source.contiguous().reshape(-1).view(torch.uint8)
        there = target.reshape(-1).view(torch.uint8)
        for start in range(0, here.numel(), _PIECE):
            piece = here[start : start + _PIECE]
            nbytes = piece.numel()
            buffer, copied = self._take(nbytes), torch.cuda.Event()
            try:
                buffer[:nbytes].copy_(piece)
                there[start : start + nbytes].copy_(buffer[:nbytes], non_blocking=True)
                copied.record(stream)
            finally:
                # An event that was not recorded counts as one that has happened.
                with self._lock:
                    self._queues[buffer.numel()].append((copied, buffer))
        return target

    def _take(self, nbytes: int) -> torch.Tensor:
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            queue = self._queues.setdefault(size, deque())
            if queue and (self.pinned + size > self._most or queue[0][0].query()):
                copied, buffer = queue.popleft()
                copied.synchronize()
                return buffer
            self._make_room(size)
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self.pinned += size
            return buffer

    def _make_room(self, size: int) -> None:
        """Let go of buffers of other sizes, large ones first, until there is room.

        Those that other threads are filling may exceed it.
        """
        dropped = False
        for _, queue in sorted(self._queues.items(), reverse=True):
            while queue and self.pinned + size > self._most:
                queue[0][0].synchronize()
                self.pinned -= queue.popleft()[1].numel()
                dropped = True
        if dropped:
            # Torch would keep them pinned, for buffers of just their size.
            torch._C._host_emptyCache()
