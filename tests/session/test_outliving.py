"""What outlives a session does not keep it: a program, a compiled function, torch's own caches of meshes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from weakref import ref

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distruntime as dr
from agree import REMOTE
from distruntime.compiled.graph import alive
from distruntime.session.session import active_session
from dynamo import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dr.shutdown()
    yield
    dr.shutdown()
    torch._dynamo.reset()


def ended(use: Callable[[], None]) -> list[object]:
    """Return what is left of two sessions, one after the other."""
    sessions = []
    for _ in range(2):
        dr.init_master_worker(world_size=1)
        sessions.append(ref(active_session()))
        use()
        dr.shutdown()
    gc.collect()
    return [session() for session in sessions]


def test_a_compiled_function_keeps_no_session_that_has_ended() -> None:
    @torch.compile(backend="distruntime")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def use() -> None:
        for _ in range(4):
            assert step(torch.ones(3, device=REMOTE)).sum().item() == 9.0

    others = {*map(id, alive.values())}
    assert ended(use) == [None, None]
    (graph,) = (graph for graph in alive.values() if id(graph) not in others)
    assert graph.replays


def test_a_program_keeps_no_session_that_has_ended() -> None:
    step = dr.program(lambda x: x * 2 + 1)

    def use() -> None:
        before = step.replays
        for _ in range(4):
            assert step(torch.ones(3, device=REMOTE)).sum().item() == 9.0
        assert step.replays > before

    assert ended(use) == [None, None]


def test_dtensor_keeps_no_session_that_has_ended() -> None:
    def use() -> None:
        mesh = dr.init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.ones(4, device=mesh.device), mesh, [Shard(0)])
        assert (x + x).redistribute(mesh, [Replicate()]).to_local().sum().item() == 8.0

    assert ended(use) == [None, None]
