"""`Linear` and `Embedding` over partitioned tensors. Each is torch's layer of the same name in all but its
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..collectives import primitives
from ..collectives.partition import Partition
from ..errors import UsageError, without_our_frames
from .channels import home_of, mixing_of
from .weights import Copies, ShardedWeights, partition, require_default

Tensors = list[torch.Tensor]


class Linear(ShardedWeights, torch.nn.Linear):
    """`torch.nn.Linear` over shards of (..., features), cut along any dimension.

    Five forms follow from what is cut. If features are not, each place computes its rows. With `P_y`, inputs
    are broadcast to places that each compute some outputs, or places that each have some inputs compute
    partial outputs, which are summed. If both are cut over the same places, either the inputs are gathered,
    or the sums of partial outputs are scattered.

    Args:
        P: how the inputs are partitioned: it has as many dimensions as they have, and the last one counts
            features. The other arguments are torch's.
        P_y: another partition for the outputs, which differs in the last dimension: where only the inputs or
            only the outputs have their features cut.
        form: where both have, "gather" or "scatter"; by default what moves less.
        fused: so many weights stand one after the other, as those of q, k and v do. Each of them is cut, so a
            place's outputs are its part of each: `q, k, v = y.chunk(3, -1)`.
        cut_weights: whether weights live in parts on the places that use them, not whole on the first place.
        P_w: a grid (parts of outputs, parts of inputs) of the places where the parts of the weight live. `P`
            cuts the inputs, and `P_y` the outputs, so, and nothing else is cut.

    Raises:
        UsageError: a partition or shards that do not fit.
    """

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        form: str | None = None,
        fused: int = 1,
        cut_weights: bool = False,
        P_w: Partition | None = None,
    ) -> None:
        dim, sizes = partition(P).dim - 1, (in_features, out_features)
        if P_y is not None:
            partition(P_y, "P_y")
        mixing = mixing_of(P, P_y, P_w, dim, sizes, 0, 2, form, "Linear", fused=fused)
        cut = cut_weights or P_w is not None
        super().__init__(in_features, out_features, bias, device=home_of(mixing, cut), dtype=dtype)
        self.P, self.mixing = P, mixing
        if cut:
            self._cut_up({"weight": mixing.weight, "bias": mixing.bias})

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given = self.P.check(xs, "xs")
        size = tuple(sum(lengths) for lengths in self.P.cuts(given))
        if len(size) != self.P.dim or size[-1] != self.in_features:
            raise UsageError(
                f"Linear takes tensors of {self.P.dim} dimensions, as its partition has, with "
                f"{self.in_features} features; the shards are parts of {size}"
            )
        return self.mixing(given, self.weight, self.bias, _multiplied)


def _multiplied(xs: Tensors, on: Partition, weights: Tensors, biases: Tensors | None) -> Tensors:
    return [
        F.linear(x, weight, None if biases is None else biases[k])
        for k, (x, weight) in enumerate(zip(xs, weights))
    ]


class Embedding(ShardedWeights, torch.nn.Embedding):
    """`torch.nn.Embedding` over shards of numbers, cut along any dimension.

    The outputs have one dimension more. With `P_y` it is cut: each place then looks up its columns.

    Args:
        P: how the numbers are partitioned, as many dimensions as they have; the other arguments are torch's.
        P_y: a partition for the outputs, with one dimension more.
        cut_weights: as in `Linear`.

    Raises:
        UsageError: a partition that does not fit. NotSupportedError: `max_norm`, `sparse`.
    """

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        cut_weights: bool = False,
    ) -> None:
        require_default(max_norm, None, "max_norm", "Embedding")
        require_default(sparse, False, "sparse", "Embedding")
        target = partition(P) if P_y is None else partition(P_y, "P_y")
        if P_y is not None and P_y.shape[:-1] != P.shape:
            raise UsageError(
                f"Embedding: P_y has the dimensions of P, {P.shape}, and one more for the columns, "
                f"got {P_y.shape}"
            )
        home = torch.device("meta") if cut_weights else target.homes[0].device
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=home, dtype=dtype)
        self.P, self.P_y = P, P_y
        self._copies = Copies(target, [None, None if P_y is None else P_y.dim - 1])
        if cut_weights:
            self._cut_up({"weight": self._copies})
        self._source = None if P_y is None else Partition(P.places, (*P.shape, 1))

    def _draw(self, part: torch.Tensor, name: str) -> None:
        part.normal_()
        if self.padding_idx is not None:
            part[self.padding_idx].fill_(0)

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given: Tensors = list(self.P.check(xs, "xs"))
        if self.P_y is not None and self._source is not None:
            given = primitives.broadcast(given, self._source, self.P_y)
        weights = self._copies(self.weight)
        return [F.embedding(x, weight, self.padding_idx) for x, weight in zip(given, weights)]
