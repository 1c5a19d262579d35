"""The 33 cases that torch.distributed's first test suite had (THD, 2017), each through the master: see what
became of their semantics.

That suite ran one script in every process and checked each rank's result; here one process issues what all
ranks did. The two CUDA cases run on simulated GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from processes import STARTING, until

OPS = {
    "sum": dr.distributed.ReduceOp.SUM,
    "product": dr.distributed.ReduceOp.PRODUCT,
    "min": dr.distributed.ReduceOp.MIN,
    "max": dr.distributed.ReduceOp.MAX,
}
WORLD, GROUP = [0, 1, 2], [1, 2]
BOTH = pytest.mark.parametrize("ranks", [WORLD, GROUP], ids=["world", "group"])


@pytest.fixture(scope="module", autouse=True)
def three_workers() -> Iterator[None]:
    dr.shutdown()
    with dr.init_master_worker(world_size=3, simulate_cuda=1, timeout=STARTING):
        yield


def build(size: int, value: float, node: int, device: str = "cpu") -> torch.Tensor:
    """A cube of one number, as that suite used."""
    with dr.node(node):
        return dr.factories.FloatTensor(size, size, size, device=device).fill_(value)


def is_full(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


@pytest.fixture
def group(ranks: list[int]) -> Iterator[dr.distributed.ProcessGroup]:
    made = dr.distributed.new_group([dr.place(k) for k in ranks])
    yield made
    made.close()


def test_get_rank() -> None:
    group = dr.distributed.new_group([dr.place(k) for k in WORLD])
    assert [group.rank(dr.place(k)) for k in WORLD] == WORLD and group.size() == 3
    assert group.rank(dr.place(0, "cuda:0")) == -1
    group.close()


def test_send_recv() -> None:
    for source in WORLD:
        others = [k for k in WORLD if k != source]
        for k in others:
            dr.distributed.send(build(10, source, source), k)
        for k in others:
            into = build(10, -1, k)
            assert dr.distributed.recv(into, source) == source
            assert is_full(into, source)


def test_send_recv_any_source() -> None:
    for target in WORLD:
        others = [k for k in WORLD if k != target]
        for k in others:
            dr.distributed.send(build(10, k, k), target)
        found = set()
        for _ in others:
            into = build(10, -1, target)
            sender = dr.distributed.recv(into)
            assert is_full(into, sender)
            found.add(sender)
        assert found == set(others)


def test_isend() -> None:
    works = [dr.distributed.isend(build(10, k, 0), k) for k in (1, 2)]
    for k in (1, 2):
        into = build(10, -1, k)
        dr.distributed.recv(into, 0)
        assert is_full(into, k)
    for work in works:
        work.wait()
        until(work.is_completed)


def test_irecv() -> None:
    expected = [build(10, -1, 0) for _ in (1, 2)]
    works = [dr.distributed.irecv(tensor, source) for tensor, source in zip(expected, (1, 2))]
    for k in (1, 2):
        dr.distributed.send(build(10, k, k), 0)
    for tensor, work, source in zip(expected, works, (1, 2)):
        work.wait()
        assert is_full(tensor, source) and work.source_rank() == source


def broadcasts(ranks: list[int], group: dr.distributed.ProcessGroup, device: str = "cpu") -> None:
    for root in ranks:
        tensors = [build(10, root if k == root else -1, k, device) for k in ranks]
        dr.distributed.broadcast(tensors, root, group)
        assert all(is_full(t, root) for t in tensors)


@BOTH
def test_broadcast(ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    broadcasts(ranks, group)


CASES: dict[str, tuple[float, float, Any]] = {  # the root's value, the others', and the result of `n` members
    "sum": (2, 10, lambda n: 2 + 10 * (n - 1)),
    "product": (2, 10, lambda n: 2 * 10 ** (n - 1)),
    "min": (1010, 1, lambda n: 1),
    "max": (-1, 10, lambda n: 10),
}


@BOTH
@pytest.mark.parametrize("op", OPS)
def test_reduce(op: str, ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    root_value, other, result = CASES[op]
    for root in ranks:
        tensors = [build(10, root_value if k == root else other, k) for k in ranks]
        dr.distributed.reduce(tensors, root, OPS[op], group)
        for k, tensor in zip(ranks, tensors):
            assert is_full(tensor, result(len(ranks)) if k == root else other)


@BOTH
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(op: str, ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    root_value, other, result = CASES[op]
    for root in ranks:
        tensors = [build(10, root_value if k == root else other, k) for k in ranks]
        dr.distributed.all_reduce(tensors, OPS[op], group)
        assert all(is_full(t, result(len(ranks))) for t in tensors)


@BOTH
def test_scatter(ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    for root in ranks:
        parts = [build(10, k, root) for k in range(len(ranks))]
        tensors = [build(10, -1, k) for k in ranks]
        dr.distributed.scatter(tensors, parts, root, group)
        assert all(is_full(t, k) for k, t in enumerate(tensors))


@BOTH
def test_gather(ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    for root in ranks:
        into = [build(10, -1, root) for _ in ranks]
        dr.distributed.gather([build(10, k, k) for k in ranks], into, root, group)
        assert all(is_full(t, k) for k, t in zip(ranks, into))


@BOTH
def test_all_gather(ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    into = [[build(10, -1, k) for _ in ranks] for k in ranks]
    dr.distributed.all_gather(into, [build(10, k, k) for k in ranks], group)
    for row in into:
        assert all(is_full(t, k) for k, t in zip(ranks, row))


@BOTH
def test_barrier(ranks: list[int], group: dr.distributed.ProcessGroup) -> None:
    """Nobody passes before the last has come: what the others do afterwards happens after what the last did
    before.
    """
    for late in ranks:
        with dr.node(late):
            busy = torch.rand(400, 400, device="remote")
            for _ in range(20):
                busy = busy @ busy / 400
            before = dr.current_stream(late, "cpu").record_event()
        work = dr.distributed.barrier(group, async_op=True)
        assert work is not None
        work.wait()
        events = [dr.current_stream(k, "cpu").record_event() for k in ranks]
        events[ranks.index(next(k for k in ranks if k != late))].synchronize()
        assert before.query()
        dr.distributed.barrier(group)


def test_broadcast_cuda() -> None:
    group = dr.distributed.new_group(WORLD)
    assert {p.local_device for p in group.places} == {"cuda:0"}
    broadcasts(WORLD, group, "cuda:0")
    group.close()


def test_all_reduce_cuda() -> None:
    group = dr.distributed.new_group(WORLD)
    for root in WORLD:
        tensors = [build(10, 2 if k == root else 10, k, "cuda:0") for k in WORLD]
        dr.distributed.all_reduce(tensors, group=group)
        assert all(is_full(t, 22) for t in tensors)
    group.close()
