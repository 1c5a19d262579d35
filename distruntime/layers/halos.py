"""Who needs which part of whose shard, for layers whose outputs read ranges of inputs.

There is no tensor and no session here.

The outputs are cut in a balanced way. Each place computes its own, so it needs a box of the inputs. The box
is a grid of cells: its own shard's part is one of them, and each other cell comes from one other place. The
outputs that read the own shard alone are the interior. Around it lie slabs, two for each dimension, and with
the interior they make up the place's outputs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from ..collectives import plans
from ..collectives.plan import Cuts, Size
from ..collectives.plans import balanced, coordinates, number
from ..errors import UsageError
from .windows import Range, Rule, Same

# A box has the range that it covers in each dimension.
Box = tuple[Range, ...]


@dataclass(frozen=True)
class Cell:
    """A part of the shard of place `source`, counted from that shard's begin."""

    source: int
    box: Box

    @property
    def count(self) -> int:
        """The number of its elements."""
        return volume(self.box)


@dataclass(frozen=True)
class Slab:
    """Outputs that are computed together: where they are in the whole, and what they read of the whole.

    For each dimension, `cells` says which cells of the grid that is, with the part of each: number, start and
    length.
    """

    outputs: Box
    reads: Box
    cells: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True)
class Member:
    """What one place does. `own` is the cell that is its own, by its number, or -1.

    `interior` reads the own shard alone, the part `inner` of it. `slabs` are the others, along the dimensions
    `around`: for each of these a slab before what lies inside, and one behind it, or None.
    """

    outputs: Box
    grid: Size
    cells: tuple[Cell, ...]
    own: int
    interior: Slab | None
    inner: Box
    slabs: tuple[Slab, ...]
    around: tuple[tuple[int, int | None, int | None], ...]

    @property
    def empty(self) -> bool:
        """Whether it has no outputs."""
        return volume(self.outputs) == 0


@dataclass(frozen=True)
class HaloPlan:
    """What all places do, the sizes of inputs and outputs as wholes, and the cuts of the outputs.

    `travels` has the cells that come from another place: whose they are, and their numbers there. They stand
    in the order in which they are sent.
    """

    members: tuple[Member, ...]
    travels: tuple[tuple[int, int], ...]
    inputs: Size
    outputs: Size
    cuts: Cuts

    @property
    def moved(self) -> int:
        """How many elements go from one place to another."""
        return sum(self.members[k].cells[number_of].count for k, number_of in self.travels)


def volume(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(stop - start for start, stop in box)


@lru_cache(maxsize=512)
def plan_halos(cuts: Cuts, shape: Size, rules: tuple[Rule, ...], split: bool) -> HaloPlan:
    """Plan a layer over inputs with these cuts, on a partition of this shape; a rule for each dimension.

    With `split`, what a place computes is its interior and slabs; otherwise it is one slab.
    """
    shape = shape + (1,) * (len(cuts) - len(shape))
    inputs = tuple(sum(lengths) for lengths in cuts)
    outputs = tuple(rule.length(n) for rule, n in zip(rules, inputs))
    for d, (rule, size, count) in enumerate(zip(rules, inputs, outputs)):
        if rule != Same() and count < 1:
            raise UsageError(
                f"{rule} does not fit {size} inputs along dimension {d}: there would be {count} outputs"
            )
    # What a layer does not touch stays cut as it is.
    cut = tuple(
        lengths if rule == Same() else balanced(n, len(lengths))
        for rule, n, lengths in zip(rules, outputs, cuts)
    )
    spans, results = [plans.spans(c) for c in cuts], [plans.spans(c) for c in cut]
    members = tuple(
        _member(k, index, shape, spans, results, inputs, rules, split)
        for k, index in enumerate(coordinates(shape))
    )
    return HaloPlan(members, _in_rounds(members), inputs, outputs, cut)


def _in_rounds(members: Sequence[Member]) -> tuple[tuple[int, int], ...]:
    """Return what travels, so ordered that each place takes part in one copy of a round.

    A place does its copies in their order, and both places wait for each other. If the copies stood in the
    order of the places, the last place would wait for all the others.
    """
    rounds: list[set[int]] = []
    found: list[tuple[int, int, int]] = []
    for k, member in enumerate(members):
        for number_of, cell in enumerate(member.cells):
            if cell.source == k:
                continue
            at = next((r for r, busy in enumerate(rounds) if not busy & {k, cell.source}), len(rounds))
            if at == len(rounds):
                rounds.append(set())
            rounds[at] |= {k, cell.source}
            found.append((at, k, number_of))
    return tuple((k, number_of) for _, k, number_of in sorted(found))


def _member(
    k: int,
    index: Size,
    shape: Size,
    spans: list[list[Range]],
    results: list[list[Range]],
    inputs: Size,
    rules: tuple[Rule, ...],
    split: bool,
) -> Member:
    dims = range(len(index))
    outputs = tuple(results[d][index[d]] for d in dims)
    if volume(outputs) == 0:
        return Member(outputs, (0,) * len(index), (), -1, None, (), (), ())
    reads = _reads(rules, outputs, inputs)
    pieces = [_overlaps(spans[d], reads[d]) for d in dims]
    grid = tuple(map(len, pieces))
    cells: list[Cell] = []
    own = -1
    for at in product(*pieces):
        source = number(tuple(part for part, _ in at), shape)
        if source == k:
            own = len(cells)
        local = (
            (start - spans[d][part][0], stop - spans[d][part][0])
            for d, (part, (start, stop)) in enumerate(at)
        )
        cells.append(Cell(source, tuple(local)))
    mine = tuple(spans[d][index[d]] for d in dims)
    inside = tuple(_inside(rules[d], outputs[d], mine[d], inputs[d]) for d in dims)
    alone = all(cell.source == k for cell in cells)
    whole = _slab(rules, outputs, inputs, pieces)
    # An interior of less than half would cost more kernels than it hides of the exchange.
    if volume(reads) == 0 or not (alone or (split and 2 * volume(inside) >= volume(outputs))):
        return Member(outputs, grid, tuple(cells), own, None, (), (whole,), ())
    if alone:
        inside = outputs
    interior = _slab(rules, inside, inputs, pieces)
    inner = tuple((a - m[0], b - m[0]) for (a, b), m in zip(interior.reads, mine))
    slabs: list[Slab] = []
    around = []
    # The first dimension's slabs are as wide as the outputs are in all later ones. So each later dimension
    # has only what the earlier ones leave.
    left = list(outputs)
    for d in dims:
        if inside[d] == outputs[d]:
            continue
        found: list[int | None] = []
        for side in ((outputs[d][0], inside[d][0]), (inside[d][1], outputs[d][1])):
            if side[0] == side[1]:
                found.append(None)
                continue
            found.append(len(slabs))
            slabs.append(_slab(rules, (*left[:d], side, *left[d + 1 :]), inputs, pieces))
        left[d] = inside[d]
        around.append((d, found[0], found[1]))
    return Member(outputs, grid, tuple(cells), own, interior, inner, tuple(slabs), tuple(around))


def _reads(rules: tuple[Rule, ...], outputs: Box, inputs: Size) -> Box:
    return tuple(rule.reads(a, b, n) for rule, (a, b), n in zip(rules, outputs, inputs))


def _overlaps(spans: list[Range], wanted: Range) -> list[tuple[int, Range]]:
    """Return which parts a range has something of, and what."""
    found = []
    for part, (a, b) in enumerate(spans):
        start, stop = max(a, wanted[0]), min(b, wanted[1])
        if start < stop:
            found.append((part, (start, stop)))
    return found


def _inside(rule: Rule, outputs: Range, mine: Range, size: int) -> Range:
    """Return the outputs that read the own part alone. Both ends of what is read only move forward."""
    every = range(outputs[0], outputs[1])
    first = bisect_left(every, mine[0], key=lambda o: rule.reads(o, o + 1, size)[0])
    last = bisect_right(every, mine[1], key=lambda o: rule.reads(o, o + 1, size)[1])
    start = outputs[0] + first
    return start, max(start, outputs[0] + last)


def _slab(rules: tuple[Rule, ...], outputs: Box, inputs: Size, pieces: list[list[tuple[int, Range]]]) -> Slab:
    reads = _reads(rules, outputs, inputs)
    cells = []
    for parts, (low, high) in zip(pieces, reads):
        row = []
        for k, (_, (a, b)) in enumerate(parts):
            start, stop = max(a, low), min(b, high)
            if start < stop:
                row.append((k, start - a, stop - start))
        cells.append(tuple(row))
    return Slab(outputs, reads, tuple(cells))
