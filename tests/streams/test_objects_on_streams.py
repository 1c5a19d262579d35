"""Objects on several streams: what may lie in an object's memory is ordered with the object's calls.

A product on one stream delays what follows there, and the other stream is idle. So what does not wait is
early, and reads what was there before or writes what is still to be read.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from fewer import fewer

N = 4
BIG = 1500


class Holder:
    """Holds a tensor, and whatever it gets."""

    shared = torch.zeros(N)

    def __init__(self, held: torch.Tensor | None = None) -> None:
        self.held = torch.zeros(N) if held is None else held
        self.state = {"held": self.held}
        self.calls = 0

    def get(self) -> torch.Tensor:
        return self.held

    def view(self) -> torch.Tensor:
        return self.held[1:]

    def later(self) -> torch.Tensor:
        """Return memory of its own at first, and what the object holds from the third call on."""
        self.calls += 1
        return self.held if self.calls > 2 else torch.zeros(N)

    def fresh(self) -> torch.Tensor:
        return self.held + 0

    def keep(self, x: torch.Tensor) -> None:
        self.held = x

    def add(self) -> None:
        self.held.add_(1)

    def add_shared(self) -> None:
        Holder.shared.add_(1)

    def get_shared(self) -> torch.Tensor:
        return Holder.shared

    def total(self) -> torch.Tensor:
        return self.held.sum()


def wait_for(holder: Holder, path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody has made {path}")
        time.sleep(0.001)


def make(holder: Holder, path: Path) -> None:
    path.touch()


# What may draw keeps the order of draws, on whatever streams it is.
waits_for: Any = dr.remote(wait_for, returns=object, random=False)
makes: Any = dr.remote(make, returns=object, random=False)


class Streams:
    """Two streams of one node: `slow` has much to do first, and `idle` nothing."""

    def __init__(self) -> None:
        self._slow, self.idle = dr.Stream(0), dr.Stream(0)
        self._big = torch.ones(BIG, BIG, device="remote")
        dr.synchronize()

    def slow(self) -> Any:
        with dr.stream(self._slow):
            self._big @ self._big
        return dr.stream(self._slow)


@pytest.fixture(scope="module", autouse=True)
def _one_node() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=1)
    yield
    dr.shutdown()


@pytest.fixture
def streams() -> Streams:
    return Streams()


def holder(*args: Any) -> Any:
    return dr.remote(Holder)(*args)


# Each makes an object and a tensor that is in its memory.
def taken() -> tuple[Any, torch.Tensor]:
    found = holder()
    return found, found.get()


def attribute() -> tuple[Any, torch.Tensor]:
    found = holder()
    return found, found.held


def view_of_it() -> tuple[Any, torch.Tensor]:
    found = holder()
    return found, found.view()


def view_here() -> tuple[Any, torch.Tensor]:
    found = holder()
    return found, found.get()[1:]


def item_of_a_part() -> tuple[Any, torch.Tensor]:
    found = holder()
    return found, found.state["held"]


def argument() -> tuple[Any, torch.Tensor]:
    x = torch.zeros(N, device="remote")
    return holder(x), x


def kept_argument() -> tuple[Any, torch.Tensor]:
    x, found = torch.zeros(N, device="remote"), holder()
    found.keep(x)
    return found, x


def view_of_an_argument() -> tuple[Any, torch.Tensor]:
    x, found = torch.zeros(N + 2, device="remote"), holder()
    found.keep(x[1:])
    return found, x[2:4]


def set_attribute() -> tuple[Any, torch.Tensor]:
    x, found = torch.zeros(N, device="remote"), holder()
    found.held = x
    return found, x


def shared_argument() -> tuple[Any, torch.Tensor]:
    x = torch.zeros(N, device="remote")
    one, other = holder(x), holder(x)
    return one, other.get()


def object_in_an_object() -> tuple[Any, torch.Tensor]:
    x = torch.zeros(N, device="remote")
    inner = holder(x)
    return dr.remote(lambda inner: inner)(inner), x


def in_a_list() -> tuple[Any, torch.Tensor]:
    x = torch.zeros(N, device="remote")
    return dr.remote(lambda several: Holder(several[0]))([x]), x


def returned() -> tuple[Any, torch.Tensor]:
    """A function returns its argument, which an object keeps."""
    x, found = torch.zeros(N, device="remote"), holder()
    y = dr.remote(lambda x: x)(x)
    found.keep(x)
    return found, y


KINS = [
    *(taken, attribute, view_of_it, view_here, item_of_a_part, argument, kept_argument),
    *(view_of_an_argument, set_attribute, shared_argument, object_in_an_object, in_a_list, returned),
]


@pytest.mark.parametrize("kin", fewer(KINS, 3, "another way to hand memory out"))
def test_a_read_comes_before_a_later_call(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    for k in range(2):
        with streams.slow():
            before = x.sum()
        with dr.stream(streams.idle):
            found.add()
        assert float(before) == k * x.numel()


@pytest.mark.parametrize("kin", fewer(KINS, 3, "another way to hand memory out"))
def test_a_call_comes_before_a_later_read(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    for k in range(2):
        with streams.slow():
            found.add()
        with dr.stream(streams.idle):
            after = x.sum()
        assert float(after) == (k + 1) * x.numel()


@pytest.mark.parametrize("kin", fewer(KINS, 3, "another way to hand memory out"))
def test_a_write_comes_before_a_later_call(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    with streams.slow():
        x.add_(1)
    with dr.stream(streams.idle):
        after = found.total()
    assert float(after) == x.numel()
    with streams.slow():
        before = found.total()
    with dr.stream(streams.idle):
        x.add_(1)
    assert float(before) == x.numel()


@pytest.mark.parametrize("kin", fewer(KINS, 3, "another way to hand memory out"))
def test_a_fetch_is_what_the_last_call_has_left(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    with streams.slow():
        found.add()
    assert x.tolist() == [1.0] * x.numel()
    with streams.slow():
        fetched = dr.fetch_async(x)
    with dr.stream(streams.idle):
        found.add()
    assert fetched.result(60).tolist() == [1.0] * x.numel()


def test_what_nobody_holds_any_more_is_read_before_a_later_call(streams: Streams) -> None:
    found = holder()
    found.get()
    dr.synchronize()
    for k in range(3):
        with streams.slow():
            before = found.get().sum()
        with dr.stream(streams.idle):
            found.add()
        assert float(before) == k * N


def test_what_two_objects_have_in_common_is_known_once_it_was_handed_out(streams: Streams) -> None:
    one, other = holder(), holder()
    x = one.get_shared()
    x.zero_()
    dr.synchronize()
    for k in range(2):
        with streams.slow():
            before = x.sum()
        with dr.stream(streams.idle):
            other.add_shared()
        with streams.slow():
            other.add_shared()
        with dr.stream(streams.idle):
            after = x.sum()
        assert (float(before), float(after)) == (2 * k * N, (2 * k + 2) * N)


def test_a_tensor_of_a_global_is_ordered_with_functions(streams: Streams) -> None:
    # Every function that travels has globals of its own, and the worker has one module of this name.
    x = dr.remote(lambda: vars(sys).setdefault("kept_by_a_test", torch.zeros(N)))()

    def add() -> None:
        vars(sys)["kept_by_a_test"].add_(1)

    added: Any = dr.remote(add)
    added()
    dr.synchronize()
    first = float(x[0])
    with streams.slow():
        before = x.sum()
    with dr.stream(streams.idle):
        added()
    with streams.slow():
        added()
    with dr.stream(streams.idle):
        after = x.sum()
    assert (float(before), float(after)) == (first * N, (first + 2) * N)


def test_a_method_that_begins_to_return_what_the_object_holds_gives_copies_and_warns(
    streams: Streams,
) -> None:
    found = holder()
    for _ in range(2):
        assert found.later().tolist() == [0.0] * N
    with pytest.warns(UserWarning, match=r'later returned a tensor in memory.*returns="ask"'):
        x = found.later()
        assert x.tolist() == [0.0] * N
    found.add()
    assert x.tolist() == [0.0] * N
    shared = dr.remote(Holder.later, returns="ask")(found)
    found.add()
    assert shared.tolist() == [2.0] * N


def test_a_declared_result_is_in_memory_of_its_own(streams: Streams) -> None:
    like = torch.empty(N, device="meta")
    x = torch.zeros(N, device="remote")
    found = holder(x)
    whole, both = (
        dr.remote(Holder.get, returns=like)(found),
        dr.remote(lambda x: (x, {"x": x[1:]}), returns=(like, {"x": like[1:]}))(x),
    )
    dr.synchronize()
    for _ in range(2):
        with streams.slow():
            read = whole.sum(), both[0].sum(), both[1]["x"].sum()
        with dr.stream(streams.idle):
            found.add()
            x.add_(1)
        assert [float(one) for one in read] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("returns", [None, "ask"])
def test_a_function_that_returns_its_argument_at_times(streams: Streams, returns: str | None) -> None:
    x = torch.zeros(N, device="remote")

    def positive(x: torch.Tensor) -> torch.Tensor:
        return x if bool((x >= 1).all()) else x + 1

    function: Any = dr.remote(positive, returns=returns)
    assert function(x).tolist() == [1.0] * N
    x.fill_(1)
    if returns is None:
        with pytest.warns(UserWarning, match="positive returned a tensor in memory"):
            y = function(x)
            y.tolist()
    else:
        y = function(x)
    with streams.slow():
        read = y.sum()
    with dr.stream(streams.idle):
        x.add_(1)
    assert float(read) == N
    assert y.tolist() == [1.0 if returns is None else 2.0] * N


def test_an_optimizer_on_the_master_and_a_module_there(streams: Streams) -> None:
    """The one writes what the other reads, and the module's own methods write it too."""

    def linear() -> torch.nn.Module:
        made = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(made.weight)
        return made

    net = dr.RemoteModule(linear)
    x = torch.ones(1, 2, device="remote")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    dr.synchronize()
    weight = 1.0
    for _ in range(3):
        with streams.slow():
            out = net(x)
        with dr.stream(streams.idle):
            out.sum().backward()
            optimizer.step()
        assert float(out.detach()) == 2 * weight
        weight -= 1
        optimizer.zero_grad()
        with streams.slow():
            net.weight.data.add_(1)
        weight += 1
        with dr.stream(streams.idle), torch.no_grad():
            out = net(x)
        assert float(out.detach()) == 2 * weight
        with streams.slow():
            before = net.weight.detach().sum()
        with dr.stream(streams.idle):
            net.remote.weight.data.mul_(2)
        assert float(before) == 2 * weight
        weight *= 2
        with dr.stream(streams.idle):
            net.weight.data.sub_(weight - 1)
        weight = 1.0


def test_a_backward_reads_what_its_call_has_saved(streams: Streams) -> None:
    a, x = (torch.full((N,), 2.0, device="remote") for _ in range(2))
    a.requires_grad_()
    times: Any = dr.remote(lambda a, x: a * x.detach().view(N))
    for _ in range(2):
        loss = times(a, x).sum()
        with streams.slow():
            loss.backward()
        with dr.stream(streams.idle):
            x.detach().copy_(torch.zeros(N))
        found = a.grad.tolist()
        assert found == [2.0] * N
        x.fill_(2.0)
        a.grad = None


def test_objects_that_share_nothing_run_beside_each_other(tmp_path: Path) -> None:
    # Modules of other tests have handed out their parameters.
    gc.collect()
    one, other, third = holder(), holder(torch.zeros(N, device="remote")), holder()
    first, second = dr.Stream(0), dr.Stream(0)
    for k in range(2):
        # What they return is their own, and it is read on the other's stream.
        fresh = one.fresh()
        with dr.stream(second):
            fresh.sum(), other.fresh().sum(), third.fresh().sum()
        with dr.stream(first):
            waits = waits_for(one, tmp_path / f"{k}")
        with dr.stream(second):
            makes(other, tmp_path / f"{k}")
        assert dr.fetch(waits, timeout=60) is None


def test_what_was_handed_out_and_let_go_of_holds_nobody_up(tmp_path: Path) -> None:
    one, other = holder(), holder()
    assert holder().get().tolist() == [0.0] * N
    first, second = dr.Stream(0), dr.Stream(0)
    with dr.stream(first):
        waits = waits_for(one, tmp_path / "made")
    with dr.stream(second):
        makes(other, tmp_path / "made")
    assert dr.fetch(waits, timeout=60) is None


def test_a_copy_that_is_passed_ties_no_objects_together(tmp_path: Path) -> None:
    x = torch.zeros(N, device="remote")
    one, other = holder(x.clone()), holder(x.clone())
    first, second = dr.Stream(0), dr.Stream(0)
    with dr.stream(first):
        waits = waits_for(one, tmp_path / "made")
    with dr.stream(second):
        x.add_(1)
        makes(other, tmp_path / "made")
    assert dr.fetch(waits, timeout=60) is None
