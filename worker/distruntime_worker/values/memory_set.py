"""A set of memories: it keeps none of them alive, and takes no other memory for one of them."""

from __future__ import annotations

from typing import final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .objects import memory_of

# A set that has grown to so many looks which of them are gone, and again when it has doubled.
_LEAST = 64


@final
class MemorySet:
    """Memories, by their storages. Several threads may add to it."""

    def __init__(self) -> None:
        # A storage that is weakly referenced keeps its address, though not its memory: no other storage can
        # be taken for it.
        self._storages: dict[int, StorageWeakRef] = {}
        self._look_at = _LEAST

    def __bool__(self) -> bool:
        return bool(self._storages)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a memory."""
        if storage._cdata in self._storages:
            return
        if len(self._storages) >= self._look_at:
            for cdata, weak in list(self._storages.items()):
                if weak.expired():
                    self._storages.pop(cdata, None)
            self._look_at = max(_LEAST, 2 * len(self._storages))
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, value: object) -> bool:
        """Whether a value in a slot is in such a memory, or would be."""
        storage = memory_of(value)
        return storage is not None and storage._cdata in self._storages
