"""Collectives that return new tensors, as the RFC wrote them, and can be differentiated.

The backward of each is its adjoint::

    broadcast        sum to the root            reduce, gather     broadcast, scatter
    all_reduce       all_reduce                 all_gather         reduce_scatter
    scatter          gather                     all_to_all         all_to_all, the other way

`group` is what `dr.new_group` returned; without one, the group of the tensors' places, in their order. All return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UsageError
from ..log.handle import Handle, Storage, next_ref
from ..log.spec import Spec, contiguous
from ..operators.proxies import wrap
from ..tensors.tensor import DistributedTensor
from .arguments import ReduceOp, group_for, lists_each, one_each, reduction, root_of, rows_of, same, tensor
from .group import ProcessGroup
from .operation import Part, issue_operation, require_operation

Tensor = DistributedTensor
Splits = list[list[int]]


# -- below autograd: proxies in, proxies out -------------------------------------------------------------------------------------


def _new(group: ProcessGroup, rank: int, spec: Spec) -> Handle:
    return Handle(next_ref(), spec, group.homes[rank], Storage(spec))


def _run(
    group: ProcessGroup,
    operation: str,
    inputs: Sequence[Sequence[Any]],
    specs: Sequence[Sequence[Spec]],
    **options: Any,
) -> list[list[Any]]:
    """Issue an operation with new outputs, of these specs; return them, by rank."""
    handles = [[_new(group, rank, spec) for spec in row] for rank, row in enumerate(specs)]
    parts: list[Part] = [([t._handle for t in row], outs) for row, outs in zip(inputs, handles)]
    issue_operation(group, operation, parts, **options)
    return [[wrap(DistributedTensor, handle) for handle in row] for row in handles]


def _longer(spec: Spec, times: int) -> Spec:
    return contiguous(spec, (spec.size[0] * times, *spec.size[1:]))


def _shorter(spec: Spec, parts: int) -> Spec:
    return contiguous(spec, (spec.size[0] // parts, *spec.size[1:]))


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)  # torch leaves it untyped


# -- with their adjoints ---------------------------------------------------------------------------------------------------------


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: tuple[str, float | None], *tensors: Any) -> Any:
        spec = contiguous(tensors[0]._handle.spec)
        outs = [
            row[0]
            for row in _run(
                group, "all_reduce", [[t] for t in tensors], [[spec]] * group.size(), op=op[0], factor=op[1]
            )
        ]
        ctx.group, ctx.op = group, op
        if op[0] in ("PRODUCT", "MIN", "MAX"):
            ctx.save_for_backward(*tensors, *outs)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group: ProcessGroup = ctx.group
        name, _ = ctx.op
        if name in ("SUM", "AVG", "PREMUL_SUM"):
            return None, None, *_apply(_AllReduce, group, ctx.op, *grads)
        saved = ctx.saved_tensors
        total = _apply(_AllReduce, group, ("SUM", None), *grads)
        pairs = list(zip(total, saved[: group.size()], saved[group.size() :]))
        if name == "PRODUCT":
            # Not the product divided by the member's own: where that is zero, the gradient need not be.
            rows = _apply(_AllGather, group, *(x.unsqueeze(0) for _, x, _ in pairs))
            others = [torch.cat([row[:k], row[k + 1 :]]).prod(0) for k, row in enumerate(rows)]
            return None, None, *(g * o for g, o in zip(total, others))
        chosen = [
            (x == y).to(g.dtype) for g, x, y in pairs
        ]  # members that are equal share, as torch.amax's gradient does
        ways = _apply(_AllReduce, group, ("SUM", None), *chosen)
        return None, None, *(g * c / n for (g, _, _), c, n in zip(pairs, chosen, ways))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, value: Any) -> Any:
        ctx.group, ctx.root = group, root
        spec = contiguous(value._handle.spec)
        inputs = [[value] if rank == root else [] for rank in range(group.size())]
        return tuple(row[0] for row in _run(group, "broadcast", inputs, [[spec]] * group.size(), root=root))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, _apply(_Reduce, ctx.group, ctx.root, ("SUM", None), *grads)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, op: tuple[str, float | None], *tensors: Any) -> Any:
        ctx.group, ctx.root, ctx.op = group, root, op
        spec = contiguous(tensors[0]._handle.spec)
        specs = [[spec] if rank == root else [] for rank in range(group.size())]
        return _run(group, "reduce", [[t] for t in tensors], specs, root=root, op=op[0], factor=op[1])[root][
            0
        ]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        scale = _linear(ctx.op, ctx.group.size(), "reduce")
        return (
            None,
            None,
            None,
            *_apply(_Broadcast, ctx.group, ctx.root, grad if scale == 1 else grad * scale),
        )


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Any) -> Any:
        ctx.group = group
        spec = _longer(tensors[0]._handle.spec, group.size())
        return tuple(
            row[0] for row in _run(group, "all_gather", [[t] for t in tensors], [[spec]] * group.size())
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_apply(_ReduceScatter, ctx.group, ("SUM", None), *grads)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, op: tuple[str, float | None], *tensors: Any) -> Any:
        ctx.group, ctx.op = group, op
        spec = _shorter(tensors[0]._handle.spec, group.size())
        rows = _run(
            group, "reduce_scatter", [[t] for t in tensors], [[spec]] * group.size(), op=op[0], factor=op[1]
        )
        return tuple(row[0] for row in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale = _linear(ctx.op, ctx.group.size(), "reduce_scatter")
        return (
            None,
            None,
            *_apply(_AllGather, ctx.group, *(grads if scale == 1 else [g * scale for g in grads])),
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, *tensors: Any) -> Any:
        ctx.group, ctx.root = group, root
        spec = contiguous(tensors[0]._handle.spec)
        specs = [[spec] * group.size() if rank == root else [] for rank in range(group.size())]
        return tuple(_run(group, "gather", [[t] for t in tensors], specs, root=root)[root])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_apply(_Scatter, ctx.group, ctx.root, *grads)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, root: int, *parts: Any) -> Any:
        ctx.group, ctx.root = group, root
        spec = contiguous(parts[0]._handle.spec)
        inputs = [list(parts) if rank == root else [] for rank in range(group.size())]
        return tuple(row[0] for row in _run(group, "scatter", inputs, [[spec]] * group.size(), root=root))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *_apply(_Gather, ctx.group, ctx.root, *grads)


class _AllToAll(torch.autograd.Function):
    """Of one tensor per member, cut along its first dimension: `splits[i][j]` rows go from member i to member j."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, splits: Splits, *tensors: Any) -> Any:
        ctx.group, ctx.splits = group, splits
        back = [list(column) for column in zip(*splits)]
        specs = [[contiguous(t._handle.spec, (sum(rows), *t.shape[1:]))] for t, rows in zip(tensors, back)]
        rows = _run(
            group,
            "all_to_all",
            [[t] for t in tensors],
            specs,
            splits=byte_splits(splits, tensors[0]._handle.spec),
        )
        return tuple(row[0] for row in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            None,
            None,
            *_apply(_AllToAll, ctx.group, [list(column) for column in zip(*ctx.splits)], *grads),
        )


def byte_splits(
    splits: Splits, spec: Spec
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return, by rank, the bytes that go to each member, and that come from each, of rows of tensors like `spec`."""
    row = spec.dtype.itemsize * torch.Size(spec.size[1:]).numel()
    out = tuple(tuple(n * row for n in rows) for rows in splits)
    return out, tuple(zip(*out))


def _linear(op: tuple[str, float | None], size: int, operation: str) -> float:
    name, factor = op
    if name == "SUM":
        return 1
    if name == "AVG":
        return 1 / size
    if name == "PREMUL_SUM":
        assert factor is not None
        return factor
    raise NotImplementedError(
        f"the gradient of {operation} by ReduceOp.{name} is not defined; SUM, AVG and PREMUL_SUM have one, and all_reduce"
    )


# -- what users call -------------------------------------------------------------------------------------------------------------


def all_reduce(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return, for each member, the reduction of all members' tensors."""
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "all_reduce")
    spec = same(given, "tensors")
    return list(_apply(_AllReduce, found, reduction(found, op, spec.dtype), *given))


def broadcast(
    value: torch.Tensor, group: ProcessGroup, src: Any = None, group_src: int | None = None
) -> list[torch.Tensor]:
    """Return a copy of `value`, a tensor of one member, for each member. `src` need not be said: it is where `value` lives."""
    given = tensor(value, "value")
    found = group_for(group, [given])
    root = (
        found.rank(given.place)
        if src is None and group_src is None
        else root_of(found, src, group_src, ("src", "group_src"))
    )
    _at_root(found, root, given, "value")
    require_operation(found, "broadcast")
    return list(_apply(_Broadcast, found, root, given))


def reduce(
    tensors: Sequence[torch.Tensor],
    dst: Any = None,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> torch.Tensor:
    """Return the reduction of all members' tensors, at the root."""
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "reduce")
    spec = same(given, "tensors")
    root = root_of(found, dst, group_dst, ("dst", "group_dst"))
    result: torch.Tensor = _apply(_Reduce, found, root, reduction(found, op, spec.dtype), *given)
    return result


def all_gather(tensors: Sequence[torch.Tensor], group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return, for each member, all members' tensors one after the other along the first dimension."""
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "all_gather")
    _first_dimension(given, same(given, "tensors"))
    return list(_apply(_AllGather, found, *given))


def gather(
    tensors: Sequence[torch.Tensor],
    dst: Any = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> list[torch.Tensor]:
    """Return all members' tensors, as a list at the root."""
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "gather")
    same(given, "tensors")
    return list(_apply(_Gather, found, root_of(found, dst, group_dst, ("dst", "group_dst")), *given))


def scatter(parts: Sequence[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    """Return, for each member, its own of `parts`, a list of tensors of one member."""
    if isinstance(parts, torch.Tensor) or not isinstance(parts, Sequence) or not parts:
        raise UsageError("parts must be a list of tensors, one for each member of the group")
    given = [tensor(t, f"parts[{k}]") for k, t in enumerate(parts)]
    found = group_for(group, given)
    if len(given) != found.size():
        raise UsageError(
            f"parts must have one tensor for each of the {found.size()} members of {found!r}, got {len(given)}"
        )
    root = found.rank(given[0].place)
    for k, t in enumerate(given):
        _at_root(found, root, t, f"parts[{k}]")
    require_operation(found, "scatter")
    same(given, "parts")
    return list(_apply(_Scatter, found, root, *given))


def reduce_scatter(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return, for each member, its part of the reduction of all members' tensors, cut along the first dimension."""
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "reduce_scatter")
    spec = same(given, "tensors")
    _first_dimension(given, spec)
    if spec.size[0] % found.size():
        raise UsageError(
            f"tensors must have a first dimension that {found.size()} members can share, got {spec}"
        )
    return list(_apply(_ReduceScatter, found, reduction(found, op, spec.dtype), *given))


def all_to_all(
    tensors: Sequence[Sequence[torch.Tensor]], group: ProcessGroup | None = None
) -> list[list[torch.Tensor]]:
    """Return, for each member, what every member has for it: row j of the result is column j of `tensors`."""
    first = rows_of(tensors, "tensors")
    found = group_for(group, first)
    given = lists_each(found, tensors, "tensors", first)
    flat = [[t.reshape(-1) for t in row] for row in given]
    splits = [[t.numel() for t in row] for row in flat]
    if len({t.dtype for row in given for t in row}) > 1:
        raise UsageError("tensors must be of one dtype")
    outs = all_to_all_single([torch.cat(row) for row in flat], splits, group=found)
    rows = []
    for j, out in enumerate(outs):
        pieces = out.split([given[i][j].numel() for i in range(found.size())])
        rows.append([piece.view(given[i][j].shape) for i, piece in enumerate(pieces)])
    return rows


def all_to_all_single(
    tensors: Sequence[torch.Tensor],
    input_split_sizes: Splits | None = None,
    group: ProcessGroup | None = None,
) -> list[torch.Tensor]:
    """Return, for each member, the parts that the members have for it, one after the other along the first dimension.

    `input_split_sizes[i][j]` rows go from member i to member j; without them, equal parts.
    """
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "all_to_all")
    splits = splits_of(found, given, input_split_sizes, "input_split_sizes")
    return list(_apply(_AllToAll, found, splits, *given))


def splits_of(group: ProcessGroup, tensors: Sequence[DistributedTensor], splits: Any, name: str) -> Splits:
    """Return how many rows of each member's tensor go to each; raise `UsageError` where that does not fit."""
    size, rest = group.size(), tuple(tensors[0].shape[1:])
    for rank, t in enumerate(tensors):
        if t.dim() == 0 or tuple(t.shape[1:]) != rest or t.dtype != tensors[0].dtype:
            raise UsageError(
                f"tensors must be alike but for their first dimension: [0] is {tensors[0]._handle.spec}, [{rank}] is {t._handle.spec}"
            )
    if splits is None:
        for rank, t in enumerate(tensors):
            if t.shape[0] % size:
                raise UsageError(
                    f"[{rank}] has {t.shape[0]} rows, which {size} members cannot share equally: say {name}="
                )
        return [[t.shape[0] // size] * size for t in tensors]
    require_splits(group, splits, name)
    for rank, (t, row) in enumerate(zip(tensors, splits)):
        if any(type(n) is not int or n < 0 for n in row) or sum(row) != t.shape[0]:
            raise UsageError(
                f"{name}[{rank}] must be {size} numbers that sum to the {t.shape[0]} rows of the tensor, got {row!r}"
            )
    return [list(row) for row in splits]


def require_splits(group: ProcessGroup, splits: Any, name: str) -> None:
    """Raise `UsageError` unless there is a number for each pair of members."""
    size = group.size()
    rows = (
        [len(row) if isinstance(row, Sequence) else -1 for row in splits]
        if isinstance(splits, Sequence)
        else []
    )
    if rows != [size] * size:
        raise UsageError(
            f"{name} must have {size} rows of {size} numbers, one for each pair of members, got {splits!r}"
        )


def _first_dimension(tensors: Sequence[DistributedTensor], spec: Spec) -> None:
    if not spec.size:
        raise UsageError(
            "tensors must have a first dimension to be put together along, got zero-dimensional ones: x.reshape(1)"
        )


def _at_root(group: ProcessGroup, root: int, t: DistributedTensor, what: str) -> None:
    if root < 0 or t.place != group.places[root]:
        raise UsageError(
            f"{what} is on {t.place}, expected a tensor of {'a member' if root < 0 else group.places[root]} of {group!r}"
        )


__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
