"""Which inputs an output reads, along one dimension: convolutions, their transposes, pools, interpolation.

There is no tensor of a worker here. A rule says how long the output is, and which range of inputs a range of
outputs reads. Both ends of what is read move only forward as the outputs do. So the outputs that read nothing
but one part of the inputs are one range, and the plans in halos.py stand on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Protocol

import torch

Range = tuple[int, int]


class Rule(Protocol):
    """How the outputs along a dimension depend on the inputs along it."""

    def length(self, size: int) -> int:
        """Return how many outputs `size` inputs give."""

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the range of the `size` inputs that outputs `start` to `stop` read. It may be empty."""


@dataclass(frozen=True)
class Same:
    """Output k reads input k: a dimension that the layer does not touch."""

    def length(self, size: int) -> int:
        """Return the number of inputs."""
        return size

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the same range."""
        return start, stop


@dataclass(frozen=True)
class Grouped:
    """Channels in groups: an output channel reads the `ins` input channels of its group, which has `outs`
    output channels.
    """

    ins: int
    outs: int

    def length(self, size: int) -> int:
        """Return the number of output channels."""
        return size // self.ins * self.outs

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the input channels of all groups that the outputs are in."""
        return start // self.outs * self.ins, ((stop - 1) // self.outs + 1) * self.ins

    def pieces(self, start: int, stop: int) -> list[Range]:
        """Return the outputs in up to three ranges. Each is of whole groups, or inside one group."""
        first, last = -(-start // self.outs) * self.outs, stop // self.outs * self.outs
        if first > last:
            return [(start, stop)]
        return [(a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b]


@dataclass(frozen=True)
class Window:
    """A window of `kernel` inputs, `dilation` apart, that moves by `stride`: convolutions and pools."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    # A last window that begins inside the input counts, although it reaches over the padding's end.
    ceil: bool = False

    @property
    def span(self) -> int:
        """How far a window reaches, its first and its last input included."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, size: int) -> int:
        """Return how many windows there are; it is below 1 where the input is too short for one."""
        room = size + self.before + self.after - self.span
        if not self.ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        return count - ((count - 1) * self.stride >= size + self.before)

    def raw(self, start: int, stop: int) -> Range:
        """Return what the windows cover. Below 0 and beyond the input it is padding."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.span

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return what the windows cover of the input."""
        first, last = self.raw(start, stop)
        return _within(first, last, size)

    def taken(self, start: int, stop: int, size: int, padded: bool) -> list[int]:
        """Return how many elements each window counts: inputs, and with `padded` the padding's, too."""
        low, high = (-self.before, size + self.after) if padded else (0, size)
        found = []
        for k in range(start, stop):
            first, last = self.raw(k, k + 1)
            found.append(max(0, min(last, high) - max(first, low)))
        return found


@dataclass(frozen=True)
class Spread:
    """Input i adds to `kernel` outputs from i * stride - padding on, `dilation` apart: transposed windows."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0

    @property
    def reach(self) -> int:
        """How far behind its first output an input adds."""
        return self.dilation * (self.kernel - 1)

    def length(self, size: int) -> int:
        """Return how many outputs there are."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + self.extra + 1

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the inputs that may add to these outputs."""
        first = -((self.reach - start - self.padding) // self.stride)
        return _within(first, (stop - 1 + self.padding) // self.stride + 1, size)


@dataclass(frozen=True)
class Taps:
    """Each output is a mean of two neighbours, or one input: nearest and linear interpolation.

    torch itself says which inputs they are, so that both round alike: it interpolates the numbers of the
    inputs.
    """

    size: int
    mode: str
    # What torch is told: the scale, or None, and whether corners are aligned.
    scale: float | None
    corners: bool
    count: int

    def length(self, size: int) -> int:
        """Return the number of outputs."""
        return self.count

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the inputs between the first and the last tap."""
        near, far, _ = taps(self)
        return near[start], far[stop - 1] + 1


@dataclass(frozen=True)
class Cubic:
    """Each output is a weighted sum of four neighbours: cubic interpolation.

    Beyond the edges the last input is repeated.
    """

    size: int
    # What torch is told: the scale, or None, and whether corners are aligned.
    scale: float | None
    corners: bool
    count: int

    def length(self, size: int) -> int:
        """Return the number of outputs."""
        return self.count

    def reads(self, start: int, stop: int, size: int) -> Range:
        """Return the inputs from the first tap to the last one."""
        rows, _ = four_taps(self)
        return rows[start][0], rows[stop - 1][3] + 1


@lru_cache(maxsize=512)
def four_taps(rule: Cubic) -> tuple[list[list[int]], list[list[float]]]:
    """Return, for each output, the four inputs and their shares: Keys' cubic convolution with -3/4."""
    if rule.corners:
        step = (rule.size - 1) / (rule.count - 1) if rule.count > 1 else 0.0
    else:
        step = rule.size / rule.count if rule.scale is None else 1 / rule.scale
    rows, shares = [], []
    for k in range(rule.count):
        where = step * k if rule.corners else step * (k + 0.5) - 0.5
        first = floor(where)
        t = where - first
        rows.append([min(max(first + j, 0), rule.size - 1) for j in (-1, 0, 1, 2)])
        shares.append([_outer(t + 1), _inner(t), _inner(1 - t), _outer(2 - t)])
    return rows, shares


def _inner(t: float) -> float:
    """Return the share of an input that is at most 1 away."""
    return (1.25 * t - 2.25) * t * t + 1


def _outer(t: float) -> float:
    """Return the share of an input that is from 1 to 2 away."""
    return ((-0.75 * t + 3.75) * t - 6) * t + 3


@lru_cache(maxsize=512)
def taps(rule: Taps) -> tuple[list[int], list[int], list[float]]:
    """Return, for each output, the two inputs that it is between, and the share of the second one."""
    numbers = torch.arange(rule.size, dtype=torch.float64, device="cpu")[None, None]
    mode = rule.mode if rule.mode.startswith("nearest") else "linear"
    where = torch.nn.functional.interpolate(
        numbers,
        size=rule.count if rule.scale is None else None,
        scale_factor=rule.scale,
        mode=mode,
        align_corners=rule.corners if mode == "linear" else None,
    )[0, 0].tolist()
    near = [min(int(w), rule.size - 1) for w in where]
    shares = [w - i for w, i in zip(where, near)]
    return near, [min(i + (share > 0), rule.size - 1) for i, share in zip(near, shares)], shares


def _within(first: int, last: int, size: int) -> Range:
    """Return the part of a range that is inside 0 to `size`; where nothing is, an empty range inside it."""
    low = min(max(first, 0), size)
    return low, max(low, min(last, size))
