"""What a lost device means to a session: its values are poisoned, and nothing more is tried there.

Nothing here costs a session whose devices are all right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distruntime.wire.messages import Failure

from ..machine import accelerator, lost
from ..values.functions import SEED, Tape
from ..values.mesh_lanes import Shards
from ..values.objects import Poisoned, class_name
from ..values.step import Run, Slots, Step, Words
from ..values.streams import HostCopy
from .state import State


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
