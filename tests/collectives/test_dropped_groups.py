"""Groups that nobody holds are closed after what was issued to them, and their threads end."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from distruntime.collectives import groups as groups_module
from distruntime.mesh import line_groups
from distruntime.session.session import active_session
from processes import blocked, until

# So many threads serve one group on one worker at most.
PER_GROUP = 3


def threads(node: int) -> int:
    found = dr.fetch(dr.remote(lambda: len(os.listdir("/proc/self/task")))(node=node))
    assert isinstance(found, int)
    return found


def at(places: list[dr.types.Place]) -> list[torch.Tensor]:
    return [torch.full((2,), float(k + 1), device=REMOTE).to(place) for k, place in enumerate(places)]


@pytest.mark.slow(reason="opens 200 groups, 11 s")
def test_many_sets_of_places_keep_few_threads(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "_MOST_SETS", 8)
    fresh_session(world_size=2, simulate_cuda=8)
    everywhere = [dr.types.Place(node, f"cuda:{k}") for node in range(2) for k in range(8)]
    draw, seen = random.Random(1), set[tuple[dr.types.Place, ...]]()
    warm = at(everywhere)
    dr.distributed.all_reduce([warm[0], warm[8]])
    before = [threads(node) for node in range(2)]
    while len(seen) < 200:
        places = tuple([everywhere[draw.randrange(8)], everywhere[8 + draw.randrange(8)]])
        places = (
            places if len(seen) < 60 else (*places, draw.choice([p for p in everywhere if p not in places]))
        )
        if places in seen:
            continue
        seen.add(places)
        values = at(list(places))
        dr.distributed.all_reduce(values)
        assert [t[1].item() for t in values] == [{2: 3.0, 3: 6.0}[len(places)]] * len(places)
    groups = groups_module.groups_of(active_session())
    assert len(groups._by_places) == 8
    # A worker closes what it has been told to, and its threads end a little later.
    most = 8 * PER_GROUP * 2 + 8
    until(lambda: all(threads(node) <= before[node] + most for node in range(2)))
    # A set that has fallen out is opened again.
    first = at([everywhere[0], everywhere[8]])
    dr.distributed.all_reduce(first)
    assert [t[0].item() for t in first] == [3.0, 3.0]


@pytest.mark.parametrize("cycle", [False, True])
def test_a_dropped_group_completes_what_was_issued(session: object, cycle: bool) -> None:
    groups = groups_module.groups_of(active_session())
    group, side = dr.distributed.new_group([0, 1]), dr.Stream(0)
    number, values = group.number, [there(torch.full((3,), float(k + 1)), k) for k in range(2)]
    with blocked(side):
        with dr.stream(side):
            work = dr.distributed.all_reduce(values, group=group, async_op=True)
        if cycle:
            group.templates[("itself",)] = group  # type: ignore[assignment]
        del group
        gc.collect()
        assert groups.nodes_in(number) == [0, 1]
        other = dr.distributed.new_group([0, 1])
        assert groups.nodes_in(number) == []
    work.wait()
    assert [t.tolist() for t in values] == [[3.0] * 3] * 2
    dr.distributed.all_reduce(values, group=other)
    assert [t.tolist() for t in values] == [[6.0] * 3] * 2
    other.close()


def test_groups_that_are_dropped_leave_no_threads(session: object) -> None:
    dr.distributed.barrier(dr.distributed.new_group([0, 1]))
    before = [threads(node) for node in range(2)]
    for k in range(40):
        values = [there(torch.full((3,), float(k + node)), node) for node in range(2)]
        dr.distributed.all_reduce(values, group=dr.distributed.new_group([0, 1]))
        assert values[1][0].item() == 2.0 * k + 1
    until(lambda: all(threads(node) <= before[node] + 2 * PER_GROUP + 4 for node in range(2)))


def test_a_dropped_group_is_closed_by_the_next_synchronize(session: object) -> None:
    """No group has to be opened for that."""
    groups = groups_module.groups_of(active_session())
    group = dr.distributed.new_group([0, 1])
    number, values = group.number, [there(torch.full((3,), float(k + 1)), k) for k in range(2)]
    dr.distributed.all_reduce(values, group=group)
    del group
    gc.collect()
    assert groups.nodes_in(number) == [0, 1]
    dr.synchronize()
    assert groups.nodes_in(number) == []
    assert [t.tolist() for t in values] == [[3.0] * 3] * 2


def test_pairs_of_copies_are_few_and_their_copies_complete(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "_MOST_SETS", 1)
    fresh_session(world_size=4)
    groups = groups_module.groups_of(active_session())
    values, side = [there(torch.full((3,), float(k)), k) for k in range(4)], dr.Stream(0)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    with blocked(side):
        with dr.stream(side):
            # This copy waits, at both of its ends, and its pair falls out meanwhile.
            late = (values[0] + 10).to(dr.place(1))
        first = next(iter(groups._links.values())).number
        assert values[2].to(dr.place(3))[0].item() == 2.0
        assert len(groups._links) == 1
        for _ in range(3):
            groups.close_dropped()
        assert groups.nodes_in(first) == [0, 1]
    assert late.tolist() == [10.0] * 3

    def closed() -> bool:
        dr.synchronize()
        return groups.nodes_in(first) == []

    until(closed)
    before = [threads(node) for node in range(4)]
    for _ in range(3):
        for a, b in pairs:
            assert values[a].to(dr.place(b))[0].item() == float(a)
    dr.synchronize()
    most = 2 * PER_GROUP + 4
    until(lambda: all(threads(node) <= before[node] + most for node in range(4)))
    assert len(groups._links) == 1


def test_a_group_that_is_held_outlives_its_set(session: object) -> None:
    """A group that somebody holds is not closed when its set falls out."""
    groups = groups_module.groups_of(active_session())
    values = [there(torch.ones(2), node) for node in range(2)]
    dr.distributed.all_reduce(values)
    held = groups.of_places((values[0].place, values[1].place))
    groups._by_places.clear()
    dr.distributed.new_group([0, 1]).close()
    dr.distributed.all_reduce(values, group=held)
    assert values[0].tolist() == [4.0, 4.0] and not held.closed


def test_groups_of_meshes_that_nobody_holds_are_few(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_groups, "_MOST_GROUPS", 2)
    fresh_session(world_size=4)
    groups = groups_module.groups_of(active_session())

    def summed(a: int, b: int) -> tuple[list[int], float]:
        mesh = dr.init_device_mesh([a, b], (2,))
        with mesh:
            x = torch.ones(3, device=REMOTE)
        lines = mesh.lines()
        return [group.number for group in lines.groups], dr.lines.all_reduce(lines, x).member(1)[0].item()

    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    held = dr.init_device_mesh([1, 0], (2,))
    lines = held.lines()
    before = [threads(node) for node in range(4)]
    numbers = []
    for _ in range(2):
        for a, b in pairs:
            opened, value = summed(a, b)
            assert value == 2.0
            numbers += opened
            gc.collect()

    def open_ones() -> list[int]:
        dr.synchronize()
        return [number for number in numbers if number != lines.groups[0].number and groups.nodes_in(number)]

    # The next opening looks: one more mesh has been let go of since the last one.
    until(lambda: len(open_ones()) <= 3)
    most = 4 * PER_GROUP + 4
    until(lambda: all(threads(node) <= before[node] + most for node in range(4)))
    # What somebody holds has stayed open.
    with held:
        x = torch.ones(3, device=REMOTE)
    assert dr.lines.all_reduce(lines, x).member(0).tolist() == [2.0] * 3
