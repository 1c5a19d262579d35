"""The store where a group's members find each other: what it does, what it refuses, who it listens to, and
when waiting in it ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import distruntime as dr
from distruntime.errors import NodeFailed, NotSupportedError, ProtocolError
from distruntime.wire.messages import Entry, OpenGroup
from distruntime_worker.collectives.groups import Groups
from distruntime_worker.collectives.store import LARGEST_VALUE, GroupStore
from distruntime_worker.machine.devices import Devices
from processes import until


def three() -> list[GroupStore]:
    """The stores of one group on three workers."""
    stores: list[GroupStore] = []

    def other(k: int) -> Callable[[str, bytes], None]:
        return lambda key, value: (
            [store.arrived(key, value) for j, store in enumerate(stores) if j != k] and None
        )

    stores += [GroupStore(7, 5.0, other(k)) for k in range(3)]
    return stores


def test_what_one_sets_all_get() -> None:
    one, two, three_ = three()
    two.set("a", "text")
    three_.set("b", b"\0\xff")
    for store in (one, two, three_):
        assert store.get("a") == b"text" and store.multi_get(["a", "b"]) == [b"text", b"\0\xff"]
        assert store.check(["a", "b"]) and not store.check(["a", "c"])
        store.wait(["b"], timedelta(seconds=0))


def test_who_waits_is_woken_by_the_key_and_told_what_has_not_come() -> None:
    one, two, _ = three()
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(one.get("late")))
    waiting.start()
    two.set("late", "here")
    waiting.join(20)
    assert found == [b"here"]
    with pytest.raises(TimeoutError, match=r"group 7: no member has set 'x', 'y' in its store within 0.01 s"):
        one.wait(["late", "x", "y"], timedelta(milliseconds=10))


def test_the_end_of_the_group_wakes_who_waits() -> None:
    one = three()[0]
    raised: list[Exception] = []

    def wait() -> None:
        try:
            one.get("never")
        except NodeFailed as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    one.end("a member is gone")
    one.end("another reason")
    for thread in threads:
        thread.join(20)
    assert [str(error) for error in raised] == ["group 7 has ended: a member is gone"] * 3
    with pytest.raises(NodeFailed, match="a member is gone"):
        one.set("a", "b")


def test_what_it_cannot_do_it_says() -> None:
    store = three()[0]
    calls: list[Callable[[], Any]] = [
        lambda: store.add("a", 1),
        lambda: store.append("a", "b"),
        lambda: store.compare_set("a", "b", "c"),
        lambda: store.delete_key("a"),
        lambda: store.num_keys(),
        lambda: store.queue_push("a", "b"),
        lambda: store.queue_pop("a"),
        lambda: store.queue_len("a"),
        lambda: store.list_keys(),
    ]
    for call in calls:
        with pytest.raises(NotSupportedError, match=r"the store of a group has no .* set a key of its own"):
            call()
    for key, value in (("k" * 2000, "v"), ("k", "v" * (LARGEST_VALUE + 1))):
        with pytest.raises(ValueError, match="for finding each other, tensors take the data channel"):
            store.set(key, value)


# -- what other workers say ------------------------------------------------------------------------


class Worker:
    """The groups of a worker that is node 0, its executing threads left out."""

    def __init__(self) -> None:
        self.groups = Groups(Devices((), 0), lambda message: None, lambda group, reason: None)
        self.told: list[tuple[int, Any]] = []

    def open(self, number: int, nodes: list[int]) -> None:
        members = [[rank, "cpu"] for rank, node in enumerate(nodes) if node == 0]
        message = OpenGroup(1, number, "there is no such channel", b"", nodes, members, 5.0)
        self.groups.open(message, "127.0.0.1", self.tell, lambda error: None)

    def tell(self, node: int, message: Any) -> None:
        self.told.append((node, message))

    def hear(self, node: int, group: int, key: str, value: bytes = b"v") -> None:
        self.groups.receive(node, Entry(group, key, value))


def test_what_comes_before_the_group_is_kept_if_it_is_a_members(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    for number in (1, 2):
        for node in (1, 2):
            worker.hear(node, number, f"from {node}")
    seen: list[GroupStore] = []
    arrived = GroupStore.arrived

    def note(store: GroupStore, key: str, value: bytes) -> None:
        seen.append(store)
        arrived(store, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupStore, "arrived", note)
        worker.open(2, [0, 1])
    assert len(seen) == 1, "group 1 was never this worker's, and node 2 is not in group 2"
    assert "node 2 has set a key of group 2, which it is not in" in caplog.text
    assert not worker.groups._early


def test_entries_for_groups_that_are_over_or_that_never_come_are_not_kept() -> None:
    worker = Worker()
    worker.open(3, [0, 1])
    for number in (1, 2):
        worker.hear(1, number, "late")
    assert not worker.groups._early
    with pytest.raises(ProtocolError, match="Entry for group 3 by node 2, which is not in it"):
        worker.hear(2, 3, "x")
    with pytest.raises(ProtocolError, match="more than 16 MiB of entries for groups that are not open"):
        for number in range(4, 100):
            worker.hear(1, number, "large", bytes(1 << 20))
    worker.groups.end_all("over")
    worker.hear(1, 200, "x")
    assert not worker.groups._early


def test_a_key_is_told_to_each_other_worker_once() -> None:
    worker = Worker()
    worker.open(1, [0, 1, 0, 2, 1])
    worker.groups[1].broken = ""  # there is no such channel, and nothing here needs one
    store = GroupStore(1, 1.0, worker.groups[1].store._tell)
    store.set("a", "b")
    assert sorted(node for node, _ in worker.told) == [1, 2]
    assert {message for _, message in worker.told} == {Entry(1, "a", b"b")}


# -- between workers -------------------------------------------------------------------------------


class Waits(dr.distributed.DataChannel):
    """A channel whose members wait for what the last one says, which dies instead."""

    capabilities = dr.distributed.Capabilities(frozenset({"barrier"}))

    def __init__(self, membership: Any) -> None:
        super().__init__(membership)
        try:
            membership.store.set(f"here-{self.rank}", "")
            if self.rank == self.size - 1:
                membership.store.wait([f"here-{rank}" for rank in range(self.size)])
                os.kill(os.getpid(), signal.SIGKILL)
            membership.store.get("what nobody says")
        except dr.errors.NodeFailed as error:
            print(f"rank {self.rank} woke: {error}", flush=True)
            raise

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


def test_a_member_that_dies_while_others_meet_wakes_them(fresh_session: Callable[..., Any]) -> None:
    session = fresh_session(world_size=3)
    dr.distributed.register_data_channel("waits", Waits)
    with pytest.raises(dr.errors.NodeFailed, match=r"node 2 .*killed by signal 9"):
        dr.distributed.new_group([0, 1, 2], backend="waits")
    for worker in session.workers[:2]:
        until(lambda worker=worker: "woke: group " in worker.last_lines(50))  # type: ignore[misc]
