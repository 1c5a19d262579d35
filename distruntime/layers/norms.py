"""Norms over partitioned tensors. Each is torch's layer of the same name in all but its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plans import coordinates, number
from ..errors import UsageError, without_our_frames
from .weights import Copies, partition, require_balanced, widened

Tensors = list[torch.Tensor]


def moments(xs: Sequence[torch.Tensor], on: Partition, dims: Sequence[int]) -> tuple[Tensors, Tensors]:
    """Return means and variances over `dims`, at each place, with these dimensions kept as 1.

    Differentiable, and so is the all-reduce. Places whose shards are empty count for nothing.
    """
    cut = [d for d in dims if d < on.dim and on.shape[d] > 1]
    own = [_own(x, dims) for x in xs]
    if not cut:
        return [mean for _, mean, _ in own], [variance for _, _, variance in own]
    parts = tuple(on.shape[d] for d in cut)
    # Each place has a row of its own among those that it shares the cut dimensions with.
    rows = [number(tuple(index[d] for d in cut), parts) for index in coordinates(on.shape)]
    stacks = [
        _row(torch.stack([mean.new_full(mean.shape, count), mean, variance]), row, prod(parts))
        for (count, mean, variance), row in zip(own, rows)
    ]
    merged = [_merged(stack) for stack in primitives.all_sum_reduce(stacks, on, cut)]
    return [mean for mean, _ in merged], [variance for _, variance in merged]


def mean_square(xs: Sequence[torch.Tensor], on: Partition, dims: Sequence[int], count: int) -> Tensors:
    """Return the mean of squares over `dims`, which have `count` elements as wholes, at each place."""
    cut = [d for d in dims if d < on.dim and on.shape[d] > 1]
    parts = [x.square().sum(list(dims), keepdim=True) / count for x in xs]
    return primitives.all_sum_reduce(parts, on, cut) if cut else parts


def _own(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    count = prod(x.shape[d] for d in dims)
    if count == 0:
        zero = x.sum(list(dims), keepdim=True)
        return 0, zero, zero
    variance, mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    return count, mean, variance


def _row(values: torch.Tensor, at: int, total: int) -> torch.Tensor:
    """Return zeros for all places but one, whose values these are."""
    before = values.new_zeros([at, *values.shape])
    behind = values.new_zeros([total - at - 1, *values.shape])
    return torch.cat([before, values.unsqueeze(0), behind])


def _merged(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts, means, variances = stack.unbind(1)
    shares = counts / counts.sum(0)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


class _Batch(torch.nn.modules.batchnorm._BatchNorm):
    """What the three batch norms share."""

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        home = partition(P).homes[0].device
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=home, dtype=dtype)
        self.P, self._copies = P, Copies(P, [1])

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given: Sequence[torch.Tensor] = self.P.check(xs, "xs")
        self._check_input_dim(given[0])  # type: ignore[no-untyped-call]
        cuts = self.P.cuts(given)
        require_balanced(cuts[1], type(self).__name__, 1)
        if sum(cuts[1]) != self.num_features:
            raise UsageError(
                f"{type(self).__name__} has {self.num_features} features, and the shards have "
                f"{sum(cuts[1])} channels together"
            )
        weights = None if self.weight is None else self._copies(self.weight)
        biases = None if self.bias is None else self._copies(self.bias)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            means, variances = self._copies(self.running_mean), self._copies(self.running_var)
            return [
                F.batch_norm(x, mean, var, _at(weights, k), _at(biases, k), False, 0.0, self.eps)
                # torch's batch norm takes no tensor without channels.
                if x.shape[1]
                else _scaled(x, _along(_at(weights, k), x.dim()), _along(_at(biases, k), x.dim()))
                for k, (x, mean, var) in enumerate(zip(given, means, variances))
            ]
        size = [sum(lengths) for lengths in cuts]
        count = prod(size) // max(size[1], 1)
        if count == 1:
            # torch says it so.
            raise UsageError(
                f"Expected more than 1 value per channel when training, got input size {torch.Size(size)}"
            )
        wide = widened(given)
        means, variances = moments(wide, self.P, [d for d in range(len(size)) if d != 1])
        if self.training and self.track_running_stats:
            self._track(means, variances, count)
        outs = []
        for k, (x, mean, variance) in enumerate(zip(wide, means, variances)):
            y = (x - mean) * torch.rsqrt(variance + self.eps)
            outs.append(_scaled(y, _along(_at(weights, k), y.dim()), _along(_at(biases, k), y.dim())))
        return [y.to(x.dtype) for y, x in zip(outs, given)]

    @torch.no_grad()
    def _track(self, means: Tensors, variances: Tensors, count: int) -> None:
        mean = self._copies.back([m.detach().reshape(-1) for m in means])
        variance = self._copies.back([v.detach().reshape(-1) for v in variances])
        assert self.running_mean is not None and self.running_var is not None
        share: float | torch.Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            running.add_((new.to(running.dtype) - running) * share)


class BatchNorm1d(_Batch, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over shards of (batch, channels[, length]). See `BatchNorm2d`."""


class BatchNorm2d(_Batch, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over shards of (batch, channels, height, width), cut along any of the four.

    The statistics are those of the whole batch: one all-reduce forward, and one backward. Running statistics
    live with the weights, on the first place.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.

    Raises:
        UsageError: channels that are not cut in a balanced way, or not `num_features` of them.
    """


class BatchNorm3d(_Batch, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over shards of (batch, channels, depth, height, width). See `BatchNorm2d`."""


class _Last(torch.nn.Module):
    """What norms over the last dimensions share."""

    normalized_shape: tuple[int, ...]

    def _note(self, P: Partition) -> None:
        self.P = P
        first = P.dim - len(self.normalized_shape)
        if first < 0:
            raise UsageError(
                f"{type(self).__name__}: a partition has as many dimensions as the tensors, of 1 where "
                f"nothing is cut; got {P.shape} for tensors that end in {self.normalized_shape}"
            )
        self._dims = tuple(range(first, P.dim))
        self._copies = Copies(P, self._dims)

    def _given(self, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = self.P.check(xs, "xs")
        cuts = self.P.cuts(given)
        size = tuple(sum(lengths) for lengths in cuts)
        if len(size) != self.P.dim or size[self._dims[0] :] != self.normalized_shape:
            raise UsageError(
                f"{type(self).__name__} takes tensors of {self.P.dim} dimensions, as its partition has, "
                f"that end in {self.normalized_shape}; the shards are parts of {size}"
            )
        for d in self._dims:
            require_balanced(cuts[d], type(self).__name__, d)
        return given


class LayerNorm(_Last, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over shards; the normalized dimensions may be cut, too.

    Args:
        P: how the inputs are partitioned: it has as many dimensions as they have. The other arguments are
            torch's.

    Raises:
        UsageError: a partition or shards that do not fit.
    """

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        home = partition(P).homes[0].device
        torch.nn.LayerNorm.__init__(self, shape, eps, elementwise_affine, bias, device=home, dtype=dtype)
        self._note(P)

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given = self._given(xs)
        weights = None if self.weight is None else self._copies(self.weight)
        biases = None if self.bias is None else self._copies(self.bias)
        if not any(self.P.shape[d] > 1 for d in self._dims):
            shape = list(self.normalized_shape)
            return [
                F.layer_norm(x, shape, _at(weights, k), _at(biases, k), self.eps) for k, x in enumerate(given)
            ]
        wide = widened(given)
        means, variances = moments(wide, self.P, self._dims)
        return [
            _scaled((x - mean) * torch.rsqrt(variance + self.eps), _at(weights, k), _at(biases, k)).to(
                given[k].dtype
            )
            for k, (x, mean, variance) in enumerate(zip(wide, means, variances))
        ]


class RMSNorm(_Last, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over shards; the normalized dimensions may be cut, too. See `LayerNorm`."""

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        home = partition(P).homes[0].device
        torch.nn.RMSNorm.__init__(self, shape, eps, elementwise_affine, device=home, dtype=dtype)
        self._note(P)

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> Tensors:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given = self._given(xs)
        weights = None if self.weight is None else self._copies(self.weight)
        wide = widened(given)
        eps = torch.finfo(wide[0].dtype).eps if self.eps is None else self.eps
        squares = mean_square(wide, self.P, self._dims, prod(self.normalized_shape))
        return [
            _scaled(x * torch.rsqrt(square + eps), _at(weights, k), None).to(given[k].dtype)
            for k, (x, square) in enumerate(zip(wide, squares))
        ]


def _at(values: Tensors | None, k: int) -> torch.Tensor | None:
    return None if values is None else values[k]


def _along(value: torch.Tensor | None, dims: int) -> torch.Tensor | None:
    """Return a value of each channel so that it fits tensors of `dims` dimensions."""
    return None if value is None else value.reshape(1, -1, *(1,) * (dims - 2))


def _scaled(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias
