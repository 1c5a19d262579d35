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
from .channels import Mixing
from .weights import Copies, partition, require_default

Tensors = list[torch.Tensor]


class Linear(torch.nn.Linear):
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
    ) -> None:
        dim, sizes = partition(P).dim - 1, (in_features, out_features)
        if P_y is not None:
            partition(P_y, "P_y")
        mixing = Mixing(P, P_y, dim, sizes, 0, 2, form, "Linear")
        super().__init__(in_features, out_features, bias, device=mixing.home, dtype=dtype)
        self.P, self.mixing = P, mixing

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


class Embedding(torch.nn.Embedding):
    """`torch.nn.Embedding` over shards of numbers, cut along any dimension.

    The outputs have one dimension more. With `P_y` it is cut: each place then looks up its columns.

    Args:
        P: how the numbers are partitioned, as many dimensions as they have; the other arguments are torch's.
        P_y: a partition for the outputs, with one dimension more.

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
    ) -> None:
        require_default(max_norm, None, "max_norm", "Embedding")
        require_default(sparse, False, "sparse", "Embedding")
        target = partition(P) if P_y is None else partition(P_y, "P_y")
        if P_y is not None and P_y.shape[:-1] != P.shape:
            raise UsageError(
                f"Embedding: P_y has the dimensions of P, {P.shape}, and one more for the columns, "
                f"got {P_y.shape}"
            )
        home = target.homes[0].device
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=home, dtype=dtype)
        self.P, self.P_y = P, P_y
        self._copies = Copies(target, [None, None if P_y is None else P_y.dim - 1])
        self._source = None if P_y is None else Partition(P.places, (*P.shape, 1))

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given: Tensors = list(self.P.check(xs, "xs"))
        if self.P_y is not None and self._source is not None:
            given = primitives.broadcast(given, self._source, self.P_y)
        weights = self._copies(self.weight)
        return [F.embedding(x, weight, self.padding_idx) for x, weight in zip(given, weights)]
