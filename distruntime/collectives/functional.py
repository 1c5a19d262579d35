"""Collectives that return new tensors, as the RFC wrote them. Autograd knows them.

The backward of each is its adjoint::

    broadcast        sum to the root            reduce, gather     broadcast, scatter
    all_reduce       all_reduce                 all_gather         reduce_scatter
    scatter          gather                     all_to_all         all_to_all, the other way

`group` is what `dr.distributed.new_group` returned. Without one, the group has the tensors' places, in their
order. All functions return at once. The first call for some places blocks until their workers are connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..errors import UsageError
from ..log.handle import Handle, new_value
from ..log.spec import Spec, contiguous
from ..operators.proxies import wrap
from ..tensors.tensor import DistributedTensor
from .adjoints import Collective, Tensors, differentiable, result_of
from .arguments import alike_each, group_for, handle_of, lists_each, one_each, root_of, rows_of, same, tensor
from .group import ProcessGroup, Where
from .operation import issue_operation, require_operation
from .reductions import Op, ReduceOp, reduction_for
from .splits import NO_SPLITS, ByteSplits, byte_splits, splits_of, transposed


class GroupMembers:
    """The members of a group, each with a tensor of its own."""

    __slots__ = ("_group", "size")

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size = group, group.size()

    def perform(self, collective: Collective, tensors: Tensors) -> Tensors:
        """Issue a collective with new results, and return them by rank. The root of a gather has them all."""
        group, size, root = self._group, self.size, collective.root
        given = [handle_of(t) for t in tensors]
        if collective.name == "all_to_all":
            return self._exchange(collective, given)
        spec = result_of(collective, given[0].spec, size)
        one_each = [(h,) for h in given]
        inputs: Sequence[Sequence[Handle]] = one_each
        specs: Sequence[Sequence[Spec]] = [(spec,)] * size
        match collective.name:
            case "broadcast" | "scatter":
                inputs = [given if rank == root else () for rank in range(size)]
            case "reduce":
                specs = [(spec,) if rank == root else () for rank in range(size)]
            case "gather":
                specs = [(spec,) * size if rank == root else () for rank in range(size)]
        return _issue(group, collective, inputs, specs)

    def _exchange(self, collective: Collective, given: Sequence[Handle]) -> Tensors:
        splits = collective.splits
        specs = [
            (contiguous(h.spec, (sum(rows), *h.spec.size[1:])),) for h, rows in zip(given, transposed(splits))
        ]
        sizes = byte_splits(splits, given[0].spec)
        return _issue(self._group, collective, [(h,) for h in given], specs, sizes)

    def others(self, gathered: Tensors) -> Tensors:
        """Return what each member has gathered, without its own row."""
        return [torch.cat([rows[:k], rows[k + 1 :]]) for k, rows in enumerate(gathered)]


def _issue(
    group: ProcessGroup,
    collective: Collective,
    inputs: Sequence[Sequence[Handle]],
    specs: Sequence[Sequence[Spec]],
    splits: ByteSplits = NO_SPLITS,
) -> Tensors:
    """Issue a collective with new results of these specs, and return them, by rank."""
    homes = group.homes
    made = [[new_value(spec, homes[rank]) for spec in row] for rank, row in enumerate(specs)]
    issue_operation(
        group,
        collective.name,
        list(zip(inputs, made)),
        root=collective.root,
        reduction=collective.reduction,
        splits=splits,
    )
    return [wrap(DistributedTensor, handle) for row in made for handle in row]


def _apply(group: ProcessGroup, collective: Collective, tensors: Tensors) -> list[torch.Tensor]:
    return list(differentiable(GroupMembers(group), collective, tensors))


def all_reduce(
    tensors: Sequence[torch.Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return, for each member, the reduction of all members' tensors."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "all_reduce")
    by = reduction_for(found, op, spec.dtype)
    return _apply(found, Collective("all_reduce", by), given)


def broadcast(
    value: torch.Tensor, group: ProcessGroup, src: Where | None = None, group_src: int | None = None
) -> list[torch.Tensor]:
    """Return a copy of `value`, a tensor of one member, for each member.

    `src` need not be given, since `value` lives there.
    """
    given = tensor(value, "value")
    found = group_for(group, [given])
    root = (
        found.rank(given.place)
        if src is None and group_src is None
        else root_of(found, src, group_src, ("src", "group_src"))
    )
    _at_root(found, root, given, "value")
    require_operation(found, "broadcast")
    return _apply(found, Collective("broadcast", root=root), [given])


def reduce(
    tensors: Sequence[torch.Tensor],
    dst: Where | None = None,
    op: Op = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> torch.Tensor:
    """Return the reduction of all members' tensors, at the root."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "reduce")
    root = root_of(found, dst, group_dst, ("dst", "group_dst"))
    by = reduction_for(found, op, spec.dtype)
    return _apply(found, Collective("reduce", by, root), given)[0]


def all_gather(tensors: Sequence[torch.Tensor], group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return, for each member, all members' tensors one after the other along the first dimension."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "all_gather")
    _require_first_dimension(spec)
    return _apply(found, Collective("all_gather"), given)


def gather(
    tensors: Sequence[torch.Tensor],
    dst: Where | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> list[torch.Tensor]:
    """Return all members' tensors, as a list at the root."""
    found, given, _ = alike_each(group, tensors, "tensors")
    require_operation(found, "gather")
    root = root_of(found, dst, group_dst, ("dst", "group_dst"))
    return _apply(found, Collective("gather", root=root), given)


def scatter(parts: Sequence[torch.Tensor], group: ProcessGroup) -> list[torch.Tensor]:
    """Return, for each member, its own of `parts`, a list of tensors of one member."""
    if isinstance(parts, torch.Tensor) or not isinstance(parts, Sequence) or not parts:
        raise UsageError("parts must be a list of tensors, one for each member of the group")
    given = [tensor(t, f"parts[{k}]") for k, t in enumerate(parts)]
    found = group_for(group, given)
    if len(given) != found.size():
        raise UsageError(
            f"parts must have one tensor for each of the {found.size()} members of {found!r}, "
            f"got {len(given)}"
        )
    root = found.rank(given[0].place)
    for k, t in enumerate(given):
        _at_root(found, root, t, f"parts[{k}]")
    require_operation(found, "scatter")
    same(given, "parts")
    return _apply(found, Collective("scatter", root=root), given)


def reduce_scatter(
    tensors: Sequence[torch.Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return, for each member, its part of the reduction, cut along the first dimension."""
    found, given, spec = alike_each(group, tensors, "tensors")
    require_operation(found, "reduce_scatter")
    _require_first_dimension(spec)
    if spec.size[0] % found.size():
        raise UsageError(
            f"tensors must have a first dimension that {found.size()} members can share, got {spec}"
        )
    return _apply(found, Collective("reduce_scatter", reduction_for(found, op, spec.dtype)), given)


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
    input_split_sizes: Sequence[Sequence[int]] | None = None,
    group: ProcessGroup | None = None,
) -> list[torch.Tensor]:
    """Return, for each member, the parts that the members have for it, in one tensor.

    `input_split_sizes[i][j]` rows go from member i to member j; without them, equal parts.
    """
    found, given = one_each(group, tensors, "tensors")
    require_operation(found, "all_to_all")
    splits = splits_of(found, given, input_split_sizes, "input_split_sizes")
    return _apply(found, Collective("all_to_all", splits=splits), given)


def _require_first_dimension(spec: Spec) -> None:
    if not spec.size:
        raise UsageError(
            "tensors must have a first dimension to be put together along, "
            "got zero-dimensional ones: x.reshape(1)"
        )


def _at_root(group: ProcessGroup, root: int, t: DistributedTensor, what: str) -> None:
    if root < 0 or t.place != group.places[root]:
        owner = "a member" if root < 0 else group.places[root]
        raise UsageError(f"{what} is on {t.place}, expected a tensor of {owner} of {group!r}")


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
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
