"""Operations along a dimension of a mesh, on a worker with several of its members: one for each group that
some of them are in.

Template: "group::all_reduce", [number of the dimension, options, inputs, outputs]; instruction: template,
sequence, refs of inputs and outputs, the same for every member.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distruntime.errors import ProtocolError
from distruntime.wire.messages import Failure, Plain

from ..values.mesh_lanes import MeshState, Shards
from ..values.objects import Poisoned, memory_of
from ..values.step import Slots, Step, Words, int_word, list_word
from .operation import Collective, TakePart

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
