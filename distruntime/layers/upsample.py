"""`Upsample` over partitioned tensors: each output is of one input, two or four along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.partition import Partition
from ..errors import NotSupportedError, UsageError, without_our_frames
from .exchange import windowed
from .halos import Slab
from .weights import partition
from .windows import Cubic, Rule, Same, Taps, four_taps, taps

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
