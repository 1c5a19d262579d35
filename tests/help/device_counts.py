"""What the simulated device counts, for those too who cannot load the device: a master is one of them."""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """How often the host of a device has waited, and for what; and what it has launched and allocated.

    The order is that of `simulated::counted`.
    """

    events: int
    streams: int
    devices: int
    copies: int
    sizes: int
    kernels: int
    allocations: int

    @property
    def waits(self) -> int:
        return self.events + self.streams + self.devices + self.copies + self.sizes

    def since(self, before: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, before)))
