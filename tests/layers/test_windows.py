"""Which inputs an output reads, against torch's own layers, and the plans of exchanges. No worker here."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distruntime.collectives.plans import balanced, coordinates, number
from distruntime.layers.convolutions import padded, pads_of
from distruntime.layers.halos import Member, Slab, plan_halos, volume
from distruntime.layers.windows import Cubic, Grouped, Rule, Same, Spread, Taps, Window, four_taps


def _slab(rule: Rule, start: int, stop: int, size: int) -> Slab:
    return Slab(((start, stop),), (rule.reads(start, stop, size),), ())


def _drawn_window(draw: random.Random, pool: bool) -> tuple[Window, int]:
    kernel, stride, dilation = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 3)
    padding = draw.randint(0, kernel // 2 if pool else 4)
    least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
    ceil = pool and draw.random() < 0.5
    return Window(kernel, stride, dilation, padding, padding, ceil), draw.randint(least, least + 12)


def test_parts_of_a_convolution_are_parts_of_torchs() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rule, size = _drawn_window(draw, pool=False)
        x, weight = torch.randn(1, 1, size, dtype=torch.float64), torch.randn(1, 1, rule.kernel).double()
        whole = F.conv1d(x, weight, None, rule.stride, rule.before, rule.dilation)
        assert rule.length(size) == whole.shape[2]
        start = draw.randrange(whole.shape[2])
        stop = draw.randint(start + 1, whole.shape[2])
        slab = _slab(rule, start, stop, size)
        (first, last), pads = slab.reads[0], pads_of(slab, [rule])
        part = F.conv1d(padded(x[:, :, first:last], pads), weight, None, rule.stride, 0, rule.dilation)
        torch.testing.assert_close(part, whole[:, :, start:stop], rtol=1e-12, atol=1e-12)


def test_parts_of_pools_are_parts_of_torchs() -> None:
    draw = random.Random(1)
    for _ in range(300):
        rule, size = _drawn_window(draw, pool=True)
        x = torch.randn(1, 1, size)
        whole = F.max_pool1d(x, rule.kernel, rule.stride, rule.before, rule.dilation, rule.ceil)
        assert rule.length(size) == whole.shape[2], (rule, size)
        for k in range(whole.shape[2]):
            first = rule.reads(k, k + 1, size)[0]
            taken = [
                float(x[0, 0, i])
                for i in range(k * rule.stride - rule.before, rule.raw(k, k + 1)[1], rule.dilation)
                if 0 <= i < size
            ]
            if not taken:
                # Dilated, it reaches over all of the input.
                assert float(whole[0, 0, k]) == float("-inf")
                continue
            assert first <= min(i for i in range(size) if float(x[0, 0, i]) in taken), (
                "an input outside what is read"
            )
            assert max(taken) == float(whole[0, 0, k])
        if rule.dilation == 1:
            for padded_counts in (True, False):
                mean = F.avg_pool1d(
                    x, rule.kernel, rule.stride, rule.before, rule.ceil, count_include_pad=padded_counts
                )
                counts = rule.taken(0, whole.shape[2], size, padded_counts)
                sums = [float(sum(x[0, 0, slice(*rule.reads(k, k + 1, size))])) for k in range(len(counts))]
                torch.testing.assert_close(mean[0, 0], torch.tensor([s / n for s, n in zip(sums, counts)]))


def test_parts_of_a_transposed_convolution_need_only_what_they_read() -> None:
    draw = random.Random(2)
    for _ in range(300):
        kernel, stride, dilation = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 3)
        extra, size = draw.randrange(max(stride, dilation)), draw.randint(1, 9)
        rule = Spread(kernel, stride, dilation, draw.randint(0, 3), extra)
        if rule.length(size) < 1:
            continue
        x, weight = torch.randn(1, 1, size, dtype=torch.float64), torch.randn(1, 1, kernel).double()
        whole = F.conv_transpose1d(x, weight, None, stride, rule.padding, extra, 1, dilation)
        assert rule.length(size) == whole.shape[2]
        start = draw.randrange(whole.shape[2])
        stop = draw.randint(start + 1, whole.shape[2])
        first, last = rule.reads(start, stop, size)
        other = torch.zeros_like(x)
        other[:, :, first:last] = x[:, :, first:last]
        part = F.conv_transpose1d(other, weight, None, stride, rule.padding, extra, 1, dilation)
        torch.testing.assert_close(part[:, :, start:stop], whole[:, :, start:stop])


def test_outputs_of_groups_read_their_groups() -> None:
    draw = random.Random(5)
    for _ in range(200):
        rule, groups = Grouped(draw.randint(1, 4), draw.randint(1, 4)), draw.randint(1, 5)
        x = torch.randn(1, groups * rule.ins, 1, dtype=torch.float64)
        weight = torch.randn(groups * rule.outs, rule.ins, 1, dtype=torch.float64)
        whole = F.conv1d(x, weight, groups=groups)
        assert rule.length(x.shape[1]) == whole.shape[1]
        start = draw.randrange(whole.shape[1])
        stop = draw.randint(start + 1, whole.shape[1])
        found = []
        for a, b in rule.pieces(start, stop):
            low, high = rule.reads(a, b, x.shape[1])
            found.append(F.conv1d(x[:, low:high], weight[a:b], groups=(high - low) // rule.ins))
        assert len(found) <= 3
        torch.testing.assert_close(torch.cat(found, 1), whole[:, start:stop])


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("corners", [False, True])
def test_taps_are_torchs(mode: str, corners: bool) -> None:
    if corners and mode != "linear":
        return
    draw = random.Random(3)
    for _ in range(40):
        size, count = draw.randint(1, 12), draw.randint(1, 30)
        rule = Taps(size, mode, None, corners, count)
        x = torch.randn(1, 1, size, dtype=torch.float64)
        options: dict[str, Any] = {"align_corners": corners} if mode == "linear" else {}
        whole = F.interpolate(x, size=count, mode=mode, **options)
        for k in range(count):
            first, last = rule.reads(k, k + 1, size)
            assert 0 <= first < last <= size and last - first <= 2
            other = torch.full_like(x, 7.0)
            other[:, :, first:last] = x[:, :, first:last]
            again = F.interpolate(other, size=count, mode=mode, **options)
            torch.testing.assert_close(again[0, 0, k], whole[0, 0, k])


@pytest.mark.parametrize("corners", [False, True])
def test_four_taps_are_torchs(corners: bool) -> None:
    draw = random.Random(6)
    for _ in range(60):
        size, count = draw.randint(1, 12), draw.randint(1, 30)
        scale = None if corners or draw.random() < 0.5 else draw.uniform(0.4, 3)
        if scale is not None:
            count = int(size * scale)
        if not count:
            continue
        rule = Cubic(size, scale, corners, count)
        x = torch.randn(1, 1, size, 1, dtype=torch.float64)
        options: dict[str, Any] = dict(mode="bicubic", align_corners=corners)
        how: dict[str, Any] = dict(size=(count, 1)) if scale is None else dict(scale_factor=(scale, 1.0))
        whole = F.interpolate(x, **how, **options)[0, 0, :, 0]
        rows, shares = four_taps(rule)
        found = (x[0, 0, :, 0][torch.tensor(rows)] * torch.tensor(shares, dtype=x.dtype)).sum(1)
        torch.testing.assert_close(found, whole)
        for k in range(count):
            first, last = rule.reads(k, k + 1, size)
            assert (first, last) == (min(rows[k]), max(rows[k]) + 1)


def _drawn_rule(draw: random.Random) -> tuple[Rule, int]:
    match draw.randrange(6):
        case 0:
            return Same(), draw.randint(1, 9)
        case 1:
            size = draw.randint(1, 9)
            return Taps(size, "linear", None, False, draw.randint(1, 20)), size
        case 2:
            ins = draw.randint(1, 3)
            return Grouped(ins, draw.randint(1, 3)), ins * draw.randint(1, 4)
        case 3:
            size = draw.randint(1, 9)
            return Cubic(size, None, draw.random() < 0.5, draw.randint(1, 20)), size
        case 4:
            rule = Spread(draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 2))
            return rule, draw.randint(1, 9)
        case _:
            return _drawn_window(draw, pool=draw.random() < 0.5)


def _uneven(draw: random.Random, size: int, parts: int) -> tuple[int, ...]:
    if draw.random() < 0.5:
        return balanced(size, parts)
    ends = sorted(draw.randint(0, size) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, size]))


def test_a_plan_covers_what_each_place_needs_once() -> None:
    draw = random.Random(4)
    split = 0
    for _ in range(400):
        dims = draw.randint(1, 3)
        shape = tuple(draw.choice((1, 2, 3)) for _ in range(dims))
        rules, sizes = zip(*(_drawn_rule(draw) for _ in range(dims)))
        cuts = tuple(_uneven(draw, n, parts) for n, parts in zip(sizes, shape))
        plan = plan_halos(cuts, shape, rules, True)
        starts = [[sum(lengths[:c]) for c in range(len(lengths))] for lengths in cuts]
        covered = torch.zeros([max(n, 0) for n in plan.outputs], dtype=torch.int64)
        for k, (index, member) in enumerate(zip(coordinates(shape), plan.members)):
            covered[tuple(slice(*span) for span in member.outputs)] += 1
            if member.empty:
                continue
            _check_member(k, index, member, shape, sizes, rules, starts, cuts)
            split += bool(member.interior and member.slabs)
        assert bool((covered == 1).all())
    assert split > 20


def _check_member(
    k: int, index: Any, member: Member, shape: Any, sizes: Any, rules: Any, starts: Any, cuts: Any
) -> None:
    parts = [*member.slabs, *([member.interior] if member.interior else [])]
    done = torch.zeros([b - a for a, b in member.outputs], dtype=torch.int64)
    for slab in parts:
        done[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(slab.outputs, member.outputs))] += 1
        assert slab.reads == tuple(r.reads(*o, n) for r, o, n in zip(rules, slab.outputs, sizes))
    assert bool((done == 1).all())
    if member.interior:
        for (a, b), (begin, end), c, d in zip(member.interior.reads, member.inner, index, range(len(index))):
            if volume(member.interior.reads):
                assert (begin, end) == (a - starts[d][c], b - starts[d][c])
                assert 0 <= begin <= end <= cuts[d][c]
    # Each cell is marked with its number at its place in the whole.
    marks = torch.full(sizes, -1)
    for number_of, cell in enumerate(member.cells):
        at = coordinates(shape)[cell.source]
        where = tuple(
            slice(starts[d][c] + a, starts[d][c] + b) for d, (c, (a, b)) in enumerate(zip(at, cell.box))
        )
        assert bool((marks[where] == -1).all())
        marks[where] = number_of
        assert (cell.source == k) == (number_of == member.own)
    for slab in member.slabs:
        if not volume(slab.reads):
            continue
        there = marks[tuple(slice(*span) for span in slab.reads)]
        assert bool((there >= 0).all())
        for d, row in enumerate(slab.cells):
            assert sum(n for _, _, n in row) == there.shape[d]
        first = number(tuple(row[0][0] for row in slab.cells), member.grid)
        assert int(there.flatten()[0]) == first


def test_the_elements_that_move_are_those_of_the_halos() -> None:
    # A 3 x 3 window on 8 x 8, over 2 x 2: each place needs a row, a column and a corner.
    window = Window(3, before=1, after=1)
    plan = plan_halos(((1,), (2,), (4, 4), (4, 4)), (1, 1, 2, 2), (Same(), Same(), window, window), True)
    assert plan.moved == 4 * 2 * (4 + 4 + 1)
    assert all(member.interior and len(member.slabs) == 2 for member in plan.members)
    # Windows that do not overlap need nothing from elsewhere.
    pool = Window(2, 2)
    plan = plan_halos(((1,), (2,), (4, 4)), (1, 1, 2), (Same(), Same(), pool), True)
    assert plan.moved == 0 and not any(member.slabs for member in plan.members)
