"""What an object holds, on one stream: a fetch is what the program's order says, whoever writes it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import distruntime as dr
from agree import REMOTE

N, BIG = 4, 1500


class Keeper:
    def keep(self, x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        self.x, self.y = x, y

    def add(self) -> None:
        self.x.add_(1)

    def get(self) -> torch.Tensor:
        return self.x


def slowly(big: torch.Tensor) -> None:
    """Delay what comes next."""
    for _ in range(3):
        big @ big


def test_a_fetch_of_an_argument_comes_after_the_writes_of_the_object_that_keeps_it(session: Any) -> None:
    big = torch.ones(BIG, BIG, device=REMOTE)
    keeper: Any = dr.remote(Keeper)()
    # The second call is a known one.
    for _ in range(3):
        x = torch.zeros(N, device=REMOTE)
        keeper.keep(x)
        keeper.add()
        dr.synchronize()
        slowly(big)
        keeper.add()
        assert x.tolist() == [2.0] * N
        y = keeper.get()
        dr.synchronize()
        slowly(big)
        x.add_(1)
        assert y.tolist() == [3.0] * N
        slowly(big)
        y.add_(1)
        assert x.tolist() == [4.0] * N


def test_an_upload_over_an_argument_reaches_the_object_that_keeps_it(session: Any) -> None:
    keeper, x = dr.remote(Keeper)(), torch.zeros(N, device=REMOTE)
    keeper.keep(x)
    x.copy_(torch.ones(N))
    assert keeper.get().tolist() == [1.0] * N
    y = keeper.get()
    y.copy_(torch.full((N,), 2.0))
    assert x.tolist() == [2.0] * N


def test_objects_that_keep_one_argument_are_known_to_write_it(session: Any) -> None:
    big = torch.ones(BIG, BIG, device=REMOTE)
    one, other = dr.remote(Keeper)(), dr.remote(Keeper)()
    for _ in range(3):
        x, y = torch.zeros(N, device=REMOTE), torch.zeros(N, device=REMOTE)
        one.keep(x, y)
        other.keep(y, x)
        slowly(big)
        one.add()
        other.add()
        assert x.tolist() == y.tolist() == [1.0] * N


def test_a_dictionary_of_an_object_is_fetched_as_it_stands_in_the_program(session: Any) -> None:
    class Counter:
        def __init__(self) -> None:
            self.state = {"count": 0}

        def add(self) -> None:
            self.state["count"] += 1

    counter: Any = dr.remote(Counter)()
    state = counter.state
    streams = dr.Stream(0), dr.Stream(0)
    big = torch.ones(BIG, BIG, device=REMOTE)
    for k in range(4):
        with dr.stream(streams[k % 2]):
            slowly(big)
            counter.add()
        with dr.stream(streams[1 - k % 2]):
            assert dr.fetch(state) == {"count": k + 1}


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loader_whose_batches_are_one_buffer(session: Any, ahead: int) -> None:
    """A batch is what it was when it was made, however many are asked for ahead."""

    class Buffered:
        def __iter__(self) -> Any:
            buffer = torch.zeros(N)
            for k in range(6):
                buffer.fill_(k)
                yield buffer

    loader = dr.data.data_loader(Buffered, node=0, ahead=ahead, batch_size=None)
    kept, sums = [], []
    for batch in loader:
        kept.append(batch)
        sums.append(float(batch.sum()))
    assert sums == [float(N * k) for k in range(6)]
    if ahead:
        assert [float(batch[0]) for batch in kept] == [float(k) for k in range(6)]


@pytest.mark.slow(reason="starts a rank that imports torch, 8 s")
def test_a_member_of_spmd_writes_what_it_has_kept(session: Any) -> None:
    """The processes of a mesh's members keep what they were handed."""
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.zeros(N, device=mesh.device)
    big = torch.ones(BIG, BIG, device=mesh.device)

    def keeps(x: torch.Tensor) -> Keeper:
        made = Keeper()
        made.keep(x)
        return made

    def add(keeper: Keeper) -> torch.Tensor:
        keeper.add()
        return keeper.x.clone()

    def give(keeper: Keeper) -> torch.Tensor:
        return keeper.x

    held, adds, gives = dr.spmd(mesh, keeps)(x), dr.spmd(mesh, add), dr.spmd(mesh, give)
    for k in range(3):
        assert [one.tolist() for one in dr.shards(adds(held))] == [[k + 1.0] * N] * 2
    # The process that made it and the worker see one memory.
    y = gives(held)
    read = []
    streams = dr.Stream(mesh.device), dr.Stream(mesh.device)
    for k in range(6):
        with dr.stream(streams[k % 2]):
            slowly(big)
            read.append((x.sum(0, keepdim=True), y.sum(0, keepdim=True)))
        adds(held)
    for k, pair in enumerate(read):
        assert [dr.shards(one)[0].tolist() for one in pair] == [[N * (k + 3.0)]] * 2
    slowly(big)
    adds(held)
    assert [one.tolist() for one in dr.shards(x) + dr.shards(y)] == [[10.0] * N] * 4


def test_a_tensor_over_an_array_that_the_object_keeps(session: Any) -> None:
    class Env:
        def __init__(self) -> None:
            self.buffer, self.big = numpy.zeros(N, numpy.float32), torch.ones(BIG, BIG)

        def step(self) -> torch.Tensor:
            slowly(self.big)
            self.buffer += 1
            return torch.from_numpy(self.buffer)

    env: Any = dr.remote(Env)()
    # The second call is a known one.
    for k in range(1, 6, 2):
        found = env.step()
        env.step()
        assert found.tolist() == [k + 1.0] * N


def test_a_gradient_that_another_object_has_handed_out(session: Any) -> None:
    class Net:
        linear = torch.nn.Linear(N, 1, bias=False)
        big = torch.ones(BIG, BIG)

        def gradient(self) -> torch.Tensor:
            weight = type(self).linear.weight
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            return weight.grad

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = type(self).linear(x)
            found.register_hook(lambda gradient: slowly(type(self).big))
            return found.sum()

    made = dr.remote(Net)
    one, other = made(), made()
    gradient = one.gradient()
    for k in range(1, 4):
        other.forward(torch.ones(N, device=REMOTE)).backward()
        assert gradient.tolist() == [[float(k)] * N]


def test_a_state_that_the_object_keeps_detached(session: Any) -> None:
    class Cell:
        def __init__(self) -> None:
            self.linear, self.h = torch.nn.Linear(N, N), torch.zeros(N)
            self.big = torch.ones(BIG, BIG)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.linear(x + self.h))
            self.h = h.detach()
            return h

        def reset(self) -> None:
            slowly(self.big)
            self.h.zero_()

    cell: Any = dr.remote(Cell)()
    for _ in range(3):
        h = cell.step(torch.ones(N, device=REMOTE))
        cell.reset()
        assert h.tolist() == [0.0] * N
