"""Operations along a dimension of a mesh: one instruction in the mesh's log, in which every line of members does its own.

A mesh of shape (2, 4) has two lines along its last dimension, of four members each, and four along its first. Each line is a group of
the members' data channel; the instruction names the dimension, and each worker knows which groups its members are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgpack

from .errors import NotSupportedError
from .first import relieve
from .group import ProcessGroup, groups_of
from .handle import Handle, Residence, Storage, next_ref
from .issue import issue_joint
from .joint import contiguous, layout, require_operation
from .line import user_line
from .spec import NO_TENSOR, Spec
from .team import Team
from .tensor import DistributedTensor
from .wire.messages import OpenLines
from .wrap import wrap


class Lines:
    """The lines of a mesh along one or several of its dimensions: groups of equal size that cover the members."""

    def __init__(
        self, team: Team, number: int, rows: Sequence[Sequence[int]], backend: str | None = None, timeout: float | None = None
    ) -> None:
        session = team.session
        self.team, self.number, self.rows = team, number, [list(row) for row in rows]
        self.size = len(rows[0])
        homes = [session.places.residence(place, numbered=False) for place in team.members]
        groups = groups_of(session)
        self.groups: list[ProcessGroup] = [groups.open([homes[k] for k in row]) for row in rows]
        self.capabilities = self.groups[0].capabilities
        self.sequence = count(1).__next__
        self.serial = Storage(NO_TENSOR)
        at = {k: [group.number, rank] for group, row in zip(self.groups, rows) for rank, k in enumerate(row)}
        for node, ranks in team.ranks.items():
            session.post(node, OpenLines(team.number, number, [at[k] for k in ranks]))

    def run(
        self,
        operation: str,
        inputs: Sequence[DistributedTensor],
        specs: Sequence[Spec] = (),
        into: Sequence[DistributedTensor] = (),
        *,
        root: int = -1,
        op: str | None = None,
        factor: float | None = None,
        splits: tuple[Any, Any] = ((), ()),
    ) -> list[Any]:
        """Issue an operation with new results of these specs, or into tensors that are written. Return the results at once."""
        team = self.team
        team.session.require_open()
        team.require_alive()
        for group in self.groups:
            group.require()
        if operation != "copy":
            require_operation(self.groups[0], operation)
        home: Residence = inputs[0]._handle.place if inputs else into[0]._handle.place
        made = [Handle(next_ref(), spec, home, Storage(spec)) for spec in specs]
        ins, outs = [t._handle for t in inputs], made or [t._handle for t in into]
        for handle in outs if not made else ():
            if handle.spec.expanded:
                raise NotSupportedError(f"{operation} into {handle.spec} that is expanded: several elements share memory; clone it first")
        options = [root, op, factor, not made, *splits]
        fields = [f"group::{operation}", [self.number, options, [layout(h.spec) for h in ins], [layout(h.spec) for h in outs]], {}, 0]
        line = user_line()
        relieve(team)
        with team.lock:
            number = team.template(msgpack.packb(fields), fields)
            words = [number, self.sequence() & 0x3FFFFFFF, *(h.ref for h in ins), *(h.ref for h in outs)]
            written = [h.storage for h in outs] if not made else []
            serial = self.serial if self.capabilities.concurrent else groups_of(team.session).launches(team)
            issue_joint(words, made, ins if made else [*ins, *outs], written, [home], serial, line)
        return [wrap(DistributedTensor, handle) for handle in made] if made else list(into)


def longer(spec: Spec, times: int) -> Spec:
    """Return the spec of so many tensors, one after the other along the first dimension."""
    return contiguous(spec, (spec.size[0] * times, *spec.size[1:]) if spec.size else (times,))


def all_reduce(lines: Lines, x: DistributedTensor, op: str = "SUM", factor: float | None = None) -> Any:
    """Return the sum, or another reduction, of each line's tensors, at each of its members."""
    return lines.run("all_reduce", [x], [contiguous(x._handle.spec)], op=op, factor=factor)[0]


def all_gather(lines: Lines, x: DistributedTensor) -> Any:
    """Return each line's tensors one after the other along the first dimension, at each of its members."""
    return lines.run("all_gather", [x], [longer(x._handle.spec, lines.size)])[0]


def reduce_scatter(lines: Lines, x: DistributedTensor, op: str = "SUM") -> Any:
    """Return each member's part of the reduction of its line's tensors, cut along the first dimension."""
    size = x.shape[0]
    if size % lines.size:
        raise NotSupportedError(f"reduce_scatter cuts the first dimension into {lines.size} equal parts, got size {size}")
    return lines.run("reduce_scatter", [x], [contiguous(x._handle.spec, (size // lines.size, *x.shape[1:]))], op=op)[0]


def all_to_all(lines: Lines, x: DistributedTensor, output: Sequence[int], inputs: Sequence[int]) -> Any:
    """Return what a line's members have for each other: rows `inputs[k]` of each go to member k, `output[k]` come from it."""
    spec = contiguous(x._handle.spec, (sum(output), *x.shape[1:]))
    row = spec.nbytes // max(1, spec.size[0]) if spec.size[0] else x._handle.spec.nbytes // max(1, x.shape[0])
    table = [[n * row for n in inputs]] * lines.size, [[n * row for n in output]] * lines.size
    return lines.run("all_to_all", [x], [spec], splits=table)[0]


def broadcast(lines: Lines, x: DistributedTensor, root: int) -> Any:
    """Return the tensor of each line's member of rank `root`, at each of its members."""
    return lines.run("broadcast", [x], [contiguous(x._handle.spec)], root=root)[0]
