"""`dr.cancel` drops what is queued: on all streams of a node, or of every node, and on meshes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session
from processes import blocked, until


def there(node: int) -> torch.Tensor:
    """Return a tensor that has been computed on a node."""
    with dr.on(node):
        x = torch.ones(3)
    assert x.sum().item() == 3
    return x


def dropped(x: torch.Tensor) -> None:
    with pytest.raises(
        dr.errors.StreamCancelled, match=r"dropped by stream\.cancel\(\) or dr\.cancel\(\) before it ran"
    ):
        x.tolist()


def test_all_streams_of_all_nodes_are_dropped(session: object) -> None:
    x, y = there(0), there(1)
    side = dr.Stream(0)
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)), blocked(side):
        with dr.stream(side):
            z = x * 3
        a, b = x + 1, y + 1
        dr.cancel()
    for value in (a, b, z):
        dropped(value)
    assert (x + 2).tolist() == (y + 2).tolist() == [3, 3, 3]
    dr.synchronize()  # nothing healthy raises


def test_one_node_is_dropped_alone(session: object) -> None:
    x, y = there(0), there(1)
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        a, b = x + 1, y + 1
        dr.cancel(1)
    dropped(b)
    assert a.tolist() == [2, 2, 2]


def test_a_mesh_is_dropped_on_all_its_members(session: object) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    m = torch.ones(4, device=mesh.device)
    assert m.sum().item() == 4
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        n = m + 1
        total = dr.lines.all_reduce(mesh.lines(), m)
        dr.cancel(1)
    for value in (n, total):
        for member in (0, 1):
            dropped(value.member(member))
    assert dr.lines.all_reduce(mesh.lines(), m).tolist() == [2, 2, 2, 2]
    assert (m + 2).tolist() == [3, 3, 3, 3]


def test_a_mesh_does_not_overtake_a_wait_of_a_node(session: object) -> None:
    """The node has several streams, and what was sent last is the mesh's: its next words went first."""
    side = dr.Stream(0)
    mesh = dr.init_device_mesh("cpu", (2,))
    m = torch.ones(4, device=mesh.device)
    with dr.stream(side):
        there(0)
    m += 0
    with blocked(dr.default_stream(0)):
        assert not active_session().nodes[0].words
        n = m + 1
    assert n.tolist() == [2, 2, 2, 2]


def test_a_collective_is_dropped_and_the_group_works_on(session: object) -> None:
    x, y = there(0), there(1)
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        a, b = dr.functional.all_reduce([x, y])
        dr.cancel()
    for value in (a, b):
        dropped(value)
    assert [t.tolist() for t in dr.functional.all_reduce([x, y])] == [[2, 2, 2]] * 2


def test_settings_and_seeds_are_not_dropped(session: object) -> None:
    index, value = torch.tensor([0, 0], device=REMOTE), torch.ones(2, device=REMOTE)
    side = dr.Stream(0)
    torch.manual_seed(5)
    first = torch.rand(3, device=REMOTE).tolist()
    with blocked(dr.default_stream(0)), blocked(side):
        torch.manual_seed(5)
        torch.use_deterministic_algorithms(True)
        x = torch.rand(3, device=REMOTE)
        dr.cancel()
    try:
        dropped(x)
        assert torch.rand(3, device=REMOTE).tolist() == first
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.zeros(4, device=REMOTE).put_(index, value).tolist()
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_states_and_the_seeds_of_a_mesh_are_not_dropped(session: object) -> None:
    """Other numbers than the seeds tell followed without a word."""
    mesh = dr.init_device_mesh("cpu", (2,))
    mesh.manual_seed(6, distinct=True)
    members = torch.rand(3, device=mesh.device)
    other = [member.tolist() for member in dr.shards(members)]
    torch.manual_seed(5)
    state = torch.remote.get_rng_state()  # type: ignore[attr-defined]
    first, second = torch.rand(3, device=REMOTE).tolist(), torch.rand(3, device=REMOTE).tolist()
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        torch.remote.set_rng_state(state)  # type: ignore[attr-defined]
        dr.cancel()
    assert torch.rand(3, device=REMOTE).tolist() == first
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        with torch.random.fork_rng(device_type="remote"):
            dropped_ones = torch.rand(3, device=REMOTE), torch.rand(3, device=REMOTE)
        dr.cancel()
    for value in dropped_ones:
        dropped(value)
    assert torch.rand(3, device=REMOTE).tolist() == second
    with blocked(dr.default_stream(0)), blocked(dr.default_stream(1)):
        mesh.manual_seed(6, distinct=True)
        dr.cancel()
    assert [member.tolist() for member in dr.shards(torch.rand(3, device=mesh.device))] == other


def test_a_generator_is_given_back_when_its_draw_is_dropped(session: object) -> None:
    """If the cancellation fell between the halves of an exchange, the place kept the generator's state."""
    generator, local = (torch.Generator(device).manual_seed(1) for device in (REMOTE, "cpu"))
    torch.manual_seed(5)
    with blocked(dr.default_stream(0)):
        x = torch.rand(3, device=REMOTE, generator=generator)
        dr.cancel()
    dropped(x)
    # It is cancelled while it draws.
    with dr.on(0):
        large = torch.empty(30_000_000)
    large.normal_(generator=generator)
    over = dr.fetch_async(large[0])
    until(lambda: over.done() or "aten.normal_" in (dr.nodes()[0].doing or ""))
    dr.cancel()
    assert torch.rand(3, device=REMOTE).tolist() == torch.rand(3).tolist()
    expected = torch.empty(30_000_000).normal_(generator=local)
    assert large[-3:].tolist() == expected[-3:].tolist()
    after = torch.rand(3, device=REMOTE, generator=generator)
    assert after.tolist() == torch.rand(3, generator=local).tolist()


def test_a_state_that_was_dropped_is_no_state(session: object) -> None:
    with blocked(dr.default_stream(0)):
        state = torch.remote.get_rng_state().clone()  # type: ignore[attr-defined]
        dr.cancel()
    torch.remote.set_rng_state(state)  # type: ignore[attr-defined]
    x = torch.rand(3, device=REMOTE)
    with pytest.raises(dr.errors.StreamCancelled):
        x.tolist()


def test_no_such_node_and_a_lost_one(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=2)
    with pytest.raises(dr.errors.PlacementError, match="no node 7"):
        dr.cancel(7)
    os.kill(dr.nodes()[1].pid, signal.SIGKILL)
    until(lambda: active_session().nodes[1].failed is not None)
    with pytest.raises(dr.errors.NodeFailed):
        dr.cancel(1)
    dr.cancel()
    assert torch.ones(3, device=REMOTE).sum().item() == 3
