"""Runs what halos.py has planned: parts of shards go where they are needed, beside the interior's work.

The parts travel on streams of their own. Meanwhile each place's current stream computes the outputs that read
its own shard alone. The slabs around them wait for what they read, and the waits are on the workers. The
gradients of what has travelled go back in the same way, and they are added to where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product

import torch
from torch.autograd.function import FunctionCtx

from ..collectives.copies import move
from ..collectives.groups import groups_of
from ..collectives.partition import Partition
from ..collectives.plans import number
from ..collectives.work import aside
from ..log.handle import Place
from ..streams.stream import Event, current_stream
from .halos import Box, Cell, HaloPlan, Member, Slab, plan_halos, volume
from .windows import Rule

Tensors = list[torch.Tensor]
# From so many outputs of a place on, the exchange runs beside the interior.
_LEAST = 1 << 16
# It computes the outputs of a slab at the k-th place, of the inputs that they read.
Compute = Callable[[int, torch.Tensor, Slab], torch.Tensor]


def windowed(
    xs: Sequence[torch.Tensor],
    on: Partition,
    rules: tuple[Rule, ...],
    compute: Compute,
    *,
    channels: Sequence[int] | None = None,
    overlap: bool | None = None,
) -> Tensors:
    """Return a layer's outputs at each place, of the inputs that are partitioned. Return at once.

    Args:
        rules: which inputs an output reads, for each dimension.
        compute: what the layer does on one place.
        channels: how many channels the outputs of each place have, where that differs from the inputs.
        overlap: whether the exchange runs beside what needs none of it; None: where it may be worth it.
    """
    given: Sequence[torch.Tensor] = on.check(xs, "xs")
    cuts = on.cuts(given)
    plan = plan_halos(cuts, on.shape, rules, overlap is not False)
    beside = _large(plan, channels) if overlap is None else overlap
    if not beside:
        plan = plan_halos(cuts, on.shape, rules, False)
    arrived = dict(zip(plan.travels, _exchanged(given, on, plan, beside)))
    cells = [
        [arrived.get((k, number_of), given[k]) for number_of in range(len(member.cells))]
        for k, member in enumerate(plan.members)
    ]
    # Every place gets its interior first, so that none waits for a master that is busy with another one.
    inner = [
        compute(k, _cut(given[k], member.inner), member.interior) if member.interior else None
        for k, member in enumerate(plan.members)
    ]
    return [
        _empty(given[k], member, None if channels is None else channels[k])
        if member.empty
        else _outputs(k, member, given[k], row, inner[k], compute)
        for k, (member, row) in enumerate(zip(plan.members, cells))
    ]


def _large(plan: HaloPlan, channels: Sequence[int] | None) -> bool:
    """Whether some place computes for long enough to hide an exchange.

    An interior and its slabs are several kernels instead of one, and each of these costs the master time.
    """
    counts = [volume(member.outputs) for member in plan.members]
    if channels is not None:
        own = [max(1, stop - start) for _, (start, stop), *_ in (m.outputs for m in plan.members)]
        counts = [n // inputs * outputs for n, inputs, outputs in zip(counts, own, channels)]
    return max(counts) >= _LEAST


def _own(cell: Cell, t: torch.Tensor) -> torch.Tensor:
    """Return what a cell has of a shard; what has come from elsewhere is that already."""
    return t if tuple(t.shape) == tuple(b - a for a, b in cell.box) else _cut(t, cell.box)


def _empty(x: torch.Tensor, member: Member, channels: int | None) -> torch.Tensor:
    size = [stop - start for start, stop in member.outputs]
    if channels is not None:
        size[1] = channels
    # What has no elements has a gradient all the same.
    return x.reshape(-1)[:0].sum().expand(size)


def _outputs(
    k: int, member: Member, own: torch.Tensor, row: Tensors, inner: torch.Tensor | None, compute: Compute
) -> torch.Tensor:
    if not member.slabs:
        assert inner is not None
        return inner
    cells = [_own(cell, t) for cell, t in zip(member.cells, row)]
    slabs = [compute(k, x, slab) for x, slab in zip(_assembled(member, own, cells), member.slabs)]
    if inner is None:
        return slabs[0]
    found = inner
    for d, before, behind in reversed(member.around):
        parts = [] if before is None else [slabs[before]]
        parts.append(found)
        if behind is not None:
            parts.append(slabs[behind])
        found = torch.cat(parts, d)
    return found


def _cut(t: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (start, stop) in enumerate(box):
        if stop - start != t.shape[d]:
            t = t.narrow(d, start, stop - start)
    return t


# -- from place to place -------------------------------------------------------------------------------------


def _travelling(plan: HaloPlan) -> list[tuple[int, Cell]]:
    """Return what goes to which place, in the order in which it is sent."""
    return [(k, plan.members[k].cells[number_of]) for k, number_of in plan.travels]


class _ExchangeContext(FunctionCtx):
    plan: HaloPlan
    on: Partition
    beside: bool
    sizes: list[torch.Size]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ExchangeContext, plan: HaloPlan, on: Partition, beside: bool, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.on, ctx.beside = plan, on, beside
        ctx.sizes = [x.shape for x in xs]
        ctx.set_materialize_grads(False)
        arrived: Tensors = []

        def run() -> None:
            for target, cell in _travelling(plan):
                arrived.append(move(_cut(xs[cell.source], cell.box), on.homes[target]))

        _beside(on, beside, run)
        return tuple(arrived)

    @staticmethod
    def backward(ctx: _ExchangeContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        on, totals = ctx.on, dict[int, torch.Tensor]()

        def run() -> None:
            for (_, cell), grad in zip(_travelling(ctx.plan), grads):
                if grad is None:
                    continue
                home = on.homes[cell.source]
                if cell.source not in totals:
                    size = ctx.sizes[cell.source]
                    totals[cell.source] = torch.zeros(size, dtype=grad.dtype, device=home.device)
                _cut(totals[cell.source], cell.box).add_(grad.to(home.device))

        _beside(on, ctx.beside, run)
        return None, None, None, *(totals.get(k) for k in range(len(ctx.sizes)))


def _exchanged(xs: Sequence[torch.Tensor], on: Partition, plan: HaloPlan, beside: bool) -> Tensors:
    if not plan.moved:
        return []
    return list(_Exchange.apply(plan, on, beside, *xs))  # type: ignore[no-untyped-call]


def _beside(on: Partition, beside: bool, run: Callable[[], None]) -> None:
    """Call `run` while streams for exchanges are current at the places, or the current ones without
    `beside`.
    """
    if not beside:
        run()
        return
    streams = groups_of(on.session).streams
    for home in on.homes:
        own = streams.get(home.place)
        if own is not None and own.residence.node is not home.node:
            # Another worker is in the node's place.
            del streams[home.place]
    events: dict[Place, Event] = aside(streams, on.homes, False, run)
    for home in on.homes:
        order = home.node.order
        if order is not None and not order.implicit:
            place = home.place
            events[place].wait(current_stream(place.node, place.local_device))


# -- on one place --------------------------------------------------------------------------------------------


class _AssembleContext(FunctionCtx):
    member: Member
    sizes: list[torch.Size]


class _Assemble(torch.autograd.Function):
    """The inputs of slabs, out of the cells of a grid. Autograd would make a gradient of a whole shard for
    each slab; here there is one.
    """

    @staticmethod
    def forward(ctx: _AssembleContext, member: Member, *cells: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.member, ctx.sizes = member, [cell.shape for cell in cells]
        ctx.set_materialize_grads(False)
        return tuple(_joined(member, slab, cells, 0, (), ()) for slab in member.slabs)

    @staticmethod
    def backward(ctx: _AssembleContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        member = ctx.member
        parts: list[list[tuple[Box, torch.Tensor]]] = [[] for _ in member.cells]
        for slab, grad in zip(member.slabs, grads):
            if grad is None:
                continue
            for at in product(*map(_placed, slab.cells)):
                cell = number(tuple(k for k, _, _, _ in at), member.grid)
                box = tuple((start, start + n) for _, start, n, _ in at)
                parts[cell].append((box, _cut(grad, tuple((o, o + n) for _, _, n, o in at))))
        return None, *(_sum(found, size) for found, size in zip(parts, ctx.sizes))


def _assembled(member: Member, own: torch.Tensor, cells: Tensors) -> Tensors:
    """Return what each slab of a place reads. Outputs may read nothing at all."""
    if not cells:
        (slab,) = member.slabs
        return [own.reshape(-1)[:0].reshape([stop - start for start, stop in slab.reads])]
    return list(_Assemble.apply(member, *cells))  # type: ignore[no-untyped-call]


def _joined(
    member: Member, slab: Slab, cells: Sequence[torch.Tensor], d: int, at: tuple[int, ...], box: Box
) -> torch.Tensor:
    """Return the part of a slab's inputs in the cells whose first numbers are `at`."""
    if d == len(member.grid):
        return _cut(cells[number(at, member.grid)], box)
    if volume(slab.reads) == 0:
        return cells[0].new_empty([stop - start for start, stop in slab.reads])
    parts = [
        _joined(member, slab, cells, d + 1, (*at, k), (*box, (start, start + n)))
        for k, start, n in slab.cells[d]
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, d)


def _placed(row: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int, int]]:
    """Return a slab's cells along a dimension, each with where it begins in the slab."""
    begins = accumulate((n for _, _, n in row), initial=0)
    return [(k, start, n, begin) for (k, start, n), begin in zip(row, begins)]


def _sum(parts: list[tuple[Box, torch.Tensor]], size: torch.Size) -> torch.Tensor | None:
    """Return the gradient of a cell of that size: each part is added where it lies."""
    if not parts:
        return None
    box, first = parts[0]
    if len(parts) == 1 and tuple(b - a for a, b in box) == tuple(size):
        return first
    total = first.new_zeros(size)
    for box, part in parts:
        _cut(total, box).add_(part)
    return total
