"""`CrossEntropyLoss` over partitioned tensors, whose classes may be cut, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..collectives import functional, primitives
from ..collectives.partition import Partition
from ..collectives.plan import Cuts
from ..collectives.plans import coordinates, number, slices_of
from ..collectives.reductions import ReduceOp
from ..errors import UsageError, without_our_frames
from .losses import Loss, Targets, Tensors, reduced_by
from .weights import NARROW, Copies, partition, require_default, widened


class CrossEntropyLoss(Loss):
    """`torch.nn.CrossEntropyLoss` of inputs (batch, classes, ...) that are partitioned, classes too.

    The target has the numbers of classes, (batch, ...): a whole tensor, here or on a place, or a list with
    the part of each place. With "mean" and "sum" the result is one number, on the first place; with "none" it
    is a list of shards.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.

    Raises:
        NotSupportedError: `weight` or `label_smoothing` where classes are cut.
    """

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduced_by(reduction), ignore_index
        self.label_smoothing = label_smoothing
        self._note(partition(P))
        self._cut = P.dim > 1 and P.shape[1] > 1
        if self._cut:
            require_default(label_smoothing, 0.0, "label_smoothing", "CrossEntropyLoss with classes cut")
            given = None if weight is None else tuple(weight.shape)
            require_default(given, None, "weight", "CrossEntropyLoss with classes cut")
        self._copies = Copies(P, [None])
        self.register_buffer("weight", None if weight is None else weight.to(P.homes[0].device))

    weight: torch.Tensor | None

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor], target: Targets) -> torch.Tensor | Tensors:
        """Return the loss. Return at once, but for a local target's way."""
        given: Tensors = list(self.P.check(xs, "xs"))
        if given[0].dim() < 2:
            raise UsageError(
                f"CrossEntropyLoss takes inputs (batch, classes, ...), got shards of {tuple(given[0].shape)}"
            )
        cuts = self.P.cuts(given)
        targets = self._targets(target, cuts, but=1)
        weights = None if self.weight is None else self._copies(self.weight)
        if self._cut:
            wide = widened(given)
            losses = [y.to(x.dtype) for x, y in zip(given, self._of_cut_classes(wide, targets, cuts))]
        else:
            losses = [
                F.cross_entropy(
                    x,
                    t,
                    None if weights is None else weights[k],
                    ignore_index=self.ignore_index,
                    reduction="none",
                    label_smoothing=self.label_smoothing,
                )
                for k, (x, t) in enumerate(zip(given, targets))
            ]
        if self.reduction == "none":
            return losses
        # Places with the same batch and other classes have the same losses.
        first = [not (self._cut and index[1]) for index in coordinates(self.P.shape)]
        dtype = given[0].dtype
        # These types count to 256 and to 2,048 exactly, and one of them to 65,504 at all.
        sums = torch.float32 if dtype in NARROW else dtype
        total = self._sum([x.sum(dtype=sums) * f for x, f in zip(losses, first)])
        if self.reduction == "sum":
            return total.to(dtype)
        with torch.no_grad():
            counted = [t != self.ignore_index for t in targets]
            shares = [
                # What is ignored may be the number of no class.
                (c if weights is None else weights[k][torch.where(c, t, 0)] * c).sum(dtype=sums)
                for k, (t, c) in enumerate(zip(targets, counted))
            ]
            count = self._sum([s * f for s, f in zip(shares, first)])
        return (total / count).to(dtype)

    def _of_cut_classes(self, xs: Tensors, targets: Tensors, cuts: Cuts) -> Tensors:
        """Return each place's losses, of classes that other places have, too."""
        with torch.no_grad():
            highest = self._highest([_highest(x) for x in xs])
        sums = primitives.all_sum_reduce([(x - m).exp().sum(1) for x, m in zip(xs, highest)], self.P, 1)
        picked, classes = [], sum(cuts[1])
        for x, target, where in zip(xs, targets, slices_of(cuts)):
            begin, count = where[1].start, where[1].stop - where[1].start
            if not count:
                picked.append(x.sum(1))
                continue
            inside = (target >= begin) & (target < begin + count)
            elsewhere = ((target >= 0) & (target < classes)) | (target == self.ignore_index)
            # The number of no class is beyond these classes, too, so torch refuses it here.
            at = torch.where(inside, target - begin, torch.where(elsewhere, 0, target))
            own = x.gather(1, at.unsqueeze(1)).squeeze(1)
            picked.append(torch.where(inside, own, torch.zeros_like(own)))
        wanted = primitives.all_sum_reduce(picked, self.P, 1)
        return [
            torch.where(t == self.ignore_index, torch.zeros_like(w), s.log() + m.squeeze(1) - w)
            for t, s, m, w in zip(targets, sums, highest, wanted)
        ]

    def _highest(self, own: Tensors) -> Tensors:
        """Return the highest number of each row, at all places that have some of its classes."""
        rows: dict[int, list[int]] = {}
        for k, index in enumerate(coordinates(self.P.shape)):
            at = tuple(0 if d == 1 else c for d, c in enumerate(index))
            rows.setdefault(number(at, self.P.shape), []).append(k)
        found = dict[int, torch.Tensor]()
        for row in rows.values():
            found.update(zip(row, functional.all_reduce([own[k] for k in row], ReduceOp.MAX)))
        return [found[k] for k in range(len(own))]


def _highest(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1]:
        return x.amax(1, keepdim=True)
    size = [*x.shape]
    size[1] = 1
    return x.new_full(size, float("-inf"))
