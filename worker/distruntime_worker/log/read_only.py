"""What a session may read and not write: the values of another, which it has adopted. Its master is not
relied on to refuse.

Nothing here costs a session that has asked for nobody's values: only then are its templates that write made
to look first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distruntime.errors import UsageError

from ..values.functions import WRITING
from ..values.mesh_lanes import Shards
from ..values.objects import Poisoned, described, memory_of
from ..values.step import Run, Slots, Step, Words
from .state import State


class ReadOnly:
    """The memory that a session may read only, and the link that watches what writes it.

    `switched` is called when the link is switched on.
    """

    # A member's memory may be shared, and another's not: each looks for itself.
    each = True

    def __init__(self, state: State, switched: Callable[[], None]) -> None:
        self._state, self._switched = state, switched
        # A storage that is weakly referenced keeps its address, though not its memory: no other storage can
        # be taken for it.
        self._storages: dict[int, StorageWeakRef] = {}
        self.watching = False

    def watch(self) -> None:
        """Let every template that writes look what it writes, from now on (the reader, before any such value
        has a ref).
        """
        if not self.watching:
            self.watching = True
            self._switched()

    def add(self, value: object) -> None:
        """Let the memory of a value be read only."""
        for cdata in [cdata for cdata, storage in self._storages.items() if storage.expired()]:
            del self._storages[cdata]
        storage = memory_of(value)
        if storage is not None:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def holds(self, value: object) -> bool:
        """Whether a value in a slot is in such memory, or one of a mesh's members' is."""
        if isinstance(value, Shards):
            return any(self.holds(one) for one in value)
        storage = memory_of(value)
        return storage is not None and storage._cdata in self._storages

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what looks at what a step writes before it writes."""
        offsets = step.reads if step.name in WRITING else sorted({*step.mutates, *step.unsaid})
        if not self.watching or not offsets:
            return None

        def watched(slots: Slots, p: Words, i: int) -> int:
            if any(self.holds(slots.get(p[i + k])) for k in offsets):
                return self._refuse(step, slots, p, i, offsets)
            return run(slots, p, i)

        return watched

    def _refuse(self, step: Step, slots: Slots, p: Words, i: int, offsets: Sequence[int]) -> int:
        """Poison what the instruction would have made or written.

        What it may not write is as it was, and stays readable.
        """
        text = "this would write what another session has published, and shares for reading"
        error = UsageError(f"{text}: write to a copy, x.clone()")
        if step.joint:
            return step.drop(slots, p, i, error)
        state = self._state
        cause = state.failure(p, i, error, step.name, described([slots.get(p[i + k]) for k in step.reads]))
        for k in step.writes:
            slots[p[i + k]] = Poisoned(cause)
        for k in offsets:
            value = slots.get(p[i + k])
            if isinstance(value, torch.Tensor) and not self.holds(value):
                state.spread(slots, value.untyped_storage(), cause)
        if not step.writes:
            state.orphans.append(cause)
        return i + step.length
