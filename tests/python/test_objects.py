"""Objects that live on workers."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.session import active_session

pytestmark = pytest.mark.usefixtures("session")


class Env:
    """An environment as reinforcement learning has them."""

    def __init__(self, size: int) -> None:
        self.size, self.count, self.names = size, 0, {"a": 1}
        self.state = torch.zeros(size)

    def step(self, action: object) -> tuple[torch.Tensor, float, bool, dict[str, object]]:
        self.count += 1
        return (
            torch.full((self.size,), float(self.count)),
            0.5 * self.count,
            self.count > 3,
            {"action": action},
        )

    def push(self) -> None:
        self.state.add_(1)

    def fail(self) -> None:
        raise ValueError("this step failed")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: str) -> int:
        return self.names[key]

    def __setitem__(self, key: str, value: int) -> None:
        self.names[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.names

    def __add__(self, other: int) -> int:
        return self.count + other

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.fixture
def env() -> Any:
    return dr.remote(Env)(3, node=1)


def test_methods_run_in_order_and_a_tuple_is_a_tuple(env: Any) -> None:
    for k in range(1, 5):
        observation, reward, done, info = env.step(k)
        assert observation.place == dr.place(1) and observation.tolist() == [float(k)] * 3
    assert dr.fetch([reward, done, info]) == [2.0, True, {"action": 4}]
    assert dr.fetch(env.count) == 4


def test_a_known_method_does_not_wait(env: Any) -> None:
    env.step(0)
    env.step(1)
    dr.profiler.set_sync_debug_mode("error")
    try:
        kept = [env.step(k) for k in range(10)]
    finally:
        dr.profiler.set_sync_debug_mode("default")
    assert kept[-1][0][0].item() == 12.0


def test_attributes_items_and_operators(env: Any) -> None:
    assert dr.fetch(env.names) == {"a": 1}
    assert dr.fetch(env["a"]) == 1
    env["b"] = 2
    assert "b" in env and "c" not in env and len(env) == 3
    env.count = 40
    assert dr.fetch(env + 2) == 42
    assert int(env.count) == 40 and float(env.count) == 40.0 and bool(env.count)
    assert dr.fetch(2 + env.count) == 42
    assert dr.fetch(env.count > 39) is True
    del env.count
    with pytest.raises(AttributeError, match="count"):
        dr.fetch(env.count)


def test_a_name_that_is_not_there_is_an_attribute_error(env: Any) -> None:
    assert not hasattr(env, "nothing")
    with pytest.raises(AttributeError, match="begin with an underscore"):
        _ = env._private


def test_an_attribute_is_read_where_it_stands_in_the_program(env: Any) -> None:
    before = env.count
    env.step(0)
    assert dr.fetch([before, env.count]) == [0, 1]


def test_a_tensor_of_an_object_is_the_objects(env: Any) -> None:
    state = env.state
    state.add_(10)
    env.push()
    assert state.tolist() == [11.0] * 3
    assert env.state.tolist() == [11.0] * 3


def test_iterating(env: Any) -> None:
    assert [dr.fetch(k) for k in env] == [0, 1, 2]

    def squares(n: int) -> Iterator[torch.Tensor]:
        for k in range(n):
            yield torch.tensor(k * k)

    items: Any = dr.remote(squares)(3)
    assert [t.item() for t in items] == [0, 1, 4]


async def gathered(items: Any) -> list[Any]:
    return [item async for item in items]


def squares(n: int) -> Iterator[torch.Tensor]:
    for k in range(n):
        yield torch.tensor(k * k)


async def cubes(n: int) -> AsyncIterator[torch.Tensor]:
    for k in range(n):
        await asyncio.sleep(0)
        yield torch.tensor(k**3)


def test_asynchronous_iterating(env: Any) -> None:
    assert asyncio.run(gathered(dr.remote(squares)(3))) == [0, 1, 4]
    assert asyncio.run(gathered(dr.remote(cubes)(3))) == [0, 1, 8]
    assert [dr.fetch(item) for item in asyncio.run(gathered(env))] == [0, 1, 2]


def test_other_tasks_run_while_an_item_is_made(tmp_path: Path) -> None:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)

    def lines() -> Iterator[str]:
        with open(path, encoding="utf-8") as fifo:
            yield from fifo

    async def both() -> list[Any]:
        found = asyncio.create_task(gathered(dr.remote(lines)()))
        await asyncio.sleep(0)
        # The worker waits for a line, and this task goes on.
        with open(path, "w", encoding="utf-8") as fifo:
            fifo.write("made")
        return await found

    assert [dr.fetch(item) for item in asyncio.run(both())] == ["made"]


def gated(gate: Path) -> Iterator[int]:
    for k in range(3):
        while not gate.exists():
            time.sleep(0.01)
        yield k


def test_a_wait_that_is_interrupted_loses_no_item(
    session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    generator: Any = dr.remote(gated)(gate)
    items = iter(generator)

    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.undo()
        gate.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(session.requests, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert [dr.fetch(item) for item in items] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(items)


def test_a_task_that_is_cancelled_loses_no_item(session: object, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def impatient() -> list[Any]:
        items = aiter(dr.remote(gated)(gate))
        waits = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        gate.touch()
        return [item async for item in items]

    assert [dr.fetch(item) for item in asyncio.run(impatient())] == [0, 1, 2]


def test_an_iterator_goes_on_behind_an_item_that_fails(session: object) -> None:
    class Fragile:
        def __init__(self) -> None:
            self.k = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.k += 1
            if self.k == 2:
                raise ValueError("the second one")
            if self.k == 4:
                raise StopIteration
            return self.k

    items = iter(dr.remote(Fragile)())
    assert dr.fetch(next(items)) == 1
    with pytest.raises(ValueError, match="the second one"):
        next(items)
    assert [dr.fetch(item) for item in items] == [3]


def test_an_asynchronous_item_that_fails_says_so() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise IndexError("no second item")

    with pytest.raises(IndexError, match="no second item"):
        asyncio.run(gathered(dr.remote(fails)()))
    with pytest.raises(TypeError, match="not iterable"):
        asyncio.run(gathered(dr.remote(Env)(2).count))


def test_a_generator_that_is_left_ends_with_its_proxy() -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def items(self) -> Iterator[int]:
            try:
                yield 1
                yield 2
            finally:
                self.lines.append("closed")

    log: Any = dr.remote(Log)()
    items = iter(log.items())
    assert dr.fetch(next(items)) == 1
    del items
    gc.collect()
    assert dr.fetch(log.lines) == ["closed"]


def test_a_method_that_fails_leaves_the_object(env: Any) -> None:
    with pytest.raises(ValueError, match="this step failed") as caught:
        env.fail()
    assert "Env.fail" in str(caught.value)
    assert dr.fetch(env.count) == 0


def test_an_object_is_freed_with_its_proxy() -> None:
    node = active_session().nodes[0]  # type: ignore[attr-defined]
    held = dr.memory
    made: Any = dr.remote(Env)(2)
    made.step(0)
    dr.synchronize()
    before = _values()
    del made
    gc.collect()
    dr.synchronize()
    assert _values() < before and node is not None and held is not None


def _values() -> int:
    from distruntime.wire.messages import AskMemory

    session: Any = active_session()
    return int(session.value(session.ask(session.nodes[0], AskMemory)).values)


def test_objects_are_arguments_of_functions_and_of_methods(env: Any) -> None:
    f: Any = dr.remote(lambda e, x: (e.count, x * len(e)))
    count, made = f(env, torch.ones(2, device=dr.place(1)))
    assert dr.fetch(count) == 0 and made.tolist() == [3.0, 3.0]
    method = env.step
    called: Any = dr.remote(lambda m: m("inside")[1])(method)
    assert dr.fetch(called) == 0.5


def test_an_object_of_another_node_is_refused(env: Any) -> None:
    with pytest.raises(dr.errors.PlacementError, match="node 0 cpu, and an argument is on node 1"):
        dr.remote(lambda e: e)(env, node=0)


def test_await_and_fetch_in_trees(env: Any) -> None:
    async def wait() -> object:
        return await env.count

    assert asyncio.run(wait()) == 0
    x = torch.ones(2, device=dr.place(1))
    fetched = dr.fetch({"x": x, "n": env.names, "plain": 3})
    assert fetched["n"] == {"a": 1} and fetched["plain"] == 3 and torch.equal(fetched["x"], torch.ones(2))


def test_a_module_there_trains_by_its_own_optimizer() -> None:
    """Its parameters are the object's own: gradients accumulate there."""

    def make() -> Any:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, optimizer = dr.remote(make)()
    torch.manual_seed(0)
    twin = torch.nn.Linear(3, 1)
    own = torch.optim.SGD(twin.parameters(), lr=0.1)
    data = torch.randn(8, 3)
    for _ in range(3):
        optimizer.zero_grad()
        net(data.to(REMOTE)).square().mean().backward()
        optimizer.step()
        own.zero_grad()
        twin(data).square().mean().backward()
        own.step()
    torch.testing.assert_close(net.weight.detach().cpu(), twin.weight.detach())


def test_repr_names_where_it_is(env: Any) -> None:
    assert repr(env) == "<remote object of Env on node 1 cpu>"
    assert str(env.names) == "{'a': 1}"
    with pytest.raises(TypeError, match=r"integer|index"):
        [1, 2][env.names]  # type: ignore[call-overload]


def test_copies_are_made_there_and_pickles_are_refused(env: Any) -> None:
    env.step(0)
    for other in (copy.copy(env), copy.deepcopy(env)):
        other.step(0)
        assert dr.fetch([env.count, other.count]) == [1, 2]
    with pytest.raises(dr.errors.UsageError, match=r"cannot be pickled, as it is on a worker: dr\.fetch"):
        pickle.dumps(env)


def test_a_coroutine_runs_to_its_end_there() -> None:
    async def late(k: int) -> int:
        await asyncio.sleep(0)
        return k + 1

    assert dr.fetch(dr.remote(late)(1)) == 2


@pytest.mark.parametrize("node", ["1", 7, 1.5])
def test_a_node_that_is_none_is_an_error(node: Any) -> None:
    with pytest.raises(dr.errors.PlacementError, match="node"):
        dr.remote(len)([1], node=node)


class Lock:
    """A context manager that notes what it is told, and swallows one kind of error."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __enter__(self) -> str:
        self.told.append("in")
        return "inside"

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self.told.append(f"out {error!r}")
        return kind is ZeroDivisionError


def test_a_context_manager_is_entered_and_left_there() -> None:
    lock: Any = dr.remote(Lock)()
    with lock as inside:
        assert dr.fetch(inside) == "inside"
    with lock:
        raise ZeroDivisionError("swallowed")
    with pytest.raises(KeyError, match="mine"):
        with lock:
            raise KeyError("mine")
    assert dr.fetch(lock.told) == [
        *("in", "out None"),
        *("in", "out ZeroDivisionError('swallowed')"),
        *("in", "out KeyError('mine')"),
    ]


def test_the_failure_of_a_worker_leaves_a_context_manager_too() -> None:
    lock: Any = dr.remote(Lock)()
    with pytest.raises(IndexError):
        with lock:
            torch.zeros(2, device=REMOTE)[torch.tensor([7], device=REMOTE)].tolist()
    assert "IndexError" in dr.fetch(lock.told)[-1]


def test_what_is_no_context_manager_says_so() -> None:
    number: Any = dr.remote(Env)(2)
    with pytest.raises(AttributeError, match=r"'Env' object has no attribute '__enter__'"):
        with number:
            raise AssertionError("the block does not begin")


def test_augmented_assignment_changes_the_object_that_others_hold() -> None:
    numbers: Any = dr.remote(list)()
    same = numbers
    numbers += [1]
    numbers *= 2
    assert dr.fetch(same) == dr.fetch(numbers) == [1, 1]
    names: Any = dr.remote(set)()
    others = names
    names |= {1, 2}
    names -= {1}
    assert dr.fetch(others) == {2}
    # What cannot change is another object, as in Python.
    count: Any = dr.remote(int)(3)
    before = count
    count += 4
    assert (dr.fetch(count), dr.fetch(before)) == (7, 3)
