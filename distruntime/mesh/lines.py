"""Collectives along a dimension of a mesh, or along several: every line of members does its own.

`mesh.lines("tp")` returns the lines of a dimension, and `mesh.lines()` one line of all members. A function
here takes lines and one tensor on their mesh. It issues one instruction for all members, and returns one
tensor on the mesh at once. Autograd knows the functions; the gradient of each is its adjoint, as in
`dr.functional`.

Every function raises:
    UsageError: `lines` are no lines of a mesh. PlacementError: the tensor is not on the mesh of these lines.
    NotSupportedError: the members' data channel lacks the operation, or its reduction for this dtype.
    NodeFailed: the mesh has lost a member, or a line has broken since `mesh.lines` returned it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..collectives.adjoints import Collective, differentiable
from ..collectives.reductions import Op
from ..errors import UsageError, without_our_frames
from ..tensors.uneven import UnevenTensor
from .attention import attention
from .line_groups import Lines
from .operation import LineMembers, even_splits, on_mesh_of, permuted, reduction_named, require_lines


@without_our_frames
def all_reduce(lines: Lines, x: torch.Tensor, op: Op | str = "SUM") -> torch.Tensor:
    """Return the reduction of each line's tensors, at each of its members. Return at once.

    Args:
        op: a `dr.distributed.ReduceOp`, or its name: "sum", "avg", "product", "min", "max", "band", "bor" or
            "bxor".

    The result has the shape of `x`.
    """
    given = _operand(lines, x)
    return _apply(lines, Collective("all_reduce", reduction_named(op)), given)


@without_our_frames
def all_gather(lines: Lines, x: torch.Tensor) -> torch.Tensor:
    """Return each line's tensors in one, along the first dimension, at each member. Return at once.

    A tensor of shape (n, ...) becomes one of shape (n * lines.size, ...), and a scalar one of shape
    (lines.size,).
    """
    given = _operand(lines, x)
    return _apply(lines, Collective("all_gather"), given if given.dim() else given.reshape(1))


@without_our_frames
def reduce_scatter(lines: Lines, x: torch.Tensor, op: Op | str = "SUM") -> torch.Tensor:
    """Return each member's part of the reduction, cut along the first dimension. Return at once.

    A tensor of shape (n, ...) becomes one of shape (n / lines.size, ...). Raises `NotSupportedError` unless
    `lines.size` divides n. `op` is as for `all_reduce`. Only sums have gradients: "sum", "avg" and what
    `dr.distributed.premul_sum` returns.
    """
    given = _operand(lines, x)
    return _apply(lines, Collective("reduce_scatter", reduction_named(op)), given)


@without_our_frames
def all_to_all(lines: Lines, x: torch.Tensor, output: Sequence[int], inputs: Sequence[int]) -> torch.Tensor:
    """Return the rows that the members of a line have for each member, in one tensor. Return at once.

    Each member sends `inputs[k]` rows to member k of its line, and gets `output[k]` rows from it. Raises
    `NotSupportedError` unless all these numbers are equal and the rows are all that `x` has.
    """
    given = _operand(lines, x)
    return _apply(lines, Collective("all_to_all", splits=even_splits(lines, given, output, inputs)), given)


@without_our_frames
def broadcast(lines: Lines, x: torch.Tensor, root: int) -> torch.Tensor:
    """Return, at each member, the tensor of the member of rank `root` in its line. Return at once.

    Raises `UsageError` for a rank that the lines do not have.
    """
    given = _operand(lines, x)
    return _apply(lines, Collective("broadcast", root=root), given)


@without_our_frames
def shift(lines: Lines, x: torch.Tensor, by: int = 1, *, wrap: bool = True) -> torch.Tensor:
    """Return, at each member, the tensor of the member `by` ranks before it in its line. Return at once.

    All members send and receive at the same time. The first ones get the last ones' tensors; with `wrap`
    False they get zeros. A negative `by` goes the other way, and the gradient goes back the same way.

    Raises `UsageError` for a `by` that is no whole number.
    """
    given = _operand(lines, x)
    if isinstance(by, bool) or not isinstance(by, int):
        raise UsageError(f"tensors are shifted by a whole number of ranks, got {by!r}")
    size = lines.size
    there = permuted(lines, given, [(rank + by) % size for rank in range(size)])
    if wrap or not by:
        return there
    ranks = lines.ranks()
    inside = ranks >= by if by > 0 else ranks < size + by
    return torch.where(inside, there, torch.zeros_like(there))


def _apply(lines: Lines, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    return differentiable(LineMembers(lines), collective, [x])[0]


def _operand(lines: Lines, x: torch.Tensor) -> torch.Tensor:
    require_lines(lines)
    if isinstance(x, UnevenTensor) and x._residence is lines.mesh_log.residence():
        return x
    return on_mesh_of(lines, x)


__all__ = [
    "Lines",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "broadcast",
    "reduce_scatter",
    "shift",
]
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
