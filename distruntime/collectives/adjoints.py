"""Collectives that autograd knows: the backward of each is its adjoint, for groups and for lines of a mesh.

The members of a group have a tensor each. The members of a mesh have one tensor for all of them. `Members`
hides which it is, so that this module can say once what follows from what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.autograd.function import FunctionCtx

from ..errors import NotSupportedError
from ..log.spec import Spec, contiguous
from ..wire.data_channel import Reduction
from .reductions import LINEAR, SUM
from .splits import Splits, transposed

Tensors = Sequence[torch.Tensor]

_ADJOINTS = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "gather": "scatter",
    "scatter": "gather",
    "all_to_all": "all_to_all",
}
_REDUCING = ("reduce", "reduce_scatter")


class Collective(NamedTuple):
    """One collective, as its members agree on it."""

    name: str
    reduction: Reduction | None = None
    root: int = -1
    splits: Splits = ()

    def adjoint(self) -> Collective:
        """Return the collective of the gradients: it sums where this one copies, and the other way round."""
        name = _ADJOINTS[self.name]
        return Collective(name, SUM if name in _REDUCING else None, self.root, transposed(self.splits))


class Members(Protocol):
    """Members that can do collectives together, below autograd."""

    @property
    def size(self) -> int:
        """How many members do a collective together."""

    def perform(self, collective: Collective, tensors: Tensors) -> Tensors:
        """Issue a collective of these tensors, and return its results, which are new. Return at once."""

    def others(self, gathered: Tensors) -> Tensors:
        """Return, for each tensor that has a row for each member, the rows of the other members."""


class _Context(FunctionCtx):
    members: Members
    collective: Collective
    saved_tensors: tuple[torch.Tensor, ...]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, members: Members, collective: Collective, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = tuple(members.perform(collective, tensors))
        ctx.members, ctx.collective = members, collective
        by = collective.reduction
        if collective.name == "all_reduce" and by is not None and by.name not in LINEAR:
            ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        members, collective = ctx.members, ctx.collective
        if collective.name == "all_reduce":
            return None, None, *_all_reduce_backward(members, collective, grads, ctx.saved_tensors)
        scale = _scale(collective, members.size)
        scaled = grads if scale == 1 else [g * scale for g in grads]
        return None, None, *differentiable(members, collective.adjoint(), scaled)


def differentiable(members: Members, collective: Collective, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Issue a collective and return its results. They are part of the autograd graph. Return at once."""
    results: tuple[torch.Tensor, ...]
    results = _Collective.apply(members, collective, *tensors)  # type: ignore[no-untyped-call]
    return results


def _all_reduce_backward(
    members: Members, collective: Collective, grads: Tensors, saved: tuple[torch.Tensor, ...]
) -> Tensors:
    assert collective.reduction is not None
    name = collective.reduction.name
    if name in LINEAR:
        # Every result depends on every tensor by one factor, so the map is its own adjoint.
        return differentiable(members, collective, grads)
    total_of = Collective("all_reduce", SUM)
    totals = differentiable(members, total_of, grads)
    tensors, results = saved[: len(grads)], saved[len(grads) :]
    if name == "PRODUCT":
        # A product divided by the member's own factor is wrong where that factor is zero.
        gathered = differentiable(members, Collective("all_gather"), [x.unsqueeze(0) for x in tensors])
        return [g * rows.prod(0) for g, rows in zip(totals, members.others(gathered))]
    if name not in ("MIN", "MAX"):
        raise NotSupportedError(
            f"the gradient of all_reduce by ReduceOp.{name} is not defined; "
            "SUM, AVG, PREMUL_SUM, PRODUCT, MIN and MAX have one"
        )
    # Members that are equal share the gradient, as in the gradient of torch.amax.
    chosen = [(x == y).to(g.dtype) for x, y, g in zip(tensors, results, totals)]
    ways = differentiable(members, total_of, chosen)
    return [g * c / n for g, c, n in zip(totals, chosen, ways)]


def _scale(collective: Collective, size: int) -> float:
    """Return the factor by which a collective multiplies what it sums."""
    by = collective.reduction
    if by is None or by.name == "SUM":
        return 1
    if by.name == "AVG":
        return 1 / size
    if by.factor is not None:
        return by.factor
    raise NotSupportedError(
        f"the gradient of {collective.name} by ReduceOp.{by.name} is not defined; "
        "SUM, AVG and PREMUL_SUM have one, and all_reduce"
    )


def result_of(collective: Collective, given: Spec, size: int) -> Spec:
    """Return the spec of a result, where each of `size` members puts in a tensor like `given`.

    The results of an all_to_all differ in size from member to member, so this function does not know them.
    """
    if collective.name == "all_gather":
        return contiguous(given, (given.size[0] * size, *given.size[1:]) if given.size else (size,))
    if collective.name == "reduce_scatter":
        return contiguous(given, (given.size[0] // size, *given.size[1:]))
    return contiguous(given)
