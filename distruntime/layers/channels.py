"""Channels and features that are cut: who has which part of the weight, and what is summed or joined.

The convolutions and `Linear` share this. Only what one place does with its part differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..errors import NotSupportedError, UsageError
from .weights import Copies, require_balanced

Form = Literal["local", "broadcast", "sum", "gather", "scatter", "groups", "grid"]
# It computes the outputs at all places of a partition, of inputs, weights and biases there.
Locally = Callable[
    [list[torch.Tensor], Partition, list[torch.Tensor], list[torch.Tensor] | None], list[torch.Tensor]
]


class Mixing:
    """How a layer that mixes the entries of dimension `dim` works on a partition that cuts this dimension.

    ========= ============= ============== ==========================================================
    form      inputs cut    outputs cut    what moves
    ========= ============= ============== ==========================================================
    local     no            no             nothing but weights
    broadcast no            yes, over P_y  the inputs go to all places of P_y
    sum       yes, over P   no             partial outputs are summed on the places of P_y
    gather    yes           yes, over P    each place gets all inputs, and has rows of the weight
    scatter   yes           yes, over P    each place has columns of the weight; sums are shared out
    groups    yes           yes, over P    channels of groups that have outputs at several places
    grid      yes, over P   yes, over P_y  see grids.py
    ========= ============= ============== ==========================================================

    Args:
        rows: the dimension of the weight that counts outputs; the other one of the first two counts inputs.
        dims: how many dimensions the weight has.
        groups: how many groups there are. With more than one, dimension 0 of the weight is cut.
        fused: so many weights stand one after the other along the outputs, and a place has a part of each.
    """

    def __init__(
        self,
        P: Partition,
        P_y: Partition | None,
        dim: int,
        sizes: tuple[int, int],
        rows: int,
        dims: int,
        form: str | None,
        layer: str,
        groups: int = 1,
        fused: int = 1,
    ) -> None:
        self.source, self.target, self.dim, self.layer = P, P if P_y is None else P_y, dim, layer
        self.form = _form(P, P_y, dim, sizes, form, layer, groups)
        cut = 0 if groups > 1 else rows
        by_rows: list[int | None] = [dim if d == cut else None for d in range(dims)]
        by_columns: list[int | None] = [dim if d == 1 - rows else None for d in range(dims)]
        # The partial sums are made where the inputs are. All other forms compute where the outputs are.
        self.place = P if self.form in ("sum", "scatter") else self.target
        if fused > 1 and (self.form in ("sum", "scatter") or sizes[1] % fused):
            raise UsageError(
                f"{layer} with fused={fused} cuts {fused} weights of one size by their outputs, so it takes "
                f'a multiple of {fused} outputs, and form="gather" or a P_y that is cut; got {sizes[1]} and '
                f'form "{self.form}"'
            )
        if self.form in ("sum", "scatter"):
            self.weight, self.bias = Copies(self.place, by_columns), Copies(self.target, [dim])
        else:
            self.weight = Copies(self.place, by_rows, fused)
            self.bias = Copies(self.target, [dim], fused)

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        weight: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | Sequence[torch.Tensor] | None,
        local: Locally,
    ) -> list[torch.Tensor]:
        """Return the outputs' shards. Return at once."""
        given: list[torch.Tensor] = list(self.source.check(xs, "xs"))
        if self.dim < self.source.dim and self.form != "groups":
            require_balanced(self.source.cuts(given)[self.dim], self.layer, self.dim)
        weights = self.weight(weight)
        after = self.form in ("sum", "scatter")
        biases = None if bias is None else self.bias(_at(bias, self.target) if after else bias)
        match self.form:
            case "broadcast":
                given = primitives.broadcast(given, self.source, self.target)
            case "gather":
                given = primitives.all_gather(given, self.source, self.dim)
        outs = local(given, self.place, weights, None if after else biases)
        match self.form:
            case "sum":
                outs = primitives.sum_reduce(outs, self.source, self.target)
            case "scatter":
                outs = primitives.reduce_scatter(outs, self.source, self.dim)
        if after and biases is not None:
            outs = [add_bias(y, b, self.dim) for y, b in zip(outs, biases)]
        return outs


def _at(bias: torch.Tensor | Sequence[torch.Tensor], on: Partition) -> torch.Tensor | Sequence[torch.Tensor]:
    # Parts are there already.
    return bias.to(on.homes[0].device) if isinstance(bias, torch.Tensor) else bias


def add_bias(y: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `y` with a number added to each entry of a dimension."""
    return y + bias.reshape([-1 if d == dim else 1 for d in range(y.dim())])


def _form(
    P: Partition,
    P_y: Partition | None,
    dim: int,
    sizes: tuple[int, int],
    form: str | None,
    layer: str,
    groups: int,
) -> Form:
    before = P.shape[dim] if dim < P.dim else 1
    if groups > 1 and (P_y is not None or form is not None):
        raise NotSupportedError(
            f"{layer} with groups={groups} cuts its outputs over the places of its inputs, and each place "
            "gets the channels of its groups: leave out P_y and form; dr.nn.Repartition cuts in another way"
        )
    if P_y is not None:
        after = P_y.shape[dim] if dim < P_y.dim else 1
        rest = [
            tuple(p.shape[d] if d < p.dim and d != dim else 1 for d in range(max(P.dim, P_y.dim)))
            for p in (P, P_y)
        ]
        if P.dim != P_y.dim or rest[0] != rest[1] or min(before, after) != 1 or form is not None:
            raise UsageError(
                f"{layer}: P_y differs from P, {P.shape}, in dimension {dim} only, and one of the two does "
                f"not cut that; got {P_y.shape}"
                + (f" and form={form!r}, which is for layers without P_y" if form is not None else "")
            )
        return "sum" if before > 1 else "broadcast"
    if form not in (None, "gather", "scatter"):
        raise UsageError(f'{layer}: form is "gather" or "scatter", got {form!r}')
    if before == 1:
        return "local"
    if groups > 1:
        return "groups"
    # What is gathered is all inputs, and what is scattered is all outputs: the fewer of them move.
    return "scatter" if form == "scatter" or (form is None and sizes[1] < sizes[0]) else "gather"
