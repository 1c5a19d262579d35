"""Convolutions over partitioned tensors, and their transposes, in one to three dimensions of space.

Each is torch's layer of the same name in all but its forward pass: its weight, its initialisation and its
`state_dict` are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from ..collectives.partition import Partition
from ..collectives.plans import balanced
from ..errors import NotSupportedError, UsageError, without_our_frames
from .channels import Grid, Mixing, home_of, mixing_of
from .edges import edged
from .exchange import windowed
from .halos import Slab
from .weights import ShardedWeights, each, partition, require_dims
from .windows import Grouped, Rule, Same, Spread, Window

Many = int | Sequence[int]


def pads_of(slab: Slab, rules: Sequence[Rule]) -> list[tuple[int, int]]:
    """Return how much padding a slab's windows cover before and behind its inputs, for each dimension."""
    found = []
    for rule, outputs, reads in zip(rules, slab.outputs, slab.reads):
        if not isinstance(rule, Window):
            found.append((0, 0))
            continue
        first, last = rule.raw(*outputs)
        # Where the windows cover padding alone, there is no input to count from.
        inside = reads[0] < reads[1]
        found.append((reads[0] - first, last - reads[1]) if inside else (last - first, 0))
    return found


def padded(x: torch.Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> torch.Tensor:
    """Return `x` with padding before and behind, for each dimension. A negative one cuts off."""
    if not any(before or behind for before, behind in pads):
        return x
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=value)


class _Convolution(ShardedWeights):
    """What the six layers share."""

    # There are so many dimensions of space.
    space: int
    # This dimension of the weight counts outputs.
    rows = 0

    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None
    # How much is padded along each dimension before the layer, where padding is not of zeros.
    edges: tuple[tuple[int, int], ...] = ()
    padding_mode: str

    def _mixing(
        self,
        P: Partition,
        P_y: Partition | None,
        P_w: Partition | None,
        form: str | None,
        channels: tuple[int, int],
        groups: int,
    ) -> Mixing | Grid:
        name, dims = type(self).__name__, self.space + 2
        for given, what in ((partition(P), "P"), (P if P_y is None else partition(P_y, "P_y"), "P_y")):
            if given.dim > dims:
                raise UsageError(
                    f"{name} takes tensors of {dims} dimensions, and {what} has {given.dim}, {given.shape}"
                )
        mixing = mixing_of(P, P_y, P_w, 1, channels, self.rows, dims, form, name, groups)
        if mixing.form == "groups" and self.rows and groups % P.shape[1]:
            raise NotSupportedError(
                f"{name} whose channels are cut into {P.shape[1]} parts has a number of groups that is a "
                f"multiple of {P.shape[1]}, as each place has whole groups of its weight; got {groups}"
            )
        return mixing

    def _note(
        self, P: Partition, mixing: Mixing | Grid, rules: tuple[Rule, ...], overlap: bool | None, cut: bool
    ) -> None:
        self.P, self.mixing, self.overlap = P, mixing, overlap
        self.rules: tuple[Rule, ...] = (Same(), Same(), *rules)
        if cut:
            self._cut_up({"weight": mixing.weight, "bias": mixing.bias})

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of the outputs. Return at once."""
        given = self.P.check(xs, "xs")
        name = type(self).__name__
        require_dims(given[0].dim(), name, self.space + 2)
        channels = sum(self.P.cuts(given)[1])
        if channels != self.in_channels:
            raise UsageError(
                f"{name} has {self.in_channels} input channels, and the shards have {channels} together"
            )
        if self.edges:
            return self.mixing(
                edged(given, self.P, self.edges, self.padding_mode), self.weight, self.bias, self._locally
            )
        return self.mixing(given, self.weight, self.bias, self._locally)

    def _locally(
        self,
        xs: list[torch.Tensor],
        on: Partition,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        if self.mixing.form == "groups":
            return self._in_groups(xs, on, weights, biases)
        # Where a weight is cut unevenly, places have more or fewer rows, and some may have none.
        channels = [w.shape[self.rows] * (self.groups if self.rows else 1) for w in weights]

        def compute(k: int, x: torch.Tensor, slab: Slab) -> torch.Tensor:
            if not weights[k].numel():
                size = [stop - start for start, stop in slab.outputs]
                size[1] = channels[k]
                return x.reshape(-1)[:0].sum().expand(size)
            return self._compute(x, slab, weights[k], None if biases is None else biases[k], self.groups)

        return windowed(xs, on, self.rules, compute, channels=channels, overlap=self.overlap)

    def _in_groups(
        self,
        xs: list[torch.Tensor],
        on: Partition,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Return the outputs where channels are cut, too: their groups say which ones an output reads."""
        rule = Grouped(self.in_channels // self.groups, self.out_channels // self.groups)
        begins = [0, *accumulate(balanced(self.out_channels, on.shape[1]))]

        def compute(k: int, x: torch.Tensor, slab: Slab) -> torch.Tensor:
            begin, first = begins[on.index(k)[1]], slab.reads[1][0]
            found = []
            for start, stop in rule.pieces(*slab.outputs[1]):
                low, high = rule.reads(start, stop, self.in_channels)
                weight = weights[k]
                if self.rows:
                    # Dimension 0 of a transposed weight has the inputs of all groups of the place.
                    weight = weight.narrow(0, low - begin // rule.outs * rule.ins, high - low)
                    if (stop - start) % rule.outs:
                        weight = weight.narrow(1, start % rule.outs, stop - start)
                else:
                    weight = weight.narrow(0, start - begin, stop - start)
                bias = None if biases is None else biases[k].narrow(0, start - begin, stop - start)
                part = x.narrow(1, low - first, high - low)
                found.append(self._compute(part, slab, weight, bias, (high - low) // rule.ins))
            return found[0] if len(found) == 1 else torch.cat(found, 1)

        return windowed(xs, on, (Same(), rule, *self.rules[2:]), compute, overlap=self.overlap)

    def _compute(
        self, x: torch.Tensor, slab: Slab, weight: torch.Tensor, bias: torch.Tensor | None, groups: int
    ) -> torch.Tensor:
        raise NotImplementedError


class _Forward(_Convolution):
    """A convolution."""

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Many,
        stride: Many = 1,
        padding: Many | str = 0,
        dilation: Many = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        form: str | None = None,
        overlap: bool | None = None,
        cut_weights: bool = False,
        P_w: Partition | None = None,
    ) -> None:
        mixing = self._mixing(P, P_y, P_w, form, (in_channels, out_channels), groups)
        cut = cut_weights or P_w is not None
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=home_of(mixing, cut),
            dtype=dtype,
        )
        # torch counts "same" so, and puts the larger half behind.
        totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
        if isinstance(padding, str):
            ends = [(n // 2, n - n // 2) if padding == "same" else (0, 0) for n in totals]
        else:
            ends = [(n, n) for n in each(padding, self.space, "padding")]
        if padding_mode != "zeros":
            self.edges, ends = ((0, 0), (0, 0), *ends), [(0, 0)] * self.space
        windows = zip(self.kernel_size, self.stride, self.dilation, ends)
        self._note(P, mixing, tuple(Window(k, s, d, *pads) for k, s, d, pads in windows), overlap, cut)

    def _compute(
        self, x: torch.Tensor, slab: Slab, weight: torch.Tensor, bias: torch.Tensor | None, groups: int
    ) -> torch.Tensor:
        pads = pads_of(slab, self.rules)
        within = tuple(before for before, behind in pads[2:])
        if any(before != behind or before < 0 for before, behind in pads):
            x, within = padded(x, pads), (0,) * self.space
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.space - 1]
        found: torch.Tensor = convolve(x, weight, bias, self.stride, within, self.dilation, groups)
        return found


class _Transposed(_Convolution):
    """A transposed convolution."""

    rows = 1

    @without_our_frames
    def __init__(
        self,
        P: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Many,
        stride: Many = 1,
        padding: Many = 0,
        output_padding: Many = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Many = 1,
        padding_mode: str = "zeros",
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        form: str | None = None,
        overlap: bool | None = None,
        cut_weights: bool = False,
        P_w: Partition | None = None,
    ) -> None:
        mixing = self._mixing(P, P_y, P_w, form, (in_channels, out_channels), groups)
        cut = cut_weights or P_w is not None
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device=home_of(mixing, cut),
            dtype=dtype,
        )
        pads, extras = (
            each(padding, self.space, "padding"),
            each(output_padding, self.space, "output_padding"),
        )
        spreads = zip(self.kernel_size, self.stride, self.dilation, pads, extras)
        self._note(P, mixing, tuple(Spread(k, s, d, p, e) for k, s, d, p, e in spreads), overlap, cut)

    def _compute(
        self, x: torch.Tensor, slab: Slab, weight: torch.Tensor, bias: torch.Tensor | None, groups: int
    ) -> torch.Tensor:
        size = [stop - start for start, stop in slab.outputs]
        size[1] = weight.shape[1] * groups
        if not x.numel():
            # Between the inputs there are outputs that none adds to.
            blank = x.reshape(-1).sum().expand(size)
            return blank if bias is None else blank + bias.reshape(-1, *(1,) * self.space)
        ends = [(0, 0), (0, 0)]
        for rule, (start, stop), (first, last) in zip(self.rules[2:], slab.outputs[2:], slab.reads[2:]):
            assert isinstance(rule, Spread)
            begin = first * rule.stride - rule.padding
            ends.append((begin - start, stop - (begin + (last - first - 1) * rule.stride + rule.reach + 1)))
        # What is added behind is not covered by any input, and it has the bias alone.
        late = bias is not None and any(n > 0 for pair in ends for n in pair)
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.space - 1]
        zeros, none = (0,) * self.space, None
        found: torch.Tensor = convolve(
            x, weight, none if late else bias, self.stride, zeros, zeros, groups, self.dilation
        )
        found = padded(found, ends)
        return found + bias.reshape(-1, *(1,) * self.space) if late and bias is not None else found


class Conv1d(_Forward, torch.nn.Conv1d):  # type: ignore[misc]
    """Convolve (batch, channels, length), cut along any of the three. See `Conv2d`."""

    space = 1


class Conv2d(_Forward, torch.nn.Conv2d):  # type: ignore[misc]
    """Convolve (batch, channels, height, width), cut along any of the four: `torch.nn.Conv2d` over shards.

    The outputs are cut over the same places, balanced. The weight lives whole on the first place, so names,
    `state_dict`, initialisation and optimizer are the serial layer's. A place gets the borders that it needs
    from whoever has them, while it computes the outputs that need none. With `groups` and channels that are
    cut, it gets the channels of its groups in the same way.

    Args:
        P: how the inputs are partitioned; the other arguments are torch's.
        P_y: another partition for the outputs, which differs in dimension 1: where only the inputs or only
            the outputs have their channels cut.
        form: where both have, "gather" moves inputs and "scatter" moves outputs; by default the fewer.
        overlap: whether borders travel beside the work that needs none, on streams of their own. By default
            they do if a place has 65,536 outputs or more.
        cut_weights: whether weights live in parts on the places that use them, where channels are cut.
        P_w: a grid of the places that compute: (parts of outputs, parts of inputs, parts along each dimension
            of space). `P` cuts the input channels, and `P_y` the output channels, so.

    Raises:
        UsageError: a partition that does not fit, padding by more than there is. NotSupportedError: groups
            with `P_y`, `P_w` or `form`.
    """

    space = 2


class Conv3d(_Forward, torch.nn.Conv3d):  # type: ignore[misc]
    """Convolve (batch, channels, depth, height, width), cut along any of the five. See `Conv2d`."""

    space = 3


class ConvTranspose1d(_Transposed, torch.nn.ConvTranspose1d):  # type: ignore[misc]
    """Convolve transposed (batch, channels, length), cut along any of the three. See `Conv2d`."""

    space = 1


class ConvTranspose2d(_Transposed, torch.nn.ConvTranspose2d):  # type: ignore[misc]
    """Convolve transposed (batch, channels, height, width), cut along any of the four. See `Conv2d`."""

    space = 2


class ConvTranspose3d(_Transposed, torch.nn.ConvTranspose3d):  # type: ignore[misc]
    """Convolve transposed (batch, channels, depth, height, width), cut along any of them. See `Conv2d`."""

    space = 3
