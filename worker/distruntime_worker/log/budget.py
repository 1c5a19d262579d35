"""How much memory one session may hold on each device of this worker, and how much it holds.

What is made is added up, which costs little and can only say too much, as values die and results share
memory. Only where the sum exceeds what the session may hold is its memory counted, by a walk over its values,
and the sum goes on from there.

Invariant: a session holds at most its share and a 64th, not counting the result that is refused; what is
refused is gone at once. Not in the sum, nor in the walk: what torch's kernels and autograd keep for
themselves, what its allocator caches, and bytes on their way.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from time import monotonic

import torch

from distruntime.wire.shield import Lock
from distruntime.wire.units import size_text

from ..machine.devices import Devices
from ..values.functions import Tape
from ..values.mesh_lanes import Shards
from ..values.objects import Poisoned
from ..values.step import Slots
from ..values.streams import HostCopy

# The sum may exceed a share by one part in so many while a walk would come too soon after the last.
_SLACK = 64
# Where only the slack is exceeded, the next walk comes after so many times as long as a walk takes.
_PAUSE = 10


def limits(most: float, devices: Devices) -> dict[torch.device, int]:
    """Return the bytes that a session may hold on each device.

    `most` if that is an `int`, else this part of what the device has.
    """
    return {
        devices.behind(torch.device(name)): most if isinstance(most, int) else int(total * most)
        for name, _, total, *_ in devices.info()
    }


def memory_in(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Return the memory that values in slots are in, some of it several times."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, Shards):
            yield from memory_in(list(value))
        elif isinstance(value, Poisoned):
            if value.memory is not None:
                yield value.memory
        elif isinstance(value, HostCopy):
            yield value.tensor.untyped_storage()
        elif isinstance(value, Tape):
            yield from memory_in([*value.inputs, *value.outputs])


def held_in(slots: Slots) -> dict[torch.device, int]:
    """Return the bytes that values in slots hold, by device, each memory once. Walks over all values."""
    found: dict[torch.device, int] = {}
    seen: set[int] = set()
    # Other threads add and free meanwhile; and what is in the copy keeps its address.
    values = slots.copy()
    for memory in memory_in(values.values()):
        if memory._cdata not in seen:
            seen.add(memory._cdata)
            found[memory.device] = found.get(memory.device, 0) + memory.nbytes()
    return found


class Budget:
    """One session's account of its memory on this worker. Any thread may call."""

    def __init__(self, session: str, most: dict[torch.device, int]) -> None:
        self._session, self._most = session, most
        self._values: Slots = {}
        self._sum = dict.fromkeys(most, 0)
        # From this time.monotonic() on, exceeding the slack is worth a walk.
        self._next = 0.0
        self._lock = Lock()
        # From so many bytes on it is worth asking before there is a value.
        self.large = max(1, min(most.values(), default=1 << 62) // _SLACK)

    def watch(self, slots: Slots) -> None:
        """Count what is in `slots`."""
        self._values = slots

    def held(self) -> dict[torch.device, int]:
        """Return the bytes that the session holds on each device. Walks over all values."""
        with self._lock:
            return self._count()

    def require(self, devices: list[torch.device], nbytes: int, op: str) -> None:
        """Raise `torch.OutOfMemoryError` unless the session may hold so much more on each device.

        Some may stand there several times.
        """
        for device in set(devices):
            more = nbytes * devices.count(device)
            with self._lock:
                if self._exceeds(device, more):
                    raise self._refusal(device, self._sum[device], f"{op} needs {size_text(more)} more")

    def add(self, device: torch.device, nbytes: int, op: str) -> None:
        """Take note of a result that is in its slot; raise `torch.OutOfMemoryError` if it must go again."""
        with self._lock:
            if device not in self._most:
                return
            self._sum[device] += nbytes
            if self._exceeds(device, 0):
                # What is dropped now is still in the sum.
                self._next = 0.0
                raise self._refusal(device, self._sum[device] - nbytes, f"{op} made {size_text(nbytes)} more")

    def _exceeds(self, device: torch.device, more: int) -> bool:
        most = self._most.get(device)
        if most is None or self._sum[device] + more <= most:
            return False
        if self._sum[device] + more <= most + most // _SLACK and monotonic() < self._next:
            return False
        self._count()
        return self._sum[device] + more > most

    def _count(self) -> dict[torch.device, int]:
        """Count everything once.

        A result whose thread has not called `add` yet may be in it twice after that, never not at all.
        """
        began = monotonic()
        held = held_in(self._values)
        found = {device: held.get(device, 0) for device in self._most}
        self._sum = found
        ended = monotonic()
        self._next = ended + _PAUSE * (ended - began)
        return found.copy()

    def _refusal(self, device: torch.device, held: int, what: str) -> torch.OutOfMemoryError:
        where = str(device) if device.index is None else f"{device} (GPU {device.index})"
        return torch.OutOfMemoryError(
            f"session {self._session!r} may hold {size_text(self._most[device])} on {where} of "
            f"{socket.gethostname()} (--max-memory); it holds {size_text(held)}, and {what}"
        )
