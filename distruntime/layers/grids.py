"""Weights that are cut along inputs and outputs at once, over a grid of places.

Inputs are broadcast along the rows of the grid. Each place multiplies its part of the weight, and the partial
outputs are summed along the columns. Weights never move, but for copies to the parts of space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..errors import NotSupportedError, UsageError
from .channels import Form, Locally, Mixing, add_bias
from .weights import Copies, partition, require_balanced


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
