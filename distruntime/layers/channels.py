"""Channels and features that are cut: who has which part of the weight, and what is summed or joined.

The convolutions and `Linear` share this. Only what one place does with its part differs. A weight may be cut
along inputs and outputs at once, over a grid of places: inputs are broadcast along the rows of the grid, each
place multiplies its part of the weight, and the partial outputs are summed along the columns. Weights never
move, but for copies to the parts of space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..errors import NotSupportedError, UsageError
from .weights import Copies, partition, require_balanced

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
    grid      yes, over P   yes, over P_y  see `Grid`
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


class Grid:
    """How a layer that mixes the entries of dimension `dim` works on a grid of weights.

    Args:
        P_w: the grid (parts of outputs, parts of inputs, parts along each dimension of space).
        rows: the dimension of the weight that counts outputs; the other one of the first two counts inputs.
        dims: how many dimensions the weight has.
    """

    form: Form = "grid"

    def __init__(
        self, P: Partition, P_y: Partition, P_w: Partition, dim: int, rows: int, dims: int, layer: str
    ) -> None:
        self.source, self.target, self.dim, self.layer = P, P_y, dim, layer
        after, before, *space = P_w.shape if P_w.dim > 1 else (0, 0)
        # Linear has its features last, and a convolution has its space behind its channels.
        sides = [(1,) * dim + (n, *space) for n in (before, after)]
        if [P.shape, P_y.shape] != sides:
            of_space = (", parts of space", ", and space alike") if dims > 2 else ("", "")
            raise UsageError(
                f"{layer}: P_w is (parts of outputs, parts of inputs{of_space[0]}), and P and P_y cut "
                f"dimension {dim} so{of_space[1]}. For P {P.shape} and P_y {P_y.shape} it is "
                f"{_fitting(P, P_y, dim)}, got {P_w.shape}"
            )
        self.place = P_w
        self._inputs = Partition(P.places, (1, before, *space))
        self._outputs = Partition(P_y.places, (after, 1, *space))
        each = len(P_w) // after
        self._rows = [Partition(P_w.places[k * each : (k + 1) * each], P.shape) for k in range(after)]
        self.weight = Copies(P_w, [0 if d == rows else 1 if d == 1 - rows else None for d in range(dims)])
        self.bias = Copies(P_y, [dim])

    def __call__(
        self,
        xs: Sequence[torch.Tensor],
        weight: torch.Tensor | Sequence[torch.Tensor],
        bias: torch.Tensor | Sequence[torch.Tensor] | None,
        local: Locally,
    ) -> list[torch.Tensor]:
        """Return the outputs' shards. Return at once."""
        given = self.source.check(xs, "xs")
        require_balanced(self.source.cuts(given)[self.dim], self.layer, self.dim)
        copies = primitives.broadcast(given, self._inputs, self.place)
        weights = self.weight(weight)
        partial: list[torch.Tensor] = []
        for row in self._rows:
            own = slice(len(partial), len(partial) + len(row))
            partial += local(copies[own], row, weights[own], None)
        outs = primitives.sum_reduce(partial, self.place, self._outputs)
        if bias is None:
            return outs
        return [add_bias(y, b, self.dim) for y, b in zip(outs, self.bias(bias))]


def mixing_of(
    P: Partition,
    P_y: Partition | None,
    P_w: Partition | None,
    dim: int,
    sizes: tuple[int, int],
    rows: int,
    dims: int,
    form: str | None,
    layer: str,
    groups: int = 1,
    fused: int = 1,
) -> Mixing | Grid:
    """Return how a layer works: on a grid with `P_w`, otherwise as `Mixing` says."""
    if P_w is None:
        return Mixing(P, P_y, dim, sizes, rows, dims, form, layer, groups, fused)
    if P_y is None or form is not None or groups > 1 or fused > 1:
        raise NotSupportedError(
            f"{layer} with P_w takes P_y, without form, groups and fused; got P_y={P_y}, form={form!r}, "
            f"groups={groups}, fused={fused}: cut_weights=True keeps parts of the weight with those"
        )
    return Grid(P, P_y, partition(P_w, "P_w"), dim, rows, dims, layer)


def home_of(mixing: Mixing | Grid, cut: bool) -> torch.device:
    """Return where a layer's whole weights live; parts are made later, and the whole has no memory."""
    return torch.device("meta") if cut else mixing.place.homes[0].device


def _fitting(P: Partition, P_y: Partition, dim: int) -> str:
    alike = all(a == b for d, (a, b) in enumerate(zip(P.shape, P_y.shape)) if d != dim)
    if P.dim != P_y.dim or P.dim <= dim or not alike:
        return "nothing: P and P_y differ in that dimension only"
    if any(n > 1 for n in P.shape[:dim]):
        return f"nothing: no dimension before {dim} is cut"
    return str((P_y.shape[dim], P.shape[dim], *P.shape[dim + 1 :]))
