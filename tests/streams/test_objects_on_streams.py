"""Objects on several streams: what may lie in an object's memory is ordered with the object's calls.

A product on one stream delays what follows there, and the other stream is idle. So what does not wait is
early, and reads what was there before or writes what is still to be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr

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

    def wait_for(self, path: Path) -> bool:
        end = time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody has made {path}")
            time.sleep(0.001)
        return True

    def make(self, path: Path) -> None:
        path.touch()


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


@pytest.mark.parametrize("kin", KINS)
def test_a_read_comes_before_a_later_call(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    for k in range(2):
        with streams.slow():
            before = x.sum()
        with dr.stream(streams.idle):
            found.add()
        assert float(before) == k * x.numel()


@pytest.mark.parametrize("kin", KINS)
def test_a_call_comes_before_a_later_read(streams: Streams, kin: Callable[[], Any]) -> None:
    found, x = kin()
    dr.synchronize()
    for k in range(2):
        with streams.slow():
            found.add()
        with dr.stream(streams.idle):
            after = x.sum()
        assert float(after) == (k + 1) * x.numel()


@pytest.mark.parametrize("kin", KINS)
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


@pytest.mark.parametrize("kin", KINS)
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
