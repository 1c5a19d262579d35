"""Takes part in operations of groups, for a session, and of the groups along a dimension of a mesh.

What is poisoned here, or was dropped, takes part all the same, and says so first. A worker with several
members of a mesh does one operation for each group that some of them are in.

Template: "group::all_reduce", [number of the dimension, options, inputs, outputs]; instruction: template,
sequence, refs of inputs and outputs, the same for every member.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distruntime.errors import InternalError, ProtocolError
from distruntime.wire.codec import failure_from
from distruntime.wire.data_channel import Unfinished
from distruntime.wire.messages import Failure, Message, Plain, Signal, Taint, Tainted

from ..log.state import State, Tell
from ..machine import accelerator
from ..values.mesh_lanes import MeshState, Shards
from ..values.objects import Poisoned, described, memory_of
from ..values.step import Slots, Step, Words, int_word, list_word
from .groups import Groups
from .operation import Collective, TakePart
from .under_way import Begun, UnderWay

Real = Callable[[torch.device], torch.device]
Spread = Callable[[Slots, torch.UntypedStorage, Failure], None]


def along(
    mesh: MeshState, name: str, args: list[Plain], real: Real, take_part: TakePart, spread: Spread
) -> Step:
    """Return what runs an operation along a dimension for a mesh's members here."""
    try:
        number, options, ins, outs = args
        lines = mesh.lines[int_word(number)]
        counts = len(list_word(ins)), len(list_word(outs))
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"{name} of mesh {mesh.number} makes no sense: {error!r}") from error
    rows: dict[int, list[tuple[int, list[Plain]]]] = {}
    for lane, (group, rank) in enumerate(lines):
        rows.setdefault(group, []).append((lane, [rank, mesh.devices[lane], ins, outs]))
    if len(lines) == 1:
        ((group, [(_, row)]),) = rows.items()
        return Collective(name, [group, options, [row]], real, take_part)
    # Every worker takes the groups in one order, so that no two groups wait for each other.
    parts = [
        (
            Collective(name, [g, options, [row for _, row in rows[g]]], real, take_part),
            [k for k, _ in rows[g]],
        )
        for g in sorted(rows)
    ]
    return LaneCollective(name, parts, *counts, take_part, spread)


class LaneCollective(Step):
    """As a `Collective`, for members in one or several groups."""

    joint = True

    def __init__(
        self,
        name: str,
        parts: list[tuple[Collective, list[int]]],
        ins: int,
        outs: int,
        take_part: TakePart,
        spread: Spread,
    ) -> None:
        self.name, self._parts, self._take_part, self._spread = name, parts, take_part, spread
        # The members here are in these groups.
        self.groups = [collective.group for collective, _ in parts]
        self._ins = list(range(2, 2 + ins))
        self._outs = list(range(2 + ins, 2 + ins + outs))
        inplace = bool(parts[0][0].mutates)
        self.reads, self.length = self._ins, 2 + ins + outs
        self.mutates, self.writes = (self._outs, []) if inplace else ([], self._outs)

    def run(self, slots: Slots, p: Words, i: int, /) -> int:
        """Run the instruction at `i`; return the index of the word after it."""
        return self._run(slots, p, i, None)

    def drop(self, slots: Slots, p: Words, i: int, error: BaseException, /) -> int:
        """As `run`, for an instruction that was dropped."""
        return self._run(slots, p, i, error)

    def _run(self, slots: Slots, p: Words, i: int, error: BaseException | None) -> int:
        offsets = [*self._ins, *self._outs]
        lanes = sum(len(mine) for _, mine in self._parts)
        if not self.mutates:
            for k in self.writes:
                slots[p[i + k]] = Shards([None] * lanes)
        for collective, mine in self._parts:
            own: Slots = {}
            words: Words = [p[i], p[i + 1]]
            for lane in mine:
                for k in offsets:
                    words.append(len(words))
                    whole = slots.get(p[i + k])
                    own[words[-1]] = whole[lane] if isinstance(whole, Shards) else whole
            self._take_part(collective, own, words, 0, error, (p, i))
            refs = iter(words[2:])
            for lane in mine:
                for k in offsets:
                    after = own.get(next(refs))
                    if k in self._outs:
                        self._set(slots, p[i + k], lane, after)
        return i + self.length

    def _set(self, slots: Slots, ref: Plain, lane: int, after: object) -> None:
        whole = slots.get(ref)
        if isinstance(whole, Shards) and whole[lane] is not after:
            memory, whole[lane] = memory_of(whole[lane]), after
            if self.mutates and memory is not None and isinstance(after, Poisoned):
                self._spread(slots, memory, after.failure)


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
            try:
                with state.turn.paused():
                    self.groups.close(collective.group)
            except Exception as failed:
                # A channel may be the user's own. No value depends on it, so the master hears of it as of a
                # failed check.
                state.orphans.append(state.failure(words, where, failed, collective.name, ""))
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
        apart = self._set_apart(collective, values) if collective.mutates and state.lent else []
        try:
            # What the others here wait for may be what this one needs of them elsewhere.
            with state.turn.paused():
                if cause is not None:
                    self._say(begun, cause, bool(collective.reads))
                with accelerator.all_in_order(state.mine().native, collective.member_devices):
                    new, calls = collective.perform(group, values, sequence)
            cause = self._under_way.end(begun, calls) or cause
            if cause is None and apart:
                with accelerator.all_in_order(state.mine().native, collective.member_devices):
                    for target, landed in apart:
                        target.copy_(landed)
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

    def _set_apart(
        self, collective: Collective, values: list[object]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put other memory into the place of what is to be written and is lent; return each with that.

        A member whose input is poisoned gives zeros, which are no values. Whoever holds the memory without a
        ref hears nothing of the failure, and keeps the value from before.
        """
        found = []
        for k in collective.mutates:
            target = values[k - 2]
            if isinstance(target, torch.Tensor) and target in self._state.lent:
                values[k - 2] = landed = target.clone(memory_format=torch.contiguous_format)
                found.append((target, landed))
        return found

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
