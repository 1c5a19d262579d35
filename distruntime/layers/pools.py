"""Pools and `Upsample` over partitioned tensors. Each is torch's layer of the same name in all but its
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from ..collectives.partition import Partition
from ..errors import NotSupportedError, UsageError, without_our_frames
from .convolutions import Many, padded, pads_of
from .exchange import windowed
from .halos import Slab
from .weights import each, partition, require_default, require_dims
from .windows import Cubic, Rule, Same, Taps, Window, four_taps, taps


class _Pool(torch.nn.Module):
    """What the six layers share."""

    # There are so many dimensions of space.
    space: int

    def _note(
        self,
        P: Partition,
        kernel_size: Many,
        stride: Many | None,
        padding: Many,
        dilation: Many,
        ceil_mode: bool,
        overlap: bool | None,
    ) -> None:
        self.P, self.overlap = partition(P), overlap
        kernels = each(kernel_size, self.space, "kernel_size")
        steps = kernels if stride is None else each(stride, self.space, "stride")
        pads, gaps = each(padding, self.space, "padding"), each(dilation, self.space, "dilation")
        self.windows = tuple(
            Window(k, s, d, p, p, ceil_mode) for k, s, p, d in zip(kernels, steps, pads, gaps)
        )
        self.rules: tuple[Rule, ...] = (Same(), Same(), *self.windows)

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of the outputs. Return at once."""
        given = self.P.check(xs, "xs")
        require_dims(given[0].dim(), type(self).__name__, self.space + 2)
        sizes = [sum(lengths) for lengths in self.P.cuts(given)][2:]

        def compute(k: int, x: torch.Tensor, slab: Slab) -> torch.Tensor:
            return self._compute(x, slab, sizes)

        return windowed(given, self.P, self.rules, compute, overlap=self.overlap)

    def _compute(self, x: torch.Tensor, slab: Slab, sizes: list[int]) -> torch.Tensor:
        raise NotImplementedError


class _Max(_Pool):
    """The largest of each window."""

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        kernel_size: Many,
        stride: Many | None = None,
        padding: Many = 0,
        dilation: Many = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        overlap: bool | None = None,
    ) -> None:
        require_default(return_indices, False, "return_indices", type(self).__name__)
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)
        self._note(P, kernel_size, stride, padding, dilation, ceil_mode, overlap)

    def _compute(self, x: torch.Tensor, slab: Slab, sizes: list[int]) -> torch.Tensor:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.space - 1]
        # What is as low as this is never the largest, but for what torch pads with, too.
        low = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        x = padded(x, pads_of(slab, self.rules), low)
        kernels, steps = [w.kernel for w in self.windows], [w.stride for w in self.windows]
        gaps = [w.dilation for w in self.windows]
        found: torch.Tensor = pool(x, kernels, steps, 0, gaps)
        return found


class _Mean(_Pool):
    """The mean of each window."""

    count_include_pad: bool

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        kernel_size: Many,
        stride: Many | None = None,
        padding: Many = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        overlap: bool | None = None,
    ) -> None:
        # torch's pool of one dimension has no divisor of one's own, and none is missed here.
        more = () if self.space == 1 else (divisor_override,)
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
        self.divisor_override = divisor_override
        self._note(P, kernel_size, stride, padding, 1, ceil_mode, overlap)

    def _compute(self, x: torch.Tensor, slab: Slab, sizes: list[int]) -> torch.Tensor:
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[self.space - 1]
        kernels, steps = [w.kernel for w in self.windows], [w.stride for w in self.windows]
        found: torch.Tensor = pool(padded(x, pads_of(slab, self.rules)), kernels, steps, 0)
        if self.divisor_override is not None:
            return found * (prod(kernels) / self.divisor_override)
        # At the edges a window has fewer elements that count. There torch divides by their number.
        for d, (window, outputs, size) in enumerate(zip(self.windows, slab.outputs[2:], sizes)):
            taken = window.taken(*outputs, size, self.count_include_pad)
            if min(taken) != window.kernel:
                shares = torch.tensor([window.kernel / n for n in taken], dtype=x.dtype, device="cpu")
                found = found * shares.reshape(-1, *(1,) * (self.space - 1 - d)).to(x.device)
        return found


class MaxPool1d(_Max, torch.nn.MaxPool1d):  # type: ignore[misc]
    """`torch.nn.MaxPool1d` over shards. See `MaxPool2d`."""

    space = 1


class MaxPool2d(_Max, torch.nn.MaxPool2d):  # type: ignore[misc]
    """`torch.nn.MaxPool2d` over shards of (batch, channels, height, width), cut along any of the four.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.
        overlap: as in `Conv2d`.

    Raises:
        NotSupportedError: `return_indices`.
    """

    space = 2


class MaxPool3d(_Max, torch.nn.MaxPool3d):  # type: ignore[misc]
    """`torch.nn.MaxPool3d` over shards. See `MaxPool2d`."""

    space = 3


class AvgPool1d(_Mean, torch.nn.AvgPool1d):  # type: ignore[misc]
    """`torch.nn.AvgPool1d` over shards. See `AvgPool2d`."""

    space = 1


class AvgPool2d(_Mean, torch.nn.AvgPool2d):  # type: ignore[misc]
    """`torch.nn.AvgPool2d` over shards of (batch, channels, height, width), cut along any of the four.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.
        overlap: as in `Conv2d`.
    """

    space = 2


class AvgPool3d(_Mean, torch.nn.AvgPool3d):  # type: ignore[misc]
    """`torch.nn.AvgPool3d` over shards. See `AvgPool2d`."""

    space = 3


# The dimensions of tensors for which a mode is there.
_DIMS = {
    "nearest": (3, 4, 5),
    "nearest-exact": (3, 4, 5),
    "linear": (3,),
    "bilinear": (4,),
    "trilinear": (5,),
    "bicubic": (4,),
}


class Upsample(torch.nn.Upsample):
    """`torch.nn.Upsample` over shards of (batch, channels, ...), cut along any dimension.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "trilinear" or "bicubic".
        overlap: as in `Conv2d`.

    Raises:
        NotSupportedError: another mode, and `recompute_scale_factor`.
    """

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        size: int | tuple[int, ...] | None = None,
        scale_factor: float | tuple[float, ...] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        *,
        overlap: bool | None = None,
    ) -> None:
        if mode not in _DIMS or recompute_scale_factor:
            raise NotSupportedError(
                f"Upsample over a partition has the modes {', '.join(map(repr, _DIMS))}, without "
                f"recompute_scale_factor; got mode={mode!r}, recompute_scale_factor={recompute_scale_factor}"
            )
        if (size is None) == (scale_factor is None):
            raise UsageError(
                f"Upsample takes size= or scale_factor=, one of the two, got {size} and {scale_factor}"
            )
        if align_corners is not None and mode.startswith("nearest"):
            raise UsageError(f"align_corners is for linear modes, got mode={mode!r}")
        super().__init__(size, scale_factor, mode, align_corners)
        self.P, self.overlap = partition(P), overlap

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        """Return the shards of the outputs. Return at once."""
        given = self.P.check(xs, "xs")
        whole = tuple(sum(lengths) for lengths in self.P.cuts(given))
        if len(whole) not in _DIMS[self.mode]:
            raise UsageError(
                f"mode={self.mode!r} takes tensors of {_DIMS[self.mode]} dimensions, got {whole}"
            )
        rules: list[Rule] = [Same(), Same()]
        for d, length in enumerate(whole[2:]):
            scale = _of(self.scale_factor, d)
            count = int(length * scale) if scale is not None else _of(self.size, d)
            assert count is not None
            corners = bool(self.align_corners)
            if self.mode == "bicubic":
                rules.append(Cubic(length, scale, corners, int(count)))
            else:
                rules.append(Taps(length, self.mode, scale, corners, int(count)))

        def compute(k: int, x: torch.Tensor, slab: Slab) -> torch.Tensor:
            for d, rule in enumerate(rules):
                if isinstance(rule, Taps):
                    x = _between(x, d, rule, slab.outputs[d], slab.reads[d][0])
                elif isinstance(rule, Cubic):
                    x = _among(x, d, rule, slab.outputs[d], slab.reads[d][0])
            return x

        return windowed(given, self.P, tuple(rules), compute, overlap=self.overlap)


def _of(value: float | Sequence[float] | None, d: int) -> float | None:
    return value[d] if isinstance(value, Sequence) else value


def _between(x: torch.Tensor, d: int, rule: Taps, outputs: tuple[int, int], first: int) -> torch.Tensor:
    """Return the outputs along a dimension, of inputs from number `first` on."""
    wanted = slice(*outputs)
    near, far, shares = taps(rule)
    here = _picked(x, d, [k - first for k in near[wanted]])
    if not any(shares[wanted]):
        return here
    there = _picked(x, d, [k - first for k in far[wanted]])
    share = torch.tensor(shares[wanted], dtype=x.dtype, device="cpu").to(x.device)
    return here + (there - here) * share.reshape(-1, *(1,) * (x.dim() - 1 - d))


def _among(x: torch.Tensor, d: int, rule: Cubic, outputs: tuple[int, int], first: int) -> torch.Tensor:
    """Return the outputs of four inputs each along a dimension, of inputs from number `first` on."""
    rows, shares = four_taps(rule)
    wanted, count = slice(*outputs), outputs[1] - outputs[0]
    taken = _picked(x, d, [k - first for row in rows[wanted] for k in row])
    weights = torch.tensor(shares[wanted], dtype=x.dtype, device="cpu").to(x.device)
    size = (*x.shape[:d], count, 4, *x.shape[d + 1 :])
    return (taken.reshape(size) * weights.reshape(count, 4, *(1,) * (x.dim() - 1 - d))).sum(d + 1)


def _picked(x: torch.Tensor, d: int, numbers: list[int]) -> torch.Tensor:
    return x.index_select(d, torch.tensor(numbers, device="cpu").to(x.device))
