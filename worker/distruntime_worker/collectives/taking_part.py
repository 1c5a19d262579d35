"""Takes part in operations of groups, for a session.

What is poisoned here, or was dropped, takes part all the same, and says so first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distruntime.errors import InternalError, ProtocolError
from distruntime.wire.codec import failure_from
from distruntime.wire.data_channel import Unfinished
from distruntime.wire.messages import Failure, Message, Signal, Taint, Tainted

from ..log.state import State, Tell
from ..machine import accelerator
from ..values.objects import Poisoned, described
from ..values.step import Slots, Words, int_word
from .groups import Groups
from .operation import Collective
from .under_way import Begun, UnderWay


class Joint:
    """A session's part in its groups."""

    def __init__(self, state: State, tell: Tell, signal: Callable[[Signal], None]) -> None:
        self._state, self._tell, self._signal = state, tell, signal
        # This is the worker's number, once there are groups.
        self.node = -1
        self._under_way = UnderWay(state, self._tell_of)
        self.groups = Groups(state.devices, self._report, self._under_way.broken)

    def _tell_of(self, begun: Begun, cause: Failure) -> None:
        begun.group.tell_of_taint(begun.sequence, cause, self.node, self._tell)

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
            with state.turn.paused():
                self.groups.close(collective.group)
            return i + collective.length
        values = [slots.get(p[i + k]) for k in range(2, collective.length)]
        inputs = [slots.get(p[i + k]) for k in collective.reads]
        cause = next((v.failure for v in inputs if isinstance(v, Poisoned)), None)
        if cause is None and (error is not None or any(v is None for v in inputs)):
            error = error or InternalError(f"an operand of {collective.name} is not here")
            cause = state.failure(words, where, error, collective.name, described(inputs))
        # `p` may be the words of one group's part, which no segment has.
        log, position = state.log_number(words), state.work(words).segment.start + where
        begun = Begun(
            group,
            sequence,
            collective.name,
            (state.work(words).segment.seq, position),
            state.reached(words, where),
            bool(collective.writes or collective.mutates),
        )
        # What takes nothing in carries nothing.
        cause = self._under_way.begin(begun, cause, log if collective.reads else None)
        new: list[torch.Tensor] = []
        calls: list[Unfinished] = []
        try:
            # What the others here wait for may be what this one needs of them elsewhere.
            with state.turn.paused():
                if cause is not None:
                    self._say(begun, cause, bool(collective.reads))
                with accelerator.all_in_order(state.mine().native, collective.member_devices):
                    new, calls = collective.perform(group, values, sequence)
            cause = self._under_way.end(begun, calls) or cause
        except Exception as broken:
            cause = cause or state.failure(words, where, broken, collective.name, described(inputs))
            # Otherwise the others would wait for it.
            group.fail(f"a member could not take part: {broken}")
            if not collective.writes and not collective.mutates:
                state.orphans.append(cause)
            cause = self._under_way.end(begun, ()) or cause
        if cause is not None:
            state.poison(collective, slots, p, i, cause)
        else:
            for k, value in zip(collective.writes, new):
                slots[p[i + k]] = value
        return i + collective.length

    def _say(self, begun: Begun, cause: Failure, carries: bool) -> None:
        """Tell the other workers of a poisoned input; return when they know."""
        assert begun.told is not None
        try:
            if carries:
                begun.group.taint(begun.sequence, cause, self.node, self._tell)
        finally:
            begun.told.set()

    def receive(self, node: int, message: Message) -> None:
        """Act on what another worker says (the thread of the workers' channel)."""
        match message:
            case Signal():
                self._signal(message)
            case Taint(group=number, sequence=sequence, failure=fields):
                # The master would drop a worker that passes on anything else.
                cause, group = failure_from(fields), self.groups.get(number)
                if group is not None and node not in group.nodes:
                    raise ProtocolError(f"Taint for group {number} by node {node}, which is not in it")
                self._under_way.taint(
                    group, (number, sequence), cause, lambda: self._tell(node, Tainted(number, sequence))
                )
            case _:
                self.groups.receive(node, message)
