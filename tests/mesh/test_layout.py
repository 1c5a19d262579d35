"""Layouts: which members form groups, and what a member is in each. Numbers only, no workers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import distruntime as dr

SIXTEEN = [("data", 4), ("pipe", 2), ("tensor", 2)]


def test_the_last_mode_is_the_innermost() -> None:
    layout = dr.mesh.Layout(SIXTEEN, world=16)
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert layout.groups("pipe") == [[0, 2], [4, 6], [8, 10], [12, 14], [1, 3], [5, 7], [9, 11], [13, 15]]
    assert layout.groups("data") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_any_order_of_modes() -> None:
    layout = dr.mesh.Layout([("pipe", 2), ("tensor", 2), ("data", 4)])
    assert layout.world == 16
    assert layout.groups("pipe") == [[member, member + 8] for member in range(8)]
    assert layout.groups("tensor")[:3] == [[0, 4], [8, 12], [1, 5]]
    assert layout.groups("data") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_the_members_of_a_model_group_agree_in_data() -> None:
    assert dr.mesh.Layout([("data", 2), ("pipe", 2), ("tensor", 2)]).groups("model") == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert dr.mesh.Layout([("pipe", 2), ("data", 2), ("tensor", 2)]).groups("model") == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert dr.mesh.Layout([("pipe", 2), ("tensor", 2)]).groups("model") == [[0, 1, 2, 3]]
    assert not dr.mesh.Layout([("data", 4)]).uses("model")
    assert dr.mesh.Layout([("model", 2), ("tensor", 2)]).groups("model") == [[0, 2], [1, 3]]  # the user's own


@pytest.mark.parametrize("order", list(itertools.permutations(SIXTEEN)))
def test_every_member_is_in_one_group_of_a_mode(order: list[tuple[str, int]]) -> None:
    layout = dr.mesh.Layout(order).with_experts(ep=2).with_nodes(8)
    for mode in ("data", "pipe", "tensor", "model", "moe_ep", "moe_dp", "node"):
        groups = layout.groups(mode)
        assert sorted(member for group in groups for member in group) == list(range(16))
        assert {len(group) for group in groups} == {layout.size(mode)}
        for group in groups:
            assert [layout.rank(mode, member) for member in group] == list(range(len(group)))
            assert all(layout.group(mode, member) == group for member in group)


def test_what_a_member_is_in_its_group() -> None:
    layout = dr.mesh.Layout(SIXTEEN)
    assert layout.group("pipe", 6) == [4, 6] and layout.rank("pipe", 6) == 1 and layout.size("pipe") == 2
    assert layout.is_last("pipe", 6) and not layout.is_first("pipe", 6) and layout.is_first("pipe", 4)
    assert [layout.next("data", member) for member in (1, 5, 9, 13)] == [5, 9, 13, 1]
    assert [layout.previous("data", member) for member in (1, 5, 9, 13)] == [13, 1, 5, 9]
    assert [member for member in range(16) if layout.is_in_first_group("model", member)] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", list(itertools.permutations(SIXTEEN)))
def test_coordinates_name_a_member(order: list[tuple[str, int]]) -> None:
    layout = dr.mesh.Layout(order)
    assert [layout.member(**layout.coordinates(member)) for member in range(16)] == list(range(16))
    assert list(layout.coordinates(15).values()) == [size - 1 for _, size in order]


def test_a_size_may_be_what_a_division_leaves() -> None:
    layout = dr.mesh.Layout([("data", 16 / (2 * 2)), ("pipe", 2), ("tensor", 2)])
    assert layout == dr.mesh.Layout(SIXTEEN) and type(layout.size("data")) is int
    assert "moe_ep" not in layout and "moe_ep" in layout.with_experts(ep=2) and "model" in layout


def test_a_mode_of_one_member_is_not_used() -> None:
    layout = dr.mesh.Layout([("data", 4), ("tensor", 1)])
    assert layout.uses("data") and not layout.uses("tensor") and not layout.uses("nothing")
    assert layout.groups("tensor") == [[0], [1], [2], [3]]
    assert layout.next("tensor", 2) == layout.previous("tensor", 2) == 2
    assert layout.is_first("tensor", 2) and layout.is_last("tensor", 2)


def test_experts_cut_the_groups_of_data() -> None:
    layout = dr.mesh.Layout([("data", 4), ("tensor", 2)])
    with_experts = layout.with_experts(ep=2)
    assert with_experts.groups("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert with_experts.groups("moe_ep") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert with_experts.groups("moe_dp") == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert (
        with_experts
        == layout.with_experts(dp=2)
        == layout.with_experts(ep=2, dp=2)
        != layout.with_experts(ep=4)
    )
    assert layout.with_experts(ep=4).groups("moe_dp") == [[member] for member in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert not layout.uses("moe_ep")  # as it was


def test_members_of_a_node_follow_each_other() -> None:
    assert dr.mesh.Layout([("data", 16)]).with_nodes().groups("node") == [list(range(8)), list(range(8, 16))]
    assert dr.mesh.Layout([("data", 4)]).with_nodes(per_node=2).groups("node") == [[0, 1], [2, 3]]


def test_groups_are_the_callers_own() -> None:
    layout = dr.mesh.Layout(SIXTEEN)
    layout.groups("data")[0].clear()
    layout.group("data", 0).clear()
    assert layout.groups("data")[0] == [0, 4, 8, 12]
    with pytest.raises(TypeError):
        layout.modes["data"] = 2  # type: ignore[index]


def test_equal_layouts() -> None:
    assert dr.mesh.Layout(SIXTEEN) == dr.mesh.Layout(SIXTEEN) and hash(dr.mesh.Layout(SIXTEEN)) == hash(
        dr.mesh.Layout(SIXTEEN)
    )
    assert dr.mesh.Layout([("data", 2), ("tensor", 2)]) != dr.mesh.Layout([("tensor", 2), ("data", 2)])
    assert (
        repr(dr.mesh.Layout([("data", 2), ("tensor", 2)]).with_nodes(2))
        == "Layout([('data', 2), ('tensor', 2)]) with model, node"
    )
    assert repr(dr.mesh.Layout([("data", 2)])) == "Layout([('data', 2)])"


@pytest.mark.parametrize(
    ("modes", "world", "text"),
    [
        ([("data", 2), ("tensor", 2)], 8, "data 2 x tensor 2 are 4 members, but the world has 8"),
        ([("data", 2), ("data", 2)], None, "mode 'data' is there twice"),
        ([("data", 0)], None, "mode 'data' has size 0"),
        ([("data", -2), ("tensor", -2)], 4, "mode 'data' has size -2"),
        ([("data", 2.5)], None, "mode 'data' has size 2.5"),
        ([("data", True)], None, "mode 'data' has size True"),
        (["data"], None, "a mode is a name and a size"),
        ([(2, "data")], None, "a mode is a name and a size"),
        ([], None, "a layout needs modes"),
    ],
)
def test_a_layout_that_cannot_be(modes: Any, world: int | None, text: str) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=text):
        dr.mesh.Layout(modes, world=world)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({}, "needs ep= or dp="),
        ({"ep": 3}, "ep=3 does not divide the groups of mode 'data', which have 4 members"),
        ({"dp": 8}, "dp=8 does not divide"),
        ({"ep": 0}, "ep=0 does not divide"),
        ({"ep": 2, "dp": 4}, "ep=2 times dp=4 are 8 members, but the groups of mode 'data' have 4"),
    ],
)
def test_experts_that_cannot_be(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=text):
        dr.mesh.Layout(SIXTEEN).with_experts(**sizes)


def test_nodes_and_experts_that_cannot_be() -> None:
    for per_node in (0, -1, 3, 32):
        with pytest.raises(
            dr.errors.ConfigurationError, match=f"16 members do not fill nodes of {per_node}:"
        ):
            dr.mesh.Layout(SIXTEEN).with_nodes(per_node)
    with pytest.raises(dr.errors.ConfigurationError, match="has a mode 'node' already"):
        dr.mesh.Layout([("node", 2), ("data", 8)]).with_nodes(8)
    with pytest.raises(dr.errors.UsageError, match="no mode 'data'; it has \\['model', 'tensor'\\]"):
        dr.mesh.Layout([("tensor", 4)]).with_experts(ep=2)


def test_a_mode_or_a_member_that_is_not_there() -> None:
    layout = dr.mesh.Layout([("data", 2), ("tensor", 2)])
    with pytest.raises(dr.errors.UsageError, match="no mode 'pipe'; it has \\['data', 'model', 'tensor'\\]"):
        layout.groups("pipe")
    for member in (4, -1, None):
        with pytest.raises(
            dr.errors.UsageError, match=f"no member {member} in a layout of 4 members, 0 to 3"
        ):
            layout.rank("data", member)  # type: ignore[arg-type]
    with pytest.raises(dr.errors.UsageError, match=r"coordinates \['data', 'tensor'\], got \['data'\]"):
        layout.member(data=1)
    with pytest.raises(
        dr.errors.UsageError, match="tensor=2 is outside the layout: mode 'tensor' has 2, 0 to 1"
    ):
        layout.member(data=1, tensor=2)
