"""What memory a worker had over its whole life: few looks, further and further apart."""

from __future__ import annotations

import os
import time
from typing import final

import torch

from distruntime.wire.messages import MemoryLook

from ..machine import accelerator, hardware, lost
from ..machine.devices import Devices

# So many seconds lie between two looks at first. When there are so many looks, every second one goes, and the
# time between two doubles.
_EVERY, _MOST = 1.0, 240


@final
class History:
    """Looks at the memory of a worker's devices. The reader calls it, twice a second."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._every, self._next = _EVERY, 0.0
        self._looks: list[tuple[float, list[int | None]]] = []

    def look(self) -> None:
        """Note the memory of now, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        self._looks.append((now, self._memory()))
        if len(self._looks) >= _MOST:
            del self._looks[::2]
            self._every *= 2

    def rows(self) -> list[MemoryLook]:
        """Return what was noted, and the memory of now."""
        now = time.monotonic()
        looks = [*self._looks, (now, self._memory())]
        return [MemoryLook(max(0.0, now - at), memory) for at, memory in looks]

    def _memory(self) -> list[int | None]:
        return [self._of(name) for name in self._devices.names]

    def _of(self, name: str) -> int | None:
        """Return what this process has of main memory, or what torch has given out on a GPU."""
        if name == "cpu":
            return resident()
        device = torch.device(name)
        if self._devices.simulated or device in accelerator.lost:
            return None
        if device not in accelerator.in_use():
            return 0
        try:
            return hardware.allocated(device)[0]
        except RuntimeError as error:
            lost.look(error, "a look at its memory")
            return None


def resident() -> int | None:
    """Return how many bytes of main memory this process has; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as line:
            return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
