"""The chain of links around an instruction: nothing else puts anything around a step's run.

Two of the links are here. What a session may read and not write are the values of another, which it has
adopted: its master is not relied on to refuse. And a lost device poisons a session's values, and nothing more
is tried there. Neither costs anything in a session that has asked for nobody's values and whose devices are
all right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from distruntime.errors import UsageError
from distruntime.wire.messages import Failure

from ..machine import accelerator, lost
from ..values.draws import Draws
from ..values.functions import SEED, WRITING, Tape
from ..values.memory_set import MemorySet
from ..values.mesh_lanes import MeshState, Shards
from ..values.objects import Poisoned, class_name, described, memory_of
from ..values.step import Run, Slots, Step, Words
from ..values.streams import HostCopy
from .guard import Shares
from .state import State
from .timing import Timing


class ReadOnly:
    """The memory that a session may read only, and the link that watches what writes it.

    `switched` is called when the link is switched on.
    """

    # A member's memory may be shared, and another's not: each looks for itself.
    each = True

    def __init__(self, state: State, switched: Callable[[], None]) -> None:
        self._state, self._switched = state, switched
        self._memories = MemorySet()
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
        storage = memory_of(value)
        if storage is not None:
            self._memories.add(storage)

    def holds(self, value: object) -> bool:
        """Whether a value in a slot is in such memory, or one of a mesh's members' is."""
        if isinstance(value, Shards):
            return any(self.holds(one) for one in value)
        return value in self._memories

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


def poisoned_by(device: torch.device, text: str) -> Failure:
    """Return the failure of a value that was on a device which is lost."""
    return Failure(0, 0, class_name(torch.AcceleratorError), text, "", f"a value on {device}", "")


class LostDevices:
    """The link that refuses what would run on a lost device. `switched` is called when one is lost."""

    each = True

    def __init__(self, state: State, switched: Callable[[], None]) -> None:
        self._state, self._switched = state, switched
        self._known = len(accelerator.lost)
        lost.watch(self.lose)

    def look(self) -> None:
        """Refuse what is issued from now on to devices that were lost since the last look (the reader)."""
        if self._known != len(accelerator.lost):
            self._known = len(accelerator.lost)
            self._switched()

    def close(self) -> None:
        """Let the session's values go their own way."""
        lost.forget(self.lose)

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what drops a step whose results would be on a lost device."""
        devices = [device for device in step.devices if device in accelerator.lost]
        # A seed is for all places. Nothing draws on a lost device, so nothing is wrong with it there.
        if not devices or step.name == SEED:
            return None

        def refused(slots: Slots, p: Words, i: int) -> int:
            return step.drop(slots, p, i, torch.AcceleratorError(accelerator.lost[devices[0]]))

        return refused

    def lose(self, device: torch.device, text: str) -> None:
        """Poison the values on a device that is lost (any thread)."""
        state, cause = self._state, poisoned_by(device, text)
        for part in state.losing:
            part(device, cause)
        slots = state.slots
        for ref, value in slots.copy().items():
            if isinstance(value, Shards):
                for lane, one in enumerate(value):
                    if is_on(one, device):
                        lost.keep_for_ever(one)
                        value[lane] = Poisoned(cause)
            elif is_on(value, device):
                lost.keep_for_ever(value)
                slots[ref] = Poisoned(cause)


def is_on(value: object, device: torch.device) -> bool:
    """Whether a value in a slot needs a device, to be read or to be let go of."""
    if isinstance(value, torch.Tensor):
        return value.device == device
    if isinstance(value, Tape):
        return any(one.device == device for one in (*value.inputs, *value.outputs))
    if isinstance(value, Poisoned):
        return value.memory is not None and value.memory.device == device
    return isinstance(value, HostCopy) and value.device == device


class Link(Protocol):
    """One thing that stands around instructions.

    `each` says where it stands for a mesh's instruction: around each member's part, or around the whole.
    """

    each: bool

    def around(self, step: Step, run: Run) -> Run | None:
        """Return what runs `step`, by calling `run`; None where the link has nothing to do with it.

        The chain asks again for each step when a link is switched on. So a link keeps in the step what it has
        learnt of it.
        """


class Chain:
    """The links of one session, and the tables of its logs, which hold what they make of each step.

    Invariant: each entry of a log's `templates` was made by `around`. It is the step's own `run` where no
    link concerns the step.
    """

    def __init__(self, state: State, draws: Draws) -> None:
        self._state, self._draws = state, draws
        self.read_only = ReadOnly(state, self.renew)
        # The links stand from the outermost inwards. What may not be written is refused first: it neither
        # draws nor counts. Draws may wait for another session that has the generators, so memory is asked for
        # after that wait.
        # A device that is lost is not asked for anything.
        self.lost_devices = LostDevices(state, self.renew)
        # The time of an instruction is that of all that is done for it.
        self.timing = Timing(state, self.renew)
        self.links: list[Link] = [self.timing, self.read_only, self.lost_devices, draws, Shares(state)]

    def add_own(self, log: State | MeshState) -> None:
        """Put the runtime's own instructions into the table of a new log (the reader)."""
        for word, step in self._state.own.items():
            log.templates[word] = self.around(step)

    def add(self, log: State | MeshState, number: int, step: Step) -> None:
        """Put a new step into the table of a log (the reader)."""
        log.templates[number], log.info[number] = self.around(step), step

    def renew(self) -> None:
        """Make all tables anew: a link was switched on (the reader)."""
        logs: list[State | MeshState] = [self._state, *self._state.meshes.values()]
        for log in logs:
            self.add_own(log)
            # A stream's thread forgets templates meanwhile, and what it has forgotten must not come back.
            with self._state.gate:
                for number, step in log.info.items():
                    log.templates[number] = self.around(step)

    def around(self, step: Step) -> Run:
        """Return what runs a step: its own run, and the links that concern it around that."""
        if step.parts:
            # A program draws as a whole, and its time is noted as a whole. Around each instruction in it
            # stand the other links.
            whole: list[Link] = [self.timing, self._draws]
            inner = [link for link in self.links if link not in whole]
            step.runs = [_around(part, inner) for part in step.parts]
            return _linked(step, whole)
        return _around(step, self.links)


def _around(step: Step, links: Sequence[Link]) -> Run:
    if not step.lanes:
        return _linked(step, links)
    step.runs = [_linked(lane, [link for link in links if link.each]) for lane in step.lanes]
    return _linked(step, [link for link in links if not link.each])


def _linked(step: Step, links: Iterable[Link]) -> Run:
    run: Run = step.run
    for link in reversed([*links]):
        run = link.around(step, run) or run
    return run
