"""What the data channels of GPUs ask of torch's process groups, without a GPU: the process group is a
pretended one. `make gpu` tries real ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime_worker.collectives.data_channel import prepare, torch_group
from distruntime_worker.collectives.data_channel.torch_group import NCCL, XCCL, DeviceGroup, Queued


class Pretended:
    """Torch's process group. It notes what it is asked, and aborts only when it is let."""

    def __init__(self, *about: Any) -> None:
        self.about, self.asked, self.let = about, list[tuple[Any, ...]](), threading.Event()

    class Options:
        """Those of a process group."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.asked.append(("connect", device))

    def gather(self, *given: Any) -> None:
        self.asked.append(("gather", *given))

    def scatter(self, *given: Any) -> None:
        self.asked.append(("scatter", *given))

    def abort(self) -> None:
        self.let.wait()
        self.asked.append(("abort",))


@pytest.fixture(params=[NCCL, XCCL])
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceGroup]:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    name = f"ProcessGroup{request.param.__name__}"
    monkeypatch.setattr(torch_group.dist, name, Pretended, raising=False)
    monkeypatch.setattr(DeviceGroup, "_here", lambda self: nullcontext())
    monkeypatch.setattr(DeviceGroup, "_done", lambda self, work: work)
    membership: Any = dr.distributed.Membership(1, 2, torch.device("cuda:1"), "127.0.0.1", 5.0, None)  # type: ignore[arg-type]
    yield request.param(membership)


def test_members_that_are_not_the_root_give_nothing_for_it(channel: DeviceGroup) -> None:
    data = torch.arange(4)
    channel.gather(None, data, 0)
    channel.gather(torch.empty(8), data, 1)
    channel.scatter(data, None, 0)
    channel.scatter(data, torch.arange(8), 1)
    given = [row[1:-1] for row in channel._group.asked if row[0] in ("gather", "scatter")]
    (none, _), (chunks, _), (_, nothing), (_, parts) = given
    # Torch takes a list without tensors at the root alone, and no list elsewhere.
    assert none == nothing == [] and len(chunks[0]) == len(parts[0]) == 2


def test_nccl_connects_when_a_member_joins(channel: DeviceGroup) -> None:
    # The patience is that of joining then, and not an operation's. XCCL connects at its first operation.
    connected = ("connect", torch.device("cuda:1")) in channel._group.asked
    assert connected == isinstance(channel, NCCL)


def test_whoever_aborts_does_not_wait(channel: DeviceGroup) -> None:
    channel.abort()
    channel.abort()
    assert ("abort",) not in channel._group.asked
    channel._group.let.set()


class Happened:
    """An event of a device."""

    def __init__(self, happened: bool) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


class Work:
    """What a library says of an operation."""

    def __init__(self, completed: bool, error: object) -> None:
        self.completed, self.error = completed, error

    def is_completed(self) -> bool:
        return self.completed

    def exception(self) -> object:
        return self.error


def test_a_call_has_completed_when_the_device_says_so() -> None:
    def call(work: Work, happened: bool) -> Any:
        return Queued(work, Happened(happened))  # type: ignore[arg-type]

    assert call(Work(True, None), True).is_completed()
    assert not call(Work(False, None), False).is_completed()
    # The stream may be at something else that stands before the event.
    assert not call(Work(True, None), False).is_completed()
    with pytest.raises(ConnectionError):
        call(Work(True, RuntimeError("the other end is gone")), False).is_completed()


def test_torch_is_told_to_let_the_process_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    for name in ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "")
        monkeypatch.delenv(f"TORCH_NCCL_{name}")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    prepare()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    # The user keeps what he has set.
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
