"""What the stages of a plan do with tensors, as one autograd function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx

from ..log.handle import Residence
from . import functional
from .arguments import handle_of
from .copies import move
from .groups import groups_of
from .operation import Operands, issue_operation
from .partition import Partition
from .plan import AllSum, Box, Concatenation, Exchange, Moves, Plan, Size, Spread, Stage

Shards = Sequence[torch.Tensor]
Tensors = list[torch.Tensor]


def _home(t: torch.Tensor) -> Residence:
    return handle_of(t).place


def _at(t: torch.Tensor, home: Residence) -> torch.Tensor:
    """Return a copy of `t` at a place."""
    if _home(t) is home:
        return t.clone(memory_format=torch.contiguous_format)
    copy: torch.Tensor = move(t, home)
    return copy


def _cut(t: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, start, length in box:
        t = t.narrow(dim, start, length)
    return t


def _in_order(outs: dict[int, torch.Tensor]) -> Tensors:
    return [outs[k] for k in range(len(outs))]


def _spread(stage: Spread, xs: Tensors, to: Partition) -> Tensors:
    outs: dict[int, torch.Tensor] = {}
    for one, many, with_it in stage.rows:
        homes = [to.homes[k] for k in many]
        value = xs[one] if with_it >= 0 else _at(xs[one], homes[0])
        if len(many) > 1:
            values = functional.broadcast(value, groups_of(to.session).of(homes))
        else:
            values = [value if value is not xs[one] else _at(value, homes[0])]
        outs.update(zip(many, values))
    return _in_order(outs)


def _collect(stage: Spread, xs: Tensors, to: Partition) -> Tensors:
    outs: dict[int, torch.Tensor] = {}
    for one, many, with_it in stage.rows:
        total = xs[many[0]]
        if len(many) > 1:
            total = functional.reduce([xs[k] for k in many], group_dst=max(with_it, 0))
        outs[one] = total if len(many) > 1 and with_it >= 0 else _at(total, to.homes[one])
    return _in_order(outs)


def _all_sum(stage: AllSum, xs: Tensors) -> Tensors:
    outs: dict[int, torch.Tensor] = {}
    for row in stage.rows:
        given = [xs[k] for k in row]
        outs.update(zip(row, functional.all_reduce(given) if len(row) > 1 else [given[0].clone()]))
    return _in_order(outs)


def _concatenate(stage: Concatenation, xs: Tensors) -> Tensors:
    """Put each row's tensors together, or sum and cut them up.

    Where lengths differ they are padded, as data channels take tensors of one length only.
    """
    outs: dict[int, torch.Tensor] = {}
    for row, lengths in stage.rows:
        given = [xs[k] for k in row]
        if len(row) == 1:
            values = [given[0].clone()]
        elif stage.axis == 0 and min(lengths) == max(lengths):
            values = functional.reduce_scatter(given) if stage.sums else functional.all_gather(given)
        elif stage.sums:
            values = _share_padded(given, stage.axis, lengths)
        else:
            values = _join_padded(given, stage.axis, lengths)
        outs.update(zip(row, values))
    return _in_order(outs)


def _join_padded(given: Tensors, axis: int, lengths: Size) -> Tensors:
    padded = [_padded(t, axis, n, max(lengths)).unsqueeze(0) for t, n in zip(given, lengths)]
    rows = [stack.unbind(0) for stack in functional.all_gather(padded)]
    return [torch.cat([part.narrow(axis, 0, n) for part, n in zip(parts, lengths)], axis) for parts in rows]


def _share_padded(given: Tensors, axis: int, lengths: Size) -> Tensors:
    cut = [t.split(list(lengths), axis) for t in given]
    stacks = [
        torch.stack([_padded(part, axis, n, max(lengths)) for part, n in zip(parts, lengths)])
        for parts in cut
    ]
    sums = functional.reduce_scatter(stacks)
    return [total.squeeze(0).narrow(axis, 0, n).contiguous() for total, n in zip(sums, lengths)]


def _padded(t: torch.Tensor, axis: int, length: int, to: int) -> torch.Tensor:
    if length == to:
        return t
    return torch.cat([t, t.new_zeros([*t.shape[:axis], to - length, *t.shape[axis + 1 :]])], axis)


def _move(stage: Moves, xs: Tensors, to: Partition) -> Tensors:
    if stage.exchange is not None:
        outs = [
            torch.empty(size, dtype=xs[0].dtype, device=home.device)
            for size, home in zip(stage.sizes, to.homes)
        ]
        if _exchanged(stage.exchange, xs, outs, to):
            return outs
    outs = []
    for size, home, pieces in zip(stage.sizes, to.homes, stage.arriving):
        if pieces and not pieces[0].put:
            out, pieces = _at(_cut(xs[pieces[0].source], pieces[0].taken), home), pieces[1:]
        else:
            out = torch.empty(size, dtype=xs[0].dtype, device=home.device)
        for piece in pieces:
            part, into = _cut(xs[piece.source], piece.taken), _cut(out, piece.put)
            if stage.sums:
                into.add_(part if _home(part) is home else move(part, home))
            else:
                into.copy_(part)
        outs.append(out)
    return outs


def _exchanged(plan: Exchange, xs: Tensors, outs: Tensors, to: Partition) -> bool:
    """Issue one all_to_all, from parts of the shards right into parts of the new ones.

    Return False if the data channel has none.
    """
    rows = [
        ([_cut(xs[p.source], p.taken) for p in m.leaving], [_cut(outs[p.target], p.put) for p in m.arriving])
        for m in plan.members
    ]
    group = groups_of(to.session).of([_home((leaving or arriving)[0]) for leaving, arriving in rows])
    if "all_to_all" not in group.capabilities.operations:
        return False
    # A place that sends nothing puts in nothing: no rows of what it gets.
    rows = [(leaving or [arriving[0].narrow(0, 0, 0)], arriving) for leaving, arriving in rows]
    parts: list[Operands] = [
        ([handle_of(t) for t in leaving], [handle_of(t) for t in arriving]) for leaving, arriving in rows
    ]
    issue_operation(group, "all_to_all", parts, inplace=True, splits=plan.splits)
    return True


def _run_stage(stage: Stage, xs: Tensors, to: Partition) -> Tensors:
    match stage:
        case Moves():
            return _move(stage, xs, to)
        case Spread():
            return _collect(stage, xs, to) if stage.sums else _spread(stage, xs, to)
        case Concatenation():
            return _concatenate(stage, xs)
        case AllSum():
            return _all_sum(stage, xs)


class _LinearContext(FunctionCtx):
    plan: Plan
    source: Partition
    target: Partition


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LinearContext, plan: Plan, source: Partition, target: Partition, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.source, ctx.target = plan, source, target
        values = list(xs)
        for stage in plan.stages:
            values = _run_stage(stage, values, target)
        return tuple(values)

    @staticmethod
    def backward(ctx: _LinearContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *applied(ctx.plan.adjoint, ctx.target, ctx.source, grads)


def applied(plan: Plan, source: Partition, target: Partition, xs: Shards) -> list[torch.Tensor]:
    if not plan.stages:
        return list(xs)
    return list(_Linear.apply(plan, source, target, *xs))  # type: ignore[no-untyped-call]
