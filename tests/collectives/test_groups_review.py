"""Groups at their edges: what is cancelled, closed by another thread, written through odd views, or said by a
worker that lies.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import there
from distruntime.collectives.groups import Groups
from distruntime.session.session import active_session
from distruntime.session.spelling import homes_of
from distruntime.wire.channel import Channel
from distruntime.wire.codec import encode
from distruntime.wire.messages import BreakGroup, Meet, OpenGroup, Taint
from processes import blocked, slots, stopped, until


def test_a_cancelled_collective_waits_for_its_turn(session: object) -> None:
    group = dr.distributed.new_group([0, 1])
    slow, dropped = dr.Stream(0), dr.Stream(0)
    first = [there(torch.ones(2), 0), there(torch.full((2,), 2.0), 1)]
    second = [there(torch.full((2,), 10.0), 0), there(torch.full((2,), 20.0), 1)]
    with blocked(slow):
        with dr.stream(slow):
            dr.distributed.all_reduce(first, group=group)
        with dr.stream(dropped):
            results = dr.functional.all_reduce(second, group=group)
        dropped.cancel()
    assert [t.tolist() for t in first] == [
        [3.0, 3.0]
    ] * 2  # not of what node 0 puts into the second, before its first
    for result in results:
        with pytest.raises(dr.errors.StreamCancelled):
            result.tolist()
    group.close()


@pytest.mark.slow(reason="closes groups for 10 s")
def test_a_group_closed_while_another_thread_uses_it(session: object) -> None:
    a, b = there(torch.ones(2), 0), there(torch.ones(2), 1)
    for _ in range(8):
        group = dr.distributed.new_group([0, 1])
        begun, errors = threading.Event(), list[type[Exception]]()

        def run(group: Any = group, begun: Any = begun, errors: Any = errors) -> None:
            try:
                while True:
                    dr.distributed.all_reduce([a, b], group=group)
                    begun.set()
            except Exception as error:
                errors.append(type(error))

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait(60)
        group.close()
        thread.join()
        assert errors == [dr.errors.UsageError]
    dr.synchronize()
    assert all(node.failed is None for node in active_session().nodes)


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"),
    reason="a process's threads are counted in /proc, which this system has not",
)
def test_a_broken_group_leaves_no_threads_on_a_worker(session: object) -> None:
    a, b = there(torch.ones(2), 0), there(torch.ones(2), 1)
    opened = active_session()
    worker = dr.nodes()[1]

    def threads() -> int:
        return len(os.listdir(f"/proc/{worker.pid}/task"))

    def broken() -> None:
        group = dr.distributed.new_group([0, 1])
        dr.distributed.all_reduce([a, b], group=group)
        dr.synchronize()
        opened.groups.end(group, "for a test")

    broken()
    dr.synchronize()
    before = threads()
    for _ in range(5):
        broken()
    until(lambda: threads() <= before)


def test_a_reduction_in_place_of_what_is_pending_negation(session: object) -> None:
    a, b = there(torch.tensor([1 + 2j]), 0).conj().imag, there(torch.tensor([5.0]), 1)
    assert a.is_neg() and a.is_contiguous()
    dr.distributed.all_reduce([a, b], op=dr.distributed.ReduceOp.MAX)
    assert (a.tolist(), b.tolist()) == ([5.0], [5.0])


def test_all_to_all_over_its_own_inputs(session: object) -> None:
    tensors = [there(torch.arange(4.0), 0), there(torch.arange(4.0) * 10, 1)]
    dr.distributed.all_to_all_single(tensors, tensors)
    assert [t.tolist() for t in tensors] == [[0.0, 1.0, 0.0, 10.0], [2.0, 3.0, 20.0, 30.0]]


def test_an_expanded_tensor_is_no_output(session: object) -> None:
    group = dr.distributed.new_group([0, 1])
    row, wide = there(torch.ones(1), 0), there(torch.arange(4.0), 1)
    with pytest.raises(dr.errors.UsageError, match="single memory location"):
        dr.distributed.all_reduce([row.expand(4), wide], group=group)
    whole = there(torch.ones(4), 0)
    dr.distributed.all_reduce([whole, wide], group=group)  # the group is as good as before
    assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
    group.close()


def test_a_copy_over_an_expanded_tensor_fails_as_at_home(session: object) -> None:
    row, wide = there(torch.ones(1), 0).expand(4), there(torch.arange(4.0), 1)
    with pytest.raises(RuntimeError, match="single memory location") as raised:
        row.copy_(wide).tolist()
    assert not isinstance(
        raised.value, dr.errors.NodeFailed
    )  # the channel between the two nodes is as good as before
    assert wide.to(dr.place(0, "cpu")).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", True])
def test_a_groups_timeouts_are_numbers_of_seconds(session: object, seconds: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match="seconds"):
        dr.distributed.new_group([0, 1], timeout=seconds)
    with pytest.raises(dr.errors.UsageError, match="seconds"):
        dr.distributed.barrier(timeout=seconds)
    work = dr.distributed.all_reduce([there(torch.ones(1), 0), there(torch.ones(1), 1)], async_op=True)
    assert work is not None
    with pytest.raises(dr.errors.UsageError, match="seconds"):
        work.synchronize(seconds)


@pytest.mark.parametrize("lists", [[], [[]], 3, [3, 4]], ids=str)
def test_all_to_all_of_what_are_no_lists(session: object, lists: Any) -> None:
    with pytest.raises(dr.errors.UsageError, match="must be a list"):
        dr.distributed.all_to_all(lists, lists)
    with pytest.raises(dr.errors.UsageError, match="must be a list"):
        dr.functional.all_to_all(lists)


def poisoned(node: int) -> torch.Tensor:
    """Return two numbers that are poisoned, on a node's CPU."""
    return there(torch.ones(3), node).index_select(0, there(torch.tensor([0, 99]), node))


def both_hear(group: dr.distributed.ProcessGroup) -> None:
    """Check that each of two workers hears what the other says of a poisoned value."""
    for node in (0, 1):
        tensors = [poisoned(k) if k == node else there(torch.ones(2), k) for k in (0, 1)]
        dr.distributed.all_reduce(tensors, group=group)
        with pytest.raises(IndexError):
            tensors[1 - node].tolist()


def test_workers_that_answer_before_anyone_listens_meet_all_the_same(
    fresh_session: Callable[..., Any],
) -> None:
    opened = fresh_session(world_size=2)
    ask = opened.ask

    def ask_and_wait(*args: Any) -> Any:
        request = ask(*args)
        opened.result(request)
        return request

    opened.ask = ask_and_wait
    groups = Groups(opened, "auto")
    groups.meeting.start()
    opened.ask = ask
    both_hear(groups.open(homes_of(opened, [0, 1]), timeout=20.0))


def test_a_node_lost_at_the_start_keeps_nobody_from_groups(fresh_session: Callable[..., Any]) -> None:
    opened = fresh_session(world_size=3)
    groups = Groups(opened, "auto")
    pid = dr.nodes()[2].pid
    with stopped(pid):
        groups.meeting.start()
        os.kill(pid, signal.SIGKILL)
    until(lambda: opened.nodes[2].failed)
    both_hear(groups.open(homes_of(opened, [0, 1]), timeout=20.0))


def test_a_worker_breaks_no_group_that_it_is_not_in(fresh_session: Callable[..., Any]) -> None:
    opened = fresh_session(world_size=3)
    group = dr.distributed.new_group([0, 1], timeout=20.0)
    opened.receiver.take(opened.nodes[2].link.peer, [encode(BreakGroup(group.number, "out of spite"))])
    assert opened.nodes[2].failed
    both_hear(group)


def test_a_worker_that_lies_to_another_does_it_no_harm(fresh_session: Callable[..., Any]) -> None:
    opened = fresh_session(world_size=2)
    group = dr.distributed.new_group([0, 1], timeout=20.0)
    both_hear(group)
    for name, node, failure in (
        (b"a", 99, [0, 0, "ValueError", "", "", "", "", -1]),
        (b"b", 1, [[]] * 8),
        (b"c", 1, []),
    ):
        liar = Channel()
        liar.connect(opened.groups.meeting._asked[0].value, name)
        for message in (
            Meet(opened.groups.meeting._secret, node, b"a liar"),
            Taint(group.number, 5, failure),
            Taint(group.number, 6, failure),
        ):
            liar.send(name, [encode(message)])
        until(lambda liar=liar: liar.sent_bytes)  # type: ignore[misc]
        # These are the group's fifth and sixth operations.
        both_hear(group)
        liar.close()
    tensors = [there(torch.ones(2), 0), there(torch.ones(2), 1)]
    dr.distributed.all_reduce(tensors, group=group)
    assert tensors[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("members", [[[0]], [[2, "cpu"]], [[0, "nowhere"]]], ids=str)
def test_a_worker_drops_a_master_that_opens_a_group_of_nobody(
    fresh_session: Callable[..., Any], members: list[Any]
) -> None:
    opened = fresh_session(world_size=2)
    node = opened.nodes[0]
    opened.post(node, OpenGroup(0, 1, "gloo", b"", [0, 1], members, 5.0))
    until(lambda: node.failed)
    assert "left: group 1 of" in node.failed  # not exited


def test_a_work_whose_member_is_lost_is_over_and_has_failed(fresh_session: Callable[..., Any]) -> None:
    opened = fresh_session(world_size=2)
    group = dr.distributed.new_group([0, 1])
    with stopped(dr.nodes()[1].pid):
        work = dr.distributed.all_reduce(
            [there(torch.ones(2), 0), there(torch.ones(2), 1)], group=group, async_op=True
        )
        os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    assert work is not None
    until(lambda: opened.nodes[1].failed)
    until(work.is_completed)
    assert isinstance(work.exception(), dr.errors.NodeFailed)
    assert not work.is_success()


def test_a_closed_group_keeps_nothing_that_was_sent_in_it(session: object) -> None:
    group = dr.distributed.new_group([0, 1])
    dr.distributed.send(there(torch.ones(2), 0), dst=1, group=group)
    held = slots(1)
    group.close()
    assert slots(1) == held - 1


class Reluctant(dr.distributed.DataChannel):
    """A channel that rank 1 does not want, for which rank 0 waits."""

    capabilities = dr.distributed.Capabilities(frozenset({"barrier"}))

    def __init__(self, membership: Any) -> None:
        super().__init__(membership)
        if self.rank == 1:
            raise RuntimeError("rank 1 would rather not")
        membership.store.get("what rank 1 says")

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


def test_a_group_that_does_not_come_about_says_why(session: object) -> None:
    dr.distributed.register_data_channel("reluctant", Reluctant)
    with pytest.raises(dr.errors.ConnectionFailed, match="rank 1 would rather not"):
        dr.distributed.new_group([0, 1], backend="reluctant", timeout=3.0)


@pytest.mark.parametrize("group", ["world", [0, 1], 0], ids=str)
def test_a_group_that_is_none(session: object, group: Any) -> None:
    for call in (
        lambda: dr.distributed.barrier(group),
        lambda: dr.distributed.all_reduce([there(torch.ones(1), 0)], group=group),
    ):
        with pytest.raises(
            dr.errors.UsageError,
            match=f"must be what distruntime.distributed.new_group returned, got {type(group).__name__}",
        ):
            call()


def test_a_tensor_of_an_ended_session_is_refused_before_anything_is_issued(
    fresh_session: Callable[..., Any],
) -> None:
    fresh_session(world_size=2)
    old = there(torch.ones(2), 1)
    dr.shutdown()
    fresh_session(world_size=2)
    a, b, group = there(torch.ones(2), 0), there(torch.ones(2), 1), dr.distributed.new_group()
    for given in (None, group):
        with pytest.raises(dr.errors.UsageError, match=r"tensors\[1\] is of another session than"):
            dr.distributed.all_reduce([a, old], group=given)
        dr.distributed.all_reduce([a, b], group=given)
    assert a.tolist() == b.tolist() == [4.0, 4.0]


def test_the_group_of_some_places_is_found_again_and_made_again_when_it_is_closed(session: object) -> None:
    a, b = there(torch.ones(2), 0), there(torch.ones(2), 1)
    groups = active_session().groups
    dr.distributed.all_reduce([a, b])
    first = groups.of_places((a.place, b.place))
    assert groups.of_places((a.place, b.place)) is first
    assert groups.of_places((b.place, a.place)) is not first
    first.close()
    dr.distributed.all_reduce([a, b])
    assert groups.of_places((a.place, b.place)) is not first
    assert a.tolist() == b.tolist() == [4.0, 4.0]
