"""Groups: what is refused and with which words, several members on one node, `Work`, streams, threads, late members, closing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from processes import blocked, stopped, until, waits_less


def each(*values: float, size: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor per node, each of one number."""
    return [there(torch.full((size,), value, dtype=dtype), node) for node, value in enumerate(values)]


def keep_busy(node: int, rounds: int = 40) -> torch.Tensor:
    """Give a node's current stream work for some tenths of a second; return a zero that comes after it."""
    with dr.node(node):
        busy = torch.ones(500, 500, device=REMOTE)
    for _ in range(rounds):
        busy = busy @ busy / 500
    return busy[0, 0] - busy[1, 1]


# What is refused, before anything is sent

A, B = 1.0, 2.0
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "one tensor": (lambda g: dr.distributed.all_reduce(each(A)[0]), dr.errors.UsageError, "must be a list with one tensor for each member of the group, got one tensor, (3,)"),
    "no tensors": (lambda g: dr.distributed.all_reduce([]), dr.errors.UsageError, "got an empty list"),
    "too few": (lambda g: dr.distributed.all_reduce(each(A), group=g), dr.errors.UsageError, "one tensor for each of the 2 members"),
    "unequal shapes": (
        lambda g: dr.distributed.all_reduce([each(A)[0], there(torch.ones(4), 1)]),
        dr.errors.UsageError,
        "tensors must be of one shape and dtype: [0] is (3,) float32, [1] is (4,) float32",
    ),
    "unequal dtypes": (lambda g: dr.distributed.all_reduce([each(A)[0], there(torch.ones(3).int(), 1)]), dr.errors.UsageError, "[0] is (3,) float32, [1] is (3,) int32"),
    "a place twice": (lambda g: dr.distributed.all_reduce([each(A)[0], each(A)[0]]), dr.errors.UsageError, "node 0 cpu was given twice: each member of a group is another place"),
    "a member twice": (lambda g: dr.distributed.new_group([0, 1, 0]), dr.errors.UsageError, "node 0 cpu was given twice"),
    "no members": (lambda g: dr.distributed.new_group([]), dr.errors.UsageError, "at least one member"),
    "no list": (lambda g: dr.distributed.new_group(1), dr.errors.UsageError, "a list of node numbers or places"),
    "no such node": (lambda g: dr.distributed.new_group([0, 5]), dr.errors.PlacementError, "no node 5"),
    "no such device": (lambda g: dr.distributed.new_group([dr.types.Place(0, "cuda:0")]), dr.errors.PlacementError, "no device 'cuda:0'"),
    "wrong order": (lambda g: dr.distributed.all_reduce(each(A, B)[::-1], group=g), dr.errors.PlacementError, "tensors[0] is on node 1 cpu, which is rank 1 of it"),
    "not in it": (lambda g: dr.distributed.all_reduce(each(A, B), group=dr.distributed.new_group([1])), dr.errors.UsageError, "each of the 1 members"),
    "a place outside": (lambda g: dr.distributed.broadcast(each(A, B), dr.types.Place(0, "cuda:0"), g), dr.errors.PlacementError, "is not in <distruntime.distributed.ProcessGroup"),
    "a node outside": (lambda g: dr.distributed.broadcast(each(A, B), 7, g), dr.errors.PlacementError, "no member of"),
    "a rank outside": (lambda g: dr.distributed.broadcast(each(A, B), group=g, group_src=2), dr.errors.UsageError, "a rank of the group, 0 to 1, got 2"),
    "two roots": (lambda g: dr.distributed.broadcast(each(A, B), 0, g, group_src=0), dr.errors.UsageError, "give one of the two"),
    "a local tensor": (lambda g: dr.distributed.all_reduce([torch.ones(1), *each(A)]), dr.errors.PlacementError, "local tensor"),
    "no tensor": (lambda g: dr.distributed.all_reduce([1, 2]), dr.errors.UsageError, "must be a remote tensor, got int"),
    "no group": (lambda g: dr.distributed.all_reduce(each(A, B), group="world"), dr.errors.UsageError, "what distruntime.distributed.new_group returned, got str"),
    "no op": (lambda g: dr.distributed.all_reduce(each(A, B), "sum"), dr.errors.UsageError, "must be a distruntime.distributed.ReduceOp, got 'sum'"),
    "an op that gloo lacks": (lambda g: dr.distributed.all_reduce(each(A, B), dr.distributed.premul_sum(0.5)), dr.errors.NotSupportedError, "the data channel 'gloo' has no ReduceOp.PREMUL_SUM"),
    "a mean of integers": (lambda g: dr.distributed.all_reduce(each(A, B, dtype=torch.int64), dr.distributed.ReduceOp.AVG), dr.errors.NotSupportedError, "by AVG, not int64"),
    "bits of floats": (lambda g: dr.distributed.all_reduce(each(A, B), dr.distributed.ReduceOp.BAND), dr.errors.NotSupportedError, "by BAND, not float32"),
    "sums of bool": (lambda g: dr.distributed.all_reduce(each(A, B, dtype=torch.bool)), dr.errors.NotSupportedError, "by SUM, not bool"),
    "maximum of complex": (lambda g: dr.distributed.all_reduce(each(A, B, dtype=torch.complex64), dr.distributed.ReduceOp.MAX), dr.errors.NotSupportedError, "by MAX, not complex64"),
    "no such channel": (lambda g: dr.distributed.new_group([0, 1], backend="carrier"), dr.errors.ConfigurationError, "carrier"),
    "nccl without GPUs": (lambda g: dr.distributed.new_group([0, 1], backend="nccl"), dr.errors.ConfigurationError, "nccl"),
    "mpi": (lambda g: dr.distributed.new_group([0, 1], backend="mpi"), dr.errors.ConfigurationError, "mpi"),
    "no timeout": (lambda g: dr.distributed.new_group([0, 1], timeout=0), dr.errors.UsageError, "seconds above 0"),
    "gather list": (lambda g: dr.distributed.gather(each(A, B), each(A), 0, g), dr.errors.UsageError, "gather_list must be a list of 2 tensors"),
    "gather list elsewhere": (lambda g: dr.distributed.gather(each(A, B), each(A, B), 0, g), dr.errors.PlacementError, "gather_list[1] is on node 1"),
    "scatter list": (lambda g: dr.distributed.scatter(each(A, B), None, 0, g), dr.errors.UsageError, "scatter_list must be a list of 2 tensors"),
    "gathered shape": (lambda g: dr.distributed.all_gather_into_tensor(each(A, B), each(A, B), g), dr.errors.UsageError, "must be (6,) or (2, 3) float32, got (3,) float32"),
    "all_gather lists": (lambda g: dr.distributed.all_gather(each(A, B), each(A, B), g), dr.errors.UsageError, "must be a list of 2 tensors, one for each member, got one tensor"),
    "an empty all_to_all": (lambda g: dr.distributed.all_to_all([], [], g), dr.errors.UsageError, "list"),
    "all_to_all of empty rows": (lambda g: dr.distributed.all_to_all([[], []], [[], []], g), dr.errors.UsageError, "list"),
    "all_to_all of tensors": (lambda g: dr.distributed.all_to_all(each(A, B), each(A, B), g), dr.errors.UsageError, "list"),
    "rows to share": (lambda g: dr.distributed.all_to_all_single(each(A, B), each(A, B), group=g), dr.errors.UsageError, "cannot share equally"),
    "splits": (lambda g: dr.distributed.all_to_all_single(each(A, B), each(A, B), None, [[1, 1], [2, 1]], g), dr.errors.UsageError, "sum to the 3 rows"),
    "output splits of another form": (lambda g: dr.distributed.all_to_all_single(each(A, B), each(A, B), [1, 2], group=g), dr.errors.UsageError, "rows of 2 numbers"),
    "functional all_to_all": (lambda g: dr.functional.all_to_all(each(A, B), g), dr.errors.UsageError, "must be a list of tensors, one for each member"),
    "splits of another form": (lambda g: dr.distributed.all_to_all_single(each(A, B), each(A, B), None, [1, 2], g), dr.errors.UsageError, "rows of 2 numbers"),
    "rows that overlap": (
        lambda g: dr.distributed.all_reduce([there(torch.ones(1), k).expand(3) for k in (0, 1)], group=g),
        dr.errors.UsageError,
        "more than one element of the written-to tensor refers to a single memory location",
    ),
    "functional scatter": (lambda g: dr.functional.scatter(each(A, B), g), dr.errors.UsageError, "expected a tensor of node 0 cpu"),
    "functional broadcast": (lambda g: dr.functional.broadcast(each(A, B)[0], dr.distributed.new_group([1])), dr.errors.UsageError, "expected a tensor of a member"),
    "zero-dimensional": (lambda g: dr.functional.all_gather([t.sum() for t in each(A, B)], g), dr.errors.UsageError, "x.reshape(1)"),
    "not to be shared": (lambda g: dr.functional.reduce_scatter(each(A, B), group=g), dr.errors.UsageError, "a first dimension that 2 members can share"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_with_words(session: object, case: str) -> None:
    wrong, error, text = WRONG[case]
    group = dr.distributed.new_group([0, 1])
    with pytest.raises(error, match=re.escape(text)):
        wrong(group)
    values = each(A, B)
    dr.distributed.all_reduce(values, group=group)
    assert [t.tolist() for t in values] == [[3.0] * 3] * 2
    group.close()


def test_a_closed_group_says_so_and_others_live_on(session: object) -> None:
    group, other, values = dr.distributed.new_group([0, 1]), dr.distributed.new_group([1, 0]), each(A, B)
    dr.distributed.all_reduce(values, group=group)
    dr.distributed.destroy_process_group(group)
    assert repr(group).startswith(
        f"<distruntime.distributed.ProcessGroup {group.number}, closed, gloo: node 0 cpu, node 1 cpu"
    )
    with pytest.raises(dr.errors.UsageError, match=r"was closed; make it again: dr.distributed.new_group"):
        dr.distributed.all_reduce(values, group=group)
    group.close()
    dr.distributed.all_reduce(values[::-1], group=other)
    assert values[0].tolist() == [6.0] * 3
    other.close()


def test_a_group_that_is_closed_while_streams_still_use_it(session: object) -> None:
    """What was issued before runs; a close that is dropped with its stream does not harm the session."""
    group, values = dr.distributed.new_group([0, 1]), each(A, B)
    side = dr.Stream(1)
    values[1].add_(keep_busy(1))
    work = dr.distributed.all_reduce(values, group=group, async_op=True)
    with dr.stream(side):
        group.close()
    side.cancel()
    assert work is not None
    assert [t.tolist() for t in values] == [[3.0] * 3] * 2


def test_what_is_dropped_keeps_its_place_among_the_groups_operations(session: object) -> None:
    """Else one member would be at the second operation while the other is at the first."""
    group, first, second = dr.distributed.new_group([0, 1]), each(A, B), each(5.0, 6.0)
    side = dr.Stream(1)
    with blocked(dr.default_stream(1, "cpu")):
        late = [first[0], first[1] + 0]
        first = dr.functional.all_reduce(late, group=group)
        with dr.stream(side):
            second = dr.functional.all_reduce(second, group=group)
        side.cancel()
    assert [t.tolist() for t in first] == [[3.0] * 3] * 2
    for tensor in second:
        with pytest.raises(dr.errors.StreamCancelled):
            tensor.cpu()
    group.close()
    drain()


def drain() -> None:
    """Read failures that a test has made on purpose."""
    for _ in range(10):
        try:
            dr.synchronize()
        except dr.DistruntimeError:
            continue
        return


# Several members on one node


def test_members_on_one_node_and_on_several(fresh_session: Any) -> None:
    fresh_session(world_size=2, simulate_cuda=2)
    places = [
        dr.types.Place(0, "cuda:1"),
        dr.types.Place(1, "cuda:0"),
        dr.types.Place(0, "cpu"),
        dr.types.Place(0, "cuda:0"),
    ]
    group = dr.distributed.new_group(places)
    assert [group.rank(p) for p in places] == [0, 1, 2, 3] and group.nodes == [0, 1, 0, 0]

    def values() -> list[torch.Tensor]:
        return [torch.full((4,), float(10**k), device=REMOTE).to(p) for k, p in enumerate(places)]

    given = values()
    dr.distributed.all_reduce(given, group=group)
    assert [t.tolist() for t in given] == [[1111.0] * 4] * 4 and [t.place for t in given] == places
    given = values()
    dr.distributed.broadcast(given, dr.types.Place(0, "cpu"), group)
    assert [t[0].item() for t in given] == [100.0] * 4
    with pytest.raises(
        dr.errors.UsageError, match=r"3 members of .* are on node 0: give the place, or group_src="
    ):
        dr.distributed.broadcast(given, 0, group)
    gathered = dr.functional.gather(values(), dr.types.Place(0, "cuda:0"), group)
    assert [t[0].item() for t in gathered] == [1.0, 10.0, 100.0, 1000.0] and {t.place for t in gathered} == {
        places[3]
    }
    streams = [dr.Stream(p) for p in places]
    given = values()
    with streams[0], streams[2], streams[3]:
        dr.distributed.all_reduce(given, group=group)
        dr.distributed.barrier(group)
    assert [t[0].item() for t in given] == [1111.0] * 4
    with pytest.raises(dr.errors.RemoteError):
        bad = values()
        bad[2] = torch.ones(4, device=REMOTE).to(places[2])[
            torch.tensor([0, 1, 2, 9]).to("remote").to(places[2])
        ]
        dr.distributed.all_reduce(bad, group=group)
        bad[1].cpu()


def test_a_group_of_one(session: object) -> None:
    group, x = dr.distributed.new_group([1]), there(torch.arange(3.0), 1)
    dr.distributed.all_reduce([x], group=group)
    dr.distributed.barrier(group)
    dr.distributed.broadcast([x], 1, group)
    (y,) = dr.functional.all_gather([x], group)
    (z,) = dr.functional.reduce_scatter([x], group=group)
    (w,) = dr.functional.all_to_all_single([x], group=group)
    assert [
        t.tolist()
        for t in (x, y, z, w, *dr.functional.gather([x], group=group), *dr.functional.scatter([x], group))
    ] == [[0, 1, 2]] * 6
    group.close()


# Work


def test_a_negative_view_is_reduced_by_its_value(session: object) -> None:
    values = each(A, B)
    dr.distributed.all_reduce([torch._neg_view(t) for t in values], dr.distributed.ReduceOp.MAX)
    assert [t.tolist() for t in values] == [[1.0] * 3] * 2  # the larger of -1 and -2, seen through the view


def test_each_method_of_work(session: object) -> None:
    values = each(A, B)
    with blocked(dr.default_stream(1, "cpu")):
        values[1].mul_(1)
        work = dr.distributed.all_reduce(values, async_op=True)
        assert work is not None and repr(work).startswith(
            "<distruntime.distributed.Work of <distruntime.distributed.ProcessGroup"
        )
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        future = work.get_future()
        with pytest.raises(dr.errors.WaitTimeout):
            work.synchronize(0.0)
    assert work.wait() is True
    work.block_current_stream()
    work.synchronize(30.0)
    assert work.is_completed() and work.is_success() and work.exception() is None and work.source_rank() == -1
    assert work.result()[1] is values[1] and values[0].tolist() == [3.0] * 3
    until(future.done)
    assert future.value()[0] is values[0]


def test_work_that_failed_says_what(session: object) -> None:
    values = each(A, B)
    values[1] = values[1][there(torch.tensor([0, 1, 9]), 1)]
    work = dr.distributed.all_reduce(values, async_op=True)
    assert work is not None
    until(work.is_completed)
    assert isinstance(work.exception(), IndexError) and not work.is_success()
    drain()


def test_wait_makes_the_current_stream_wait_where_nothing_else_does(session: object) -> None:
    dr.set_implicit_waits(False)
    try:
        for _ in range(5):
            values = each(A, B, size=1 << 16)
            keep_busy(1, 4)
            work = dr.distributed.all_reduce(values, async_op=True)
            assert work is not None
            work.wait()
            doubled = [t * 2 for t in values]
            assert [t[0].item() for t in doubled] == [6.0, 6.0]
    finally:
        dr.set_implicit_waits(True)


def test_a_wait_that_takes_too_long_lets_the_stream_go_on(session: object) -> None:
    values = each(A, B)
    dr.synchronize()
    with stopped(dr.nodes()[1].pid):
        work = dr.distributed.all_reduce(values, async_op=True)
        assert work is not None
        work.wait(0.001)
        with pytest.raises(dr.errors.WaitTimeout):
            dr.synchronize(0, "cpu")
    assert values[0].tolist() == [3.0] * 3
    drain()


# Who is late


def test_a_late_barrier_names_the_member_and_what_it_does(fresh_session: Any) -> None:
    session = fresh_session()
    group = dr.distributed.new_group([0, 1])
    keep_busy(1, 600)
    until(lambda: dr.nodes()[1].state == "busy")
    with pytest.raises(dr.errors.WaitTimeout) as caught:
        dr.distributed.barrier(group, timeout=0.05)
    text = str(caught.value)
    assert (
        "not all have come within 0.05 s" in text
        and "rank 1, node 1 cpu, is late: node 1" in text
        and "rank 0" not in text
    )
    assert "has run " in text and "test_groups.py" in text, text
    dr.distributed.barrier(group)
    with (
        stopped(session.workers[0].pid),
        pytest.raises(dr.errors.WaitTimeout, match=r"rank 0, node 0 cpu, is late: node 0 .*does not answer"),
    ):
        dr.distributed.barrier(group, timeout=0.2)
    dr.distributed.barrier(group)


def test_a_barrier_waits_for_those_that_are_late(session: object) -> None:
    group = dr.distributed.new_group([0, 1])
    keep_busy(1)
    before = dr.current_stream(1, "cpu").record_event()
    work = dr.distributed.barrier(group, async_op=True)
    assert work is not None
    work.wait()
    after = dr.current_stream(0, "cpu").record_event()
    after.synchronize()
    assert before.query()
    keep_busy(1)
    before = dr.current_stream(1, "cpu").record_event()
    dr.distributed.barrier(group)
    assert before.query()
    group.close()


# Poison


def poisoned_calls(group: dr.distributed.ProcessGroup, bad: int) -> dict[str, Any]:
    """Each collective with one member's input poisoned; what should be poisoned then."""

    def given(size: int = 4) -> list[torch.Tensor]:
        values = each(A, B, size=size)
        values[bad] = values[bad][there(torch.tensor([*range(size - 1), 99]), bad)]
        return values

    f, into = dr.functional, lambda size=4: each(0.0, 0.0, size=size)
    lists = lambda: [[t, t + 1] for t in given()]  # noqa: E731
    empty = lambda: [[a, a.clone()] for a in into()]  # noqa: E731

    def writes(call: Any, *args: Any, **options: Any) -> Any:
        call(*args, group=group, **options)
        return args[0]

    reduced = given()
    dr.distributed.reduce(reduced, 1 - bad, group=group)
    gathered = [t.clone() for t in [into()[1 - bad]] * 2]
    dr.distributed.gather(given(), gathered, 1 - bad, group)
    parts = given()[bad]
    scattered = into()
    dr.distributed.scatter(scattered, [parts, parts.clone()], bad, group)
    return {
        "all_reduce": writes(dr.distributed.all_reduce, given()),
        "broadcast": writes(dr.distributed.broadcast, given(), group_src=bad),
        "reduce": [reduced[1 - bad]],
        "all_gather": writes(dr.distributed.all_gather, empty(), given())[0],
        "all_gather_into_tensor": writes(dr.distributed.all_gather_into_tensor, into(8), given()),
        "gather": gathered,
        "scatter": scattered,
        "reduce_scatter": writes(dr.distributed.reduce_scatter, into(), lists()),
        "reduce_scatter_tensor": writes(dr.distributed.reduce_scatter_tensor, into(2), given()),
        "all_to_all": [t for row in writes(dr.distributed.all_to_all, empty(), lists()) for t in row],
        "all_to_all_single": writes(dr.distributed.all_to_all_single, into(), given()),
        "functional": [
            *f.all_reduce(given(), group=group),
            *f.broadcast(given()[bad], group),
            f.reduce(given(), 1 - bad, group=group),
        ],
        "functional too": [
            *f.all_gather(given(), group),
            *f.gather(given(), 1 - bad, group),
            *f.all_to_all_single(given(), group=group),
        ],
    }


@pytest.mark.parametrize("bad", [0, 1])
def test_poison_reaches_everyone_with_its_first_cause(session: object, bad: int) -> None:
    group, untouched = dr.distributed.new_group([0, 1]), each(A, B)
    for name, tensors in poisoned_calls(group, bad).items():
        for tensor in tensors:
            with pytest.raises(IndexError, match="out of bounds") as caught:
                tensor.cpu()
            assert "aten::index" in str(caught.value) and f"on node {bad} " in str(caught.value), name
    drain()
    dr.distributed.all_reduce(untouched, group=group)
    assert [t.tolist() for t in untouched] == [[3.0] * 3] * 2
    group.close()


def test_poison_of_nothing_reaches_everyone_too(session: object) -> None:
    """Where no bytes move, nobody may be past the operation before word of it has come."""
    group = dr.distributed.new_group([0, 1])
    for _ in range(10):
        empty = [there(torch.ones(3))[there(torch.tensor([9]))][:0], there(torch.ones(0), 1)]
        for out in dr.functional.all_reduce(empty, group=group):
            with pytest.raises(IndexError):
                out.cpu()
    drain()
    group.close()


def test_a_cancelled_stream_with_a_collective_on_it(session: object) -> None:
    """The member whose part was dropped takes part all the same; whoever reads hears of it, and nobody hangs."""
    group, side = dr.distributed.new_group([0, 1]), dr.Stream(1)
    for name in ("all_reduce", "broadcast"):
        values, late = each(A, B), each(A, B)
        with blocked(side):
            with dr.stream(side):
                getattr(dr.distributed, name)(values, group=group)
            side.cancel()
        with pytest.raises(dr.errors.StreamCancelled):
            values[1].cpu()
        if name == "all_reduce":
            with pytest.raises(dr.errors.StreamCancelled):
                values[0].cpu()
        else:  # a root's value does not depend on who listens
            assert values[0].tolist() == [A] * 3
        dr.distributed.all_reduce(late, group=group)
        assert [t.tolist() for t in late] == [[3.0] * 3] * 2
    drain()
    group.close()


def test_shapes_are_compared_before_the_group_meets(fresh_session: Callable[..., Any]) -> None:
    """A group that has yet to meet takes seconds, and here it cannot meet."""
    session = fresh_session(world_size=2)
    x, y = torch.ones(3, device=REMOTE), torch.ones(3, device=REMOTE).to(node=1)
    y.sum().item()
    with stopped(session.workers[1].pid):
        for call in (dr.distributed.all_reduce, dr.functional.all_reduce):
            with pytest.raises(
                dr.errors.UsageError, match=r"\[0\] is \(3,\) float32, \[1\] is \(2,\) float32"
            ):
                waits_less(5, lambda call=call: call([x, y[:2]]))


# -- what the user's Python holds ----------------------------------------------------------------------------


class Keeper:
    def keep(self, x: torch.Tensor) -> None:
        self.x = x

    def total(self) -> torch.Tensor:
        return self.x.sum()


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]] = {
    "copy_": lambda x, given, group: x.copy_(given),
    "all_reduce": lambda x, given, group: dr.distributed.all_reduce([given, x], group=group),
    "broadcast": lambda x, given, group: dr.distributed.broadcast([given, x], group_src=0, group=group),
    "reduce": lambda x, given, group: dr.distributed.reduce([given, x], 1, group=group),
    "all_gather": lambda x, given, group: dr.distributed.all_gather_into_tensor(
        [there(torch.zeros(4), 0), x], [given[:2], there(torch.full((2,), 5.0), 1)], group=group
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_zeros_of_a_poisoned_member_do_not_reach_what_an_object_holds(session: object, name: str) -> None:
    """They landed in the object's memory, and it read them without an error."""
    group = dr.distributed.new_group([0, 1])
    x, bad, good = (there(torch.ones(4), node) for node in (1, 0, 0))
    keeper: Any = dr.remote(Keeper, node=1)()
    keeper.keep(x)
    WRITES[name](x, good, group)
    local = {"all_reduce": 8.0, "reduce": 8.0, "all_gather": 12.0}.get(name, 4.0)
    assert keeper.total().item() == local == x.sum().item()
    bad.index_copy_(0, there(torch.tensor([9]), 0), there(torch.zeros(1), 0))
    WRITES[name](x, bad, group)
    assert keeper.total().item() == local
    with pytest.raises(IndexError, match="out of bounds"):
        x.tolist()
