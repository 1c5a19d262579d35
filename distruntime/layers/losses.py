"""Losses over partitioned tensors. A mean is that of the whole: gradients are as large as the serial ones.

Here are those that have a number for each element. classes.py has the cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F

from ..collectives import primitives
from ..collectives.partition import Partition
from ..collectives.plan import Cuts
from ..collectives.plans import slices_of
from ..errors import UsageError, without_our_frames
from .weights import NARROW, partition

Tensors = list[torch.Tensor]
Targets = torch.Tensor | Sequence[torch.Tensor]


class Loss(torch.nn.Module):
    """What losses share: one number on the first place, which `backward` begins at."""

    def _note(self, P: Partition) -> None:
        self.P = P
        self._one = Partition(P.places[:1], (1,) * P.dim)

    def _sum(self, parts: Tensors) -> torch.Tensor:
        return primitives.sum_reduce(parts, self.P, self._one)[0]

    def _targets(self, target: Targets, cuts: Cuts, but: int | None = None) -> Tensors:
        """Return each place's part of the target, which has all dimensions of the inputs but `but`."""
        where = [tuple(part for d, part in enumerate(box) if d != but) for box in slices_of(cuts)]
        if not isinstance(target, torch.Tensor):
            given: Tensors = list(self.P.check(target, "target"))
            for k, (part, box) in enumerate(zip(given, where)):
                size = tuple(s.stop - s.start for s in box)
                if tuple(part.shape) != size:
                    raise UsageError(
                        f"{type(self).__name__}: the target of the shard on {self.P.places[k]} is "
                        f"{size}, as that shard is cut; got {tuple(part.shape)}"
                    )
            return given
        whole = tuple(sum(lengths) for d, lengths in enumerate(cuts) if d != but)
        if tuple(target.shape) != whole:
            raise UsageError(
                f"{type(self).__name__}: the target of these inputs is {whole}, got {tuple(target.shape)}"
            )
        return [target[box].to(home.device) for box, home in zip(where, self.P.homes)]


class _Elements(Loss):
    """A loss that has a number for each element, of the input and the target there."""

    # torch's function, and what it takes besides the tensors and `reduction`: attributes of the loss.
    _function: Callable[..., torch.Tensor]  # type: ignore[explicit-any]
    _options: tuple[str, ...] = ()
    # The words that torch's loss knows for `reduction`.
    words: tuple[str, ...] = ("none", "mean", "sum")

    @without_our_frames
    def __init__(self, P: Partition, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduced_by(reduction, self.words)
        self._note(partition(P))

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor], target: Targets) -> torch.Tensor | Tensors:
        """Return the loss. Return at once, but for a local target's way."""
        given = self.P.check(xs, "xs")
        cuts = self.P.cuts(given)
        targets = self._targets(target, cuts)
        sizes = [sum(lengths) for lengths in cuts]
        if self.reduction == "mean" and given[0].dtype in NARROW and all(sizes):
            return self._narrow_mean(given, targets, cuts, prod(sizes))
        how = "none" if self.reduction == "none" else "sum"
        parts = [self._part(x, t, how, cuts, k) for k, (x, t) in enumerate(zip(given, targets))]
        if self.reduction == "none":
            return parts
        total = self._sum(parts)
        match self.reduction:
            case "mean":
                return total / prod(sizes)
            case "batchmean":
                return total / sizes[0]
        return total

    def _narrow_mean(
        self, xs: Sequence[torch.Tensor], targets: Tensors, cuts: Cuts, count: int
    ) -> torch.Tensor:
        """Return the mean of numbers of a type in which their sum may be infinite, where the mean is not."""
        parts = [
            # The mean of nothing would be NaN.
            self._part(x, t, "mean" if x.numel() else "sum", cuts, k).float() * (x.numel() / count)
            for k, (x, t) in enumerate(zip(xs, targets))
        ]
        return self._sum(parts).to(xs[0].dtype)

    def _part(self, x: torch.Tensor, target: torch.Tensor, how: str, cuts: Cuts, k: int) -> torch.Tensor:
        """Return the loss of the k-th place's elements, or their sum."""
        options = {name: self._at(name, getattr(self, name), cuts, k) for name in self._options}
        return self._function(x, target, reduction=how, **options)

    def _at(self, name: str, value: object, cuts: Cuts, k: int) -> object:
        """Return the k-th place's part of an option: weights are of the whole, by torch's broadcasting."""
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [sum(lengths) for lengths in cuts]
        own = [*value.shape]
        last = sizes[len(sizes) - len(own) :]
        if len(own) > len(sizes) or any(n not in (1, size) for n, size in zip(own, last)):
            raise UsageError(
                f"{type(self).__name__}: {name} must fit the inputs, {tuple(sizes)}, counted from the last "
                f"dimension; it is {tuple(own)}"
            )
        box = slices_of(cuts)[k][len(sizes) - len(own) :]
        where = tuple(slice(None) if n == 1 else part for n, part in zip(own, box))
        return value[where].to(self.P.homes[k].device)

    def _hold(self, name: str, value: torch.Tensor | None) -> None:
        """Keep weights whole on the first place, as layers keep theirs."""
        self.register_buffer(name, None if value is None else value.to(self.P.homes[0].device))


class MSELoss(_Elements):
    """`torch.nn.MSELoss` of inputs that are partitioned.

    The target is a list of shards like the inputs', or a whole tensor, here or on a place. With "mean" and
    "sum" the result is one number, on the first place; with "none" it is a list of shards.

    Args:
        P: how the inputs are partitioned.
    """

    _function = staticmethod(F.mse_loss)


class L1Loss(_Elements):
    """`torch.nn.L1Loss` of inputs that are partitioned. See `MSELoss`."""

    _function = staticmethod(F.l1_loss)


class SmoothL1Loss(_Elements):
    """`torch.nn.SmoothL1Loss` of inputs that are partitioned. See `MSELoss`."""

    _function = staticmethod(F.smooth_l1_loss)
    _options = ("beta",)

    @without_our_frames
    def __init__(self, P: Partition, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P, reduction)
        self.beta = beta


class HuberLoss(_Elements):
    """`torch.nn.HuberLoss` of inputs that are partitioned. See `MSELoss`."""

    _function = staticmethod(F.huber_loss)
    _options = ("delta",)

    @without_our_frames
    def __init__(self, P: Partition, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P, reduction)
        self.delta = delta


class KLDivLoss(_Elements):
    """`torch.nn.KLDivLoss` of inputs that are partitioned. See `MSELoss`.

    Args:
        P: how the inputs are partitioned.
        reduction: "batchmean" too, which divides by the length of the first dimension as a whole.
        log_target: whether the target is given as logarithms.
    """

    _function = staticmethod(F.kl_div)
    _options = ("log_target",)

    words = ("none", "mean", "batchmean", "sum")

    @without_our_frames
    def __init__(self, P: Partition, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P, reduction)
        self.log_target = log_target


class PoissonNLLLoss(_Elements):
    """`torch.nn.PoissonNLLLoss` of inputs that are partitioned. See `MSELoss`."""

    _function = staticmethod(F.poisson_nll_loss)
    _options = ("log_input", "full", "eps")

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        log_input: bool = True,
        full: bool = False,
        eps: float = 1e-8,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P, reduction)
        self.log_input, self.full, self.eps = log_input, full, eps


class BCELoss(_Elements):
    """`torch.nn.BCELoss` of probabilities that are partitioned. See `MSELoss`.

    Args:
        P: how the inputs are partitioned.
        weight: a weight for each element of the whole, or what torch broadcasts to it.
    """

    _function = staticmethod(F.binary_cross_entropy)
    _options = ("weight",)

    @without_our_frames
    def __init__(self, P: Partition, weight: torch.Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(P, reduction)
        self._hold("weight", weight)


class BCEWithLogitsLoss(_Elements):
    """`torch.nn.BCEWithLogitsLoss` of inputs that are partitioned. See `BCELoss`.

    Args:
        P: how the inputs are partitioned.
        weight: a weight for each element of the whole, or what torch broadcasts to it.
        pos_weight: a weight for the ones of the target, in the same way.
    """

    _function = staticmethod(F.binary_cross_entropy_with_logits)
    _options = ("weight", "pos_weight")

    pos_weight: torch.Tensor | None

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        weight: torch.Tensor | None = None,
        reduction: str = "mean",
        pos_weight: torch.Tensor | None = None,
    ) -> None:
        super().__init__(P, reduction)
        self._hold("weight", weight)
        self._hold("pos_weight", pos_weight)


def reduced_by(value: str, words: Sequence[str] = ("none", "mean", "sum")) -> str:
    """Return the word for `reduction`; raise `UsageError` for one that the loss does not know."""
    if value not in words:
        *first, last = map('"{}"'.format, words)
        raise UsageError(f"reduction is {', '.join(first)} or {last}, got {value!r}")
    return value
