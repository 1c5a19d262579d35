"""Each collective, ReduceOp and dtype on 2, 3 and 4 workers gives what the same call gives under plain
torch.distributed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
import group_calls
from agree import REMOTE
from fewer import fewer
from group_calls import Case, Results, cases, collect, expected, inputs, members, outputs


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[int, Results]]:
    """What plain torch.distributed gives, by size."""
    started = expected(2, 3, 4)
    try:
        yield collect(started)
    finally:
        started.kill()
        started.wait()


def _there(value: Any, node: int) -> Any:
    if isinstance(value, list):
        return [_there(v, node) for v in value]
    with dr.node(node):
        return None if value is None else value.to(REMOTE)


def _transposed(value: Any) -> Any:
    """The same numbers in memory of another order: what is written is not flat then."""
    if isinstance(value, list):
        return [_transposed(v) for v in value]
    return None if value is None else value.t().contiguous().t()


def from_master(
    case: Case, group: dr.distributed.ProcessGroup, flat: bool, async_op: bool
) -> list[list[torch.Tensor]]:
    """Run a case; return what each member ends up with, its inputs included."""
    n, nodes, root = group.size(), group.nodes, case.root
    given = [_there(inputs(case, k, n), nodes[k]) for k in range(n)]
    into = [_there(outputs(case, k, n), nodes[k]) for k in range(n)]
    if not flat:
        given, into = _transposed(given), _transposed(into)
    options: dict[str, Any] = {"group": group, "async_op": async_op}
    op = getattr(dr.distributed.ReduceOp, case.op) if case.op else None
    match case.name:
        case "all_reduce":
            work = dr.distributed.all_reduce(given, op, **options)
        case "reduce":
            work = dr.distributed.reduce(given, nodes[root], op, **options)
        case "broadcast":
            work = dr.distributed.broadcast(given, nodes[root], **options)
        case "reduce_scatter":
            work = dr.distributed.reduce_scatter(into, given, op, **options)
        case "reduce_scatter_tensor":
            work = dr.distributed.reduce_scatter_tensor(into, given, op, **options)
        case "all_gather":
            work = dr.distributed.all_gather(into, given, **options)
        case "all_gather_into_tensor":
            work = dr.distributed.all_gather_into_tensor(into, given, **options)
        case "gather":
            work = dr.distributed.gather(given, into[root], group_dst=root, **options)
        case "scatter":
            work = dr.distributed.scatter(into, given[root], group_src=root, **options)
        case "all_to_all":
            work = dr.distributed.all_to_all(into, given, **options)
        case "all_to_all_single":
            work = dr.distributed.all_to_all_single(into, given, **options)
        case "all_to_all_uneven":
            work = dr.distributed.all_to_all_single(into, given, None, group_calls.splits(n), **options)
        case "barrier":
            work = dr.distributed.barrier(**options)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    return [group_calls._flat([a, b]) for a, b in zip(given, into)]


def disagreements(size: int, plain: Results, flat: bool, async_op: bool) -> list[str]:
    """Run every case of a size; return those that differ from plain torch.distributed, and what differs."""
    groups: dict[tuple[int, ...], dr.distributed.ProcessGroup] = {}
    issued = []
    for case in cases(size):
        if case.ranks not in groups:
            groups[case.ranks] = dr.distributed.new_group(members(case, size))
        issued.append((case, from_master(case, groups[case.ranks], flat, async_op)))
    found = dr.fetch([results for _, results in issued])
    wrong = [
        f"{case}, rank {rank}, tensor {k}: {got.tolist()} where torch has {wanted.tolist()}"
        for (case, _), by_rank in zip(issued, found, strict=True)
        for rank, (row, wanted_row) in enumerate(zip(by_rank, plain[case], strict=True))
        for k, (got, wanted) in enumerate(zip(row, wanted_row, strict=True))
        if got.dtype != wanted.dtype or not torch.equal(got, wanted)
    ]
    for group in groups.values():
        group.close()
    return wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", fewer([3, 2, 4], 3, "another number of members, 8 s"))
def test_every_collective_agrees(plain: dict[int, Results], fresh_session: Any, size: int) -> None:
    fresh_session(world_size=size)
    assert len(plain[size]) == len(list(cases(size))) > 250
    assert disagreements(size, plain[size], flat=True, async_op=False) == []
    if size == 3:  # once more, on streams beside the current ones, and not flat in memory
        assert disagreements(size, plain[size], flat=False, async_op=True) == []
    dr.synchronize()


def test_a_case_that_differs_is_found(plain: dict[int, Results], fresh_session: Any) -> None:
    """The comparison itself: one changed number of one member is reported."""
    fresh_session(world_size=2)
    case = Case("gather", torch.int8)
    changed = {key: [[t.clone() for t in row] for row in rows] for key, rows in plain[2].items()}
    changed[case][0][1][3, 1] += 1
    (wrong,) = disagreements(2, changed, flat=True, async_op=False)
    assert wrong.startswith("gather int8, rank 0, tensor 1: ")


def test_the_cases_cover_what_the_channel_says_it_can() -> None:
    """No ReduceOp, dtype or operation of the capabilities is left out."""
    from distruntime.wire.data_channel import MOVES, REDUCES
    from distruntime_worker.collectives.data_channel.gloo import Gloo

    covered = {(case.op, case.dtype) for case in cases(2) if case.op}
    assert {(op, dtype) for op, dtypes in Gloo.capabilities.reductions.items() for dtype in dtypes} <= covered
    names = {case.name for case in cases(2)}
    assert {*MOVES, *REDUCES} - {"send"} <= names  # send: test_copies.py
