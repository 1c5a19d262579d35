"""What a session may read and not write: the values of another, which it has adopted. Its master is not relied on to refuse.

Nothing here costs a session that has asked for nobody's values: only then are its templates that write made to look first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distruntime.errors import UsageError

from ..collectives.mesh_operation import LaneCollective
from ..collectives.operation import Collective
from ..values.functions import ONLY_READ
from ..values.mesh_lanes import Lanes, Shards, Team
from ..values.objects import Poisoned, described, memory_of
from ..values.template import Run, Template
from .state import State


class ReadOnly:
    """The memory that a session may read only, and the watch over its templates."""

    def __init__(self, state: State) -> None:
        self._state = state
        # A storage that is weakly referenced keeps its address, though not its memory: no other storage can be taken for it.
        self._storages: dict[int, StorageWeakRef] = {}
        self.watching = False

    def watch(self) -> None:
        """Let every template that writes look what it writes, from now on (the reader, before any such value has a ref)."""
        if not self.watching:
            self.watching = True
            logs: list[State | Team] = [self._state, *self._state.teams.values()]
            for log in logs:
                for number in list(log.info.copy()):
                    self.guard(log, number)

    def add(self, value: Any) -> None:
        """Let the memory of a value be read only."""
        for cdata in [cdata for cdata, storage in self._storages.items() if storage.expired()]:
            del self._storages[cdata]
        storage = memory_of(value)
        if storage is not None:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def holds(self, value: Any) -> bool:
        """Whether a value in a slot is in such memory, or one of a mesh's members' is."""
        if isinstance(value, Shards):
            return any(self.holds(one) for one in value)
        storage = memory_of(value)
        return storage is not None and storage._cdata in self._storages

    def guard(self, log: State | Team, number: int) -> None:
        """Make a template look before it writes.

        Invariant: what stands in the log's table stays in there, as others stand around an instruction, too: the watch over the session's
        share of memory, and its own random numbers. This one is the outermost, so that what is refused neither counts nor draws.
        """
        found = log.info.get(number)
        if isinstance(found, Lanes):  # a member's memory may be shared, and another's not: each looks for itself
            for template in found.templates:
                template.run = self._guarded(template, template.run)
        elif isinstance(found, Template):
            log.templates[number] = self._guarded(found, log.templates[number])
        elif isinstance(found, (Collective, LaneCollective)) and found.mutates:
            log.templates[number] = self._watched_group(found, log.templates[number])

    def _guarded(self, template: Template, run: Run) -> Run:
        offsets = sorted({*template.mutates, *template.unsaid})
        if template.name.startswith("distruntime::") and template.name not in ONLY_READ:
            offsets = template.reads
        return self._watched(template, run, offsets) if offsets else run

    def _watched(self, template: Template, run: Run, offsets: list[int]) -> Run:
        def watched(slots: dict[int, Any], p: list[Any], i: int) -> int:
            if any(self.holds(slots.get(p[i + k])) for k in offsets):
                self._refuse(template, slots, p, i, offsets)
                return i + template.length
            return run(slots, p, i)

        return watched

    def _watched_group(self, found: Any, run: Run) -> Run:
        def watched(slots: dict[int, Any], p: list[Any], i: int) -> int:
            if any(self.holds(slots.get(p[i + k])) for k in found.mutates):  # the other members count on this one
                dropped: int = found.drop(slots, p, i, _error())
                return dropped
            return run(slots, p, i)

        return watched

    def _refuse(self, template: Template, slots: dict[int, Any], p: list[Any], i: int, offsets: list[int]) -> None:
        """Poison what the instruction would have made or written; what it may not write is as it was, and stays readable."""
        state = self._state
        cause = state.failure(p, i, _error(), template.name, described([slots.get(p[i + k]) for k in template.reads]))
        for k in template.writes:
            slots[p[i + k]] = Poisoned(cause)
        for k in offsets:
            value = slots.get(p[i + k])
            if isinstance(value, torch.Tensor) and not self.holds(value):
                state.spread(slots, value.untyped_storage(), cause)
        if not template.writes:
            state.orphans.append(cause)


def _error() -> UsageError:
    return UsageError("this would write what another session has published, and shares for reading: write to a copy, x.clone()")
