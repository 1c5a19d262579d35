"""Takes part in operations of groups, for a session.

What is poisoned here, or was dropped, takes part all the same, and says so first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distruntime.errors import InternalError
from distruntime.wire.messages import Message, Signal

from ..log.state import State, Tell
from ..values.objects import Poisoned, described
from ..values.step import Slots, Words, int_word
from .groups import Groups
from .operation import Collective


class Joint:
    """A session's part in its groups."""

    def __init__(self, state: State, tell: Tell, signal: Callable[[Signal], None]) -> None:
        self._state, self._tell, self._signal = state, tell, signal
        # This is the worker's number, once there are groups.
        self.node = -1
        self.groups = Groups(state.devices, self._report)

    def _report(self, message: Message) -> None:
        self._state.send(message, None)

    def take_part(
        self,
        collective: Collective,
        slots: Slots,
        p: Words,
        i: int,
        error: BaseException | None = None,
        at: tuple[Words, int] | None = None,
    ) -> int:
        """Run one operation; with `error`, as if this worker's members' inputs had failed with it.

        `at` is the instruction that a failure names, where that is not the one at `i` of `p`.
        """
        words, where = at or (p, i)
        state, group, sequence = self._state, self.groups[collective.group], int_word(p[i + 1])
        if collective.operation == "close":
            self.groups.close(collective.group)
            return i + collective.length
        values = [slots.get(p[i + k]) for k in range(2, collective.length)]
        inputs = [slots.get(p[i + k]) for k in collective.reads]
        cause = next((v.failure for v in inputs if isinstance(v, Poisoned)), None)
        if cause is None and (error is not None or any(v is None for v in inputs)):
            error = error or InternalError(f"an operand of {collective.name} is not here")
            cause = state.failure(words, where, error, collective.name, described(inputs))
        new: list[torch.Tensor] = []
        try:
            # What the others here wait for may be what this one needs of them elsewhere.
            with state.turn.paused():
                if cause is not None and collective.reads:
                    group.taint(sequence, cause, self.node, self._tell)
                new = collective.perform(group, values, sequence)
        except Exception as broken:
            cause = cause or state.failure(words, where, broken, collective.name, described(inputs))
            # Otherwise the others would wait for it.
            group.fail(f"a member could not take part: {broken}")
            if not collective.writes and not collective.mutates:
                state.orphans.append(cause)
        cause = group.first_cause(sequence) or cause
        if cause is not None:
            state.poison(collective, slots, p, i, cause)
        else:
            for k, value in zip(collective.writes, new):
                slots[p[i + k]] = value
        return i + collective.length

    def receive(self, node: int, message: Message) -> None:
        """Act on what another worker says (the thread of the workers' channel)."""
        if isinstance(message, Signal):
            self._signal(message)
        else:
            self.groups.receive(node, message, self._tell)
