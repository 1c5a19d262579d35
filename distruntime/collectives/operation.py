"""Issuing one operation of a group: an instruction in the log of each node that has members, at one moment of the program.

Program order is the same in every log, so members cannot disagree about what comes next, and the earliest operation that has not run can
always run: no two wait for each other, whatever groups and streams are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from ..errors import NotSupportedError, UsageError
from ..log.handle import Handle, Residence
from ..log.issue import issue_joint
from ..log.line import user_line
from ..log.log import relieve
from ..log.moment import at_one_moment
from ..log.read_only import require_writable
from ..log.spec import layout
from ..wire.data_channel import Reduction
from .group import ProcessGroup, groups_of
from .splits import NO_SPLITS, ByteSplits

# The first are what a member puts in. The second are its results: new values, or tensors that are written.
Part = tuple[Sequence[Handle], Sequence[Handle]]

# A group remembers so many operations.
_MOST = 1 << 12


def issue_operation(
    group: ProcessGroup,
    operation: str,
    parts: Sequence[Part],
    *,
    inplace: bool = False,
    root: int = -1,
    reduction: Reduction | None = None,
    splits: ByteSplits = NO_SPLITS,
) -> None:
    """Issue an operation; `parts` are the members', by rank. Block only while a window is full.

    The caller has checked what it can check; members of lost nodes are not issued to, and fail with their node.
    """
    group.require()
    line = user_line()
    op, factor = (None, None) if reduction is None else (reduction.name, reduction.factor)
    if inplace:
        require_writable([h.storage for _, outs in parts for h in outs], line)
    key = (
        operation,
        inplace,
        root,
        op,
        factor,
        splits,
        tuple((tuple(h.spec for h in ins), tuple(h.spec for h in outs)) for ins, outs in parts),
        None
        if operation != "copy"
        else tuple(_home(group, rank, part).place.device for rank, part in enumerate(parts)),
    )
    compiled = group.templates.get(key)
    if compiled is None:
        if inplace:
            _require_written(operation, parts)
        if len(group.templates) >= _MOST:
            group.templates.clear()
        compiled = group.templates[key] = _compile(
            group, operation, parts, [root, op, factor, inplace, *splits]
        )

    def issue() -> None:
        group.require()  # again: another thread may have closed it, and after that no worker knows it
        sequence, begun = group.sequence() & 0x3FFFFFFF, False
        try:
            for node, ranks in group.own.items():
                words: list[Any] = [0, sequence]
                operands: list[Handle] = []
                outputs: list[Handle] = []
                for rank in ranks:
                    ins, outs = parts[rank]
                    words += [h.ref for h in ins]
                    words += [h.ref for h in outs]
                    operands += ins
                    outputs += outs
                written = [h.storage for h in outputs] if inplace else []
                homes = [_home(group, rank, parts[rank]) for rank in ranks]
                # What has tags of its own may overtake; what has not keeps the group's order, whatever streams it is on.
                serial = group.serial[node] if operation != "copy" or not group.capabilities.tags else None
                if not group.capabilities.concurrent:
                    serial = groups_of(group.session).launches(node)
                words[0], begun = node.template(*compiled[node]), True
                issue_joint(
                    words,
                    [] if inplace else outputs,
                    [*operands, *outputs] if inplace else operands,
                    written,
                    homes,
                    serial,
                    line,
                )
        except (
            BaseException
        ) as error:  # a signal's handler that raises: some members would wait for the others for half an hour
            if begun:
                groups_of(group.session).end(
                    group,
                    f"{operation} was issued to some of its members only, as {type(error).__name__} came between",
                )
            raise

    at_one_moment(group.session, issue)
    for node in group.own:
        relieve(node)


def _require_written(operation: str, parts: Sequence[Part]) -> None:
    """Raise `UsageError` for an output that cannot be written: found out on its worker, it would break the group."""
    for _, outs in parts:
        for handle in outs:
            if handle.spec.expanded:
                raise UsageError(
                    "unsupported operation: more than one element of the written-to tensor refers to a single memory location: "
                    f"{operation} into {handle.spec} with strides {handle.spec.stride}. Clone it first"
                )


def _compile(
    group: ProcessGroup, operation: str, parts: Sequence[Part], options: list[Any]
) -> dict[Any, tuple[bytes, list[Any]]]:
    """Return, by node, what `Node.template` takes."""
    compiled = {}
    for node, ranks in group.own.items():
        members = [
            [
                rank,
                _home(group, rank, parts[rank]).place.device,
                [layout(h.spec) for h in parts[rank][0]],
                [layout(h.spec) for h in parts[rank][1]],
            ]
            for rank in ranks
        ]
        fields = [f"group::{operation}", [group.number, options, members], {}, 0]
        compiled[node] = msgpack.packb(fields), fields
    return compiled


def _home(group: ProcessGroup, rank: int, part: Part) -> Residence:
    """Return where a member's tensors are: its place, but for copies, whose group stands for all devices of two nodes."""
    ins, outs = part
    return ins[0].place if ins else outs[0].place if outs else group.homes[rank]


def require_operation(group: ProcessGroup, operation: str) -> None:
    """Raise `NotSupportedError` if the group's data channel lacks an operation."""
    if operation not in group.capabilities.operations:
        have = ", ".join(sorted(group.capabilities.operations)) or "nothing"
        raise NotSupportedError(
            f"the data channel {group.backend!r} has no {operation}, only {have}: make a group with another, dr.new_group(..., backend=...)"
        )
