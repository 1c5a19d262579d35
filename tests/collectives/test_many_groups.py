"""What one more group costs a worker does not grow with what the worker has open. Steps are counted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import distruntime as dr
from distruntime_worker.collectives import listening
from distruntime_worker.collectives.data_channel import gloo

# A worker with many groups has at least so many descriptors, and looks at no more for one more group.
HELD, LOOKED_AT = 300, 100


def test_what_a_library_opens_is_found_by_the_next_numbers() -> None:
    with ExitStack() as stack:
        for _ in range(HELD):
            stack.enter_context(socket.socket())
        near = listening.next_descriptors(8)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert server.fileno() in near and len(near) == 8
        assert listening.sockets_among(near).listening == {server.getsockname()}


def test_where_gloo_listens_is_found_without_a_look_at_each_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "tcp_sockets", lambda: pytest.fail("it has looked at each descriptor"))
    device, where = gloo._device("127.0.0.1")
    assert device is not None and where is not None and where[0] == "127.0.0.1"


def test_where_other_threads_open_something_all_descriptors_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "next_descriptors", lambda count: [])
    _, where = gloo._device("127.0.0.1")
    assert where is not None


def _hold() -> None:
    """Open many sockets in a worker, and count from now on what it looks at."""
    from distruntime_worker.collectives import listening as there

    state = {"held": [socket.socket() for _ in range(HELD)], "looked": 0, "before": there._socket}

    def counted(number: int) -> socket.socket:
        state["looked"] += 1  # type: ignore[operator]
        return state["before"](number)  # type: ignore[operator, no-any-return]

    there._socket = counted
    there.growing_state = state  # type: ignore[attr-defined]


def _let_go() -> int:
    """Close them; return how many it has looked at since."""
    from distruntime_worker.collectives import listening as there

    state = there.growing_state  # type: ignore[attr-defined]
    there._socket = state["before"]
    for one in state["held"]:
        one.close()
    del there.growing_state  # type: ignore[attr-defined]
    return int(state["looked"])


def test_a_group_looks_at_few_descriptors_of_a_worker_that_has_many(
    fresh_session: Callable[..., Any],
) -> None:
    fresh_session(world_size=2)
    for node in range(2):
        with dr.on(node):
            dr.remote(_hold)()
    # A group is opened beside what the workers run.
    dr.synchronize()
    dr.distributed.new_group([0, 1])
    looked = []
    for node in range(2):
        with dr.on(node):
            looked.append(int(dr.remote(_let_go)()))
    assert all(0 < count < LOOKED_AT for count in looked), looked
