"""`check_collectives` and `distruntime comm`: what collectives give is compared, and their speed is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.__main__ import main
from distruntime.testing import check_collectives
from distruntime.testing import collectives as tried

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send to the next"]


@pytest.mark.slow(reason="starts three workers, 5 s")
def test_each_collective_of_a_group_of_three(fresh_session: Any) -> None:
    fresh_session(world_size=3)
    found = check_collectives(dr.distributed.new_group([2, 0, 1]), sizes=(24, 5000), repeat=2)
    assert [one.collective for one in found] == KINDS * 2
    assert {one.nbytes for one in found} == {24, 4992} and all(one.seconds > 0 for one in found)
    shares = {one.collective: one.bus / one.algorithm for one in found}
    expected = dict(zip(KINDS, (4 / 3, 2 / 3, 2 / 3, 1.0, 2 / 3, 1.0)))
    assert shares == pytest.approx(expected)
    assert "all_to_all" in repr(found) and "bus" in repr(found)


def test_a_wrong_value_is_told_with_its_member(fresh_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_session(world_size=2)

    def lies(xs: list[torch.Tensor], group: object) -> None:
        dr.distributed.all_reduce(xs, group=group)  # type: ignore[arg-type]
        xs[1][3] += 1

    monkeypatch.setattr(dr.distributed, "broadcast", lambda xs, group_src, group: lies(xs, group))
    with pytest.raises(
        AssertionError, match=r"broadcast of 64 B: member 0 \(node 0 cpu\) got 1.0 at 0, expected 0.0"
    ):
        check_collectives(sizes=(64,))
    assert tried.SIZES[0] == 1024


def test_what_cannot_be_tried(fresh_session: Any) -> None:
    fresh_session(world_size=2)
    with pytest.raises(dr.errors.UsageError, match="a size is 8 bytes at least for 2 members, got 4"):
        check_collectives(sizes=(4,))
    with pytest.raises(dr.errors.UsageError, match="this group has one"):
        check_collectives(dr.distributed.new_group([1]))
    mesh = dr.init_device_mesh("cpu", [("data", 2)])
    wrong: Any = mesh.get_group("data")
    with pytest.raises(
        dr.errors.UsageError,
        match=r"got MeshGroup. For a line of a mesh, name its members: dr.distributed.new_group",
    ):
        check_collectives(wrong)
    assert check_collectives(
        dr.distributed.new_group([mesh.places[k] for k in (0, 1)]), sizes=(64,), repeat=1
    )


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    dr.shutdown()
    assert main(["comm", "--sizes", "64,1k"]) == 0
    assert "send to the next  1.0 KiB" in capsys.readouterr().out
    assert main(["comm", "--sizes", "many"]) == 1
    assert "got 'many'" in capsys.readouterr().err
