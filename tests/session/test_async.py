"""The session in an event loop: tasks that wait for values, and others that go on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import distruntime as dr
from agree import REMOTE
from processes import stopped

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("session")]

# So many seconds a test waits for what must come.
LONG = 60.0


@pytest_asyncio.fixture
async def ticks() -> AsyncIterator[list[int]]:
    """A list that grows by one each time the event loop comes around."""
    seen: list[int] = []

    async def tick() -> None:
        while True:
            seen.append(len(seen))
            await asyncio.sleep(0)

    task = asyncio.ensure_future(tick())
    yield seen
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def more(ticks: list[int], count: int = 10) -> None:
    """Wait until the event loop has come around so often."""
    until = len(ticks) + count
    while len(ticks) < until:
        await asyncio.sleep(0)


async def fetched(tensor: torch.Tensor) -> Any:
    return await dr.fetch_async(tensor)


async def test_the_event_loop_runs_while_a_fetch_is_awaited(ticks: list[int]) -> None:
    x = torch.ones(3, device=REMOTE)
    with stopped(dr.nodes()[0].pid):
        pending = asyncio.ensure_future(fetched(x + 1))
        await more(ticks)
        assert not pending.done()
    assert (await pending).tolist() == [2, 2, 2]


async def test_many_tasks_read_while_others_issue() -> None:
    """Each reads its own values in the program's order, whatever the others have issued in between."""

    async def count(number: int) -> None:
        x = torch.full((4,), float(number), device=REMOTE)
        for k in range(60):
            x = x + 1
            if k % 3 == 0:
                assert (await dr.fetch_async(x)).tolist() == [number + k + 1] * 4

    shared = torch.zeros(2, device=REMOTE)

    async def write() -> None:
        for _ in range(50):
            shared.add_(1)
            await asyncio.sleep(0)

    async def read() -> None:
        last = 0.0
        for _ in range(20):
            found = (await dr.fetch_async(shared)).tolist()
            assert found[0] == found[1] >= last
            last = found[0]

    await asyncio.gather(*(count(k) for k in range(12)), write(), read(), read())
    assert (await dr.fetch_async(shared)).tolist() == [50, 50]


async def test_a_task_that_is_cancelled_disturbs_nobody() -> None:
    x = torch.ones(700, 700, device=REMOTE)
    with stopped(dr.nodes()[0].pid):
        task = asyncio.ensure_future(fetched(x))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await dr.fetch_async(torch.ones(3, device=REMOTE))).tolist() == [1, 1, 1]
    dr.synchronize()


async def test_a_timeout_ends_the_waiting_and_not_the_work() -> None:
    x = torch.ones(700, 700, device=REMOTE)
    with stopped(dr.nodes()[0].pid):
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(dr.fetch_async(x), 0.01)
        x.add_(1)
    assert (await dr.fetch_async(x)).sum().item() == 2 * 700 * 700


async def test_a_failure_is_raised_by_await_with_the_line_that_issued_it() -> None:
    x = torch.ones(3, device=REMOTE)
    y = x[torch.tensor([5], device=REMOTE)]
    with pytest.raises(IndexError, match=r"test_async\.py"):
        await dr.fetch_async(y)
    dr.synchronize()


class Counter:
    def __init__(self, end: int) -> None:
        self.end = end

    def __aiter__(self) -> Any:
        return self._numbers()

    def __iter__(self) -> Any:
        return iter(range(self.end))

    async def _numbers(self) -> Any:
        for k in range(self.end):
            yield k


async def test_an_object_is_awaited_and_gone_through(ticks: list[int]) -> None:
    counter = dr.remote(Counter)(4)
    before = len(ticks)
    assert [k async for k in counter] == [0, 1, 2, 3]
    # The event loop has gone on between the items.
    assert len(ticks) > before
    held = dr.remote(dict, returns=object)(a=torch.ones(2))
    assert (await held)["a"].tolist() == [1, 1]


async def test_a_loader_gives_its_batches_to_a_task(ticks: list[int]) -> None:
    def batches() -> Any:
        return [torch.full((2,), float(k)) for k in range(3)]

    loader = dr.data.data_loader(batches, node=0)
    found = [(await dr.fetch_async(batch)).tolist() async for batch in loader]
    assert found == [[[0, 0]], [[1, 1]], [[2, 2]]]


async def test_a_place_belongs_to_its_task() -> None:
    async def make(node: int) -> int:
        with dr.node(node):
            await asyncio.sleep(0)
            x = torch.zeros(2, device="remote")
            await asyncio.sleep(0)
            return x.get_node()

    assert await asyncio.gather(*(make(k % 2) for k in range(10))) == [0, 1] * 5


@pytest.mark.slow(reason="starts a prompt, 10 s")
async def test_a_cell_of_ipython_may_await() -> None:
    """IPython runs such a cell in an event loop."""
    code = (
        "import torch, distruntime as dr\n"
        "dr.init_master_worker(world_size=1, quiet=True)\n"
        "x = await dr.fetch_async(torch.ones(2, device='remote') + 1)\n"
        "print(x.tolist())\n"
        "dr.shutdown()\n"
    )
    script = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "IPython", "--colors=NoColor", "--no-banner", "-c", code),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(script.communicate(), LONG)
    assert "[2.0, 2.0]" in out.decode(), out.decode()
