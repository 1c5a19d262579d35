"""Padding with what a tensor has: "reflect", "replicate" and "circular", where the tensor is cut.

A padded tensor is cut as the tensor is, and the first and the last part along a dimension are longer. So a
convolution reads it without padding of its own. Only the places at the two ends of a dimension get anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..collectives.partition import Partition
from ..collectives.plan import Cuts, Size
from ..collectives.plans import coordinates, number
from ..errors import UsageError

Tensors = list[torch.Tensor]
# It says how many elements are put before and behind, for each dimension.
Pads = Sequence[tuple[int, int]]


def edged(xs: Sequence[torch.Tensor], on: Partition, pads: Pads, mode: str) -> Tensors:
    """Return the shards of the padded tensor. Differentiable. Return at once.

    Raises:
        UsageError: "reflect" and "circular" need more of a dimension than there is.
    """
    cuts = on.cuts(xs)
    for d, ((before, behind), lengths) in enumerate(zip(pads, cuts)):
        # What is reflected goes around the last element, and a tensor goes around itself once.
        most = {"reflect": sum(lengths) - 1, "circular": sum(lengths)}.get(mode)
        if (most is not None and max(before, behind) > most) or (max(before, behind) and not sum(lengths)):
            raise UsageError(
                f'padding_mode="{mode}" pads {sum(lengths)} elements along dimension {d} by at most '
                f"{most or 0}, got {max(before, behind)}"
            )
    shape = on.shape + (1,) * (len(pads) - on.dim)
    shards, grown = list(xs), cuts
    for d, (before, behind) in enumerate(pads):
        if shape[d] > 1 and (before or behind):
            shards = _lengthened(shards, on, shape, grown, d, (before, behind), mode)
            ends = [0] * shape[d]
            ends[0], ends[-1] = before, behind
            grown = (*grown[:d], tuple(n + more for n, more in zip(grown[d], ends)), *grown[d + 1 :])
    rest = [(0, 0) if shape[d] > 1 else pair for d, pair in enumerate(pads)][2:]
    if any(before or behind for before, behind in rest):
        flat = [n for pair in reversed(rest) for n in pair]
        shards = [F.pad(x, flat, mode=mode) if x.numel() else _blank(x, rest) for x in shards]
    return shards


def _lengthened(
    xs: Tensors, on: Partition, shape: Size, cuts: Cuts, d: int, pads: tuple[int, int], mode: str
) -> Tensors:
    """Return the shards with what stands before the first ones, and behind the last ones, of a dimension."""
    lengths = cuts[d]
    size, last = sum(lengths), len(lengths) - 1
    found = list(xs)
    for k, index in enumerate(coordinates(shape)):
        parts = [xs[k]]
        for side, part in enumerate((0, last)):
            if index[d] != part:
                continue
            wanted = _numbers(size, pads[side], mode, bool(side))
            pieces = [
                _piece(xs[number((*index[:d], source, *index[d + 1 :]), shape)], d, start, step, count)
                for source, start, step, count in _runs(wanted, lengths)
            ]
            moved = [piece.to(on.homes[k].device) for piece in pieces]
            parts = [*parts, *moved] if side else [*moved, *parts]
        if len(parts) > 1:
            found[k] = torch.cat(parts, d)
    return found


def _numbers(size: int, count: int, mode: str, behind: bool) -> list[int]:
    """Return which elements stand before a dimension, or behind it."""
    beyond = range(size, size + count) if behind else range(-count, 0)
    match mode:
        case "replicate":
            return [min(max(k, 0), size - 1) for k in beyond]
        case "reflect":
            return [2 * (size - 1) - k if behind else -k for k in beyond]
    return [k % size for k in beyond]


def _runs(wanted: Sequence[int], lengths: Size) -> list[tuple[int, int, int, int]]:
    """Return who has these elements: the part, the first one's number there, the step, and how many.

    The step is 1, -1, or 0 where an element is repeated.
    """
    step = wanted[1] - wanted[0] if len(wanted) > 1 else 0
    found: list[tuple[int, int, int, int]] = []
    for k in wanted:
        part, at = 0, k
        while at >= lengths[part]:
            at -= lengths[part]
            part += 1
        if found and found[-1][0] == part:
            _, start, _, count = found[-1]
            found[-1] = part, start, step, count + 1
        else:
            found.append((part, at, step, 1))
    return found


def _piece(x: torch.Tensor, d: int, start: int, step: int, count: int) -> torch.Tensor:
    if step < 0:
        return x.narrow(d, start - count + 1, count).flip(d)
    if step > 0:
        return x.narrow(d, start, count)
    size = [-1] * x.dim()
    size[d] = count
    return x.narrow(d, start, 1).expand(size)


def _blank(x: torch.Tensor, rest: Pads) -> torch.Tensor:
    """Return what has no elements, as long as the padded shards are."""
    size = [*x.shape[:2], *(n + sum(pair) for n, pair in zip(x.shape[2:], rest))]
    return x.reshape(-1).sum().expand(size)
