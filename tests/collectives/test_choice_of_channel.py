"""Which data channel "auto" takes, by the devices that members are on. The nodes here are pretended ones: no
machine of the suite has two GPUs.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import distruntime as dr
from distruntime.collectives.data_channels import DataChannels
from distruntime.session.session import Session


@dataclass(eq=False)
class Pretended:
    """A worker."""

    index: int
    host: str
    asynchronous: bool
    welcome: Any


def node(number: int, *devices: tuple[str, str], host: str = "", simulated: bool = False) -> Any:
    """A node whose devices have these names and uuids."""
    rows = [SimpleNamespace(name=name, uuid=uuid) for name, uuid in (("cpu", ""), *devices)]
    return Pretended(
        number, host or f"host-{number}", bool(devices) and not simulated, SimpleNamespace(devices=rows)
    )


def home(of: Any, device: str) -> Any:
    return SimpleNamespace(node=of, worker=of, place=dr.types.Place(of.index, device))


class Channels(DataChannels):
    """Where these channels are all that the workers have."""

    def __init__(self, choice: Any, *have: str) -> None:
        super().__init__(SimpleNamespace(), choice)  # type: ignore[arg-type]
        self.have, self.asked = have, 0

    def capabilities(self, name: str, nodes: Any) -> Any:
        self.asked += 1
        if name not in self.have:
            raise dr.errors.ConfigurationError(f"torch was built without {name}")


TWO = node(0, ("cuda:0", "A"), ("cuda:1", "B")), node(1, ("cuda:0", "C"), ("cuda:1", "D"))
SHARED = [node(k, ("cuda:0", "A"), host="one") for k in range(2)]
NAMELESS = [node(k, ("cuda:0", ""), ("cuda:1", ""), host="one") for k in range(2)]
XPUS = [node(k, ("xpu:0", f"{k}")) for k in range(2)]
NPUS = [node(k, ("npu:0", f"{k}")) for k in range(2)]
SIMULATED = [node(k, ("cuda:0", ""), simulated=True) for k in range(2)]


@pytest.mark.parametrize(
    "homes, expected, reason",
    [
        ([home(TWO[0], "cuda:0"), home(TWO[1], "cuda:0")], "nccl", ""),
        ([home(TWO[0], "cuda:0"), home(TWO[0], "cuda:1")], "nccl", ""),
        ([home(SHARED[0], "cuda:0"), home(SHARED[1], "cuda:0")], "gloo", r"are one device \(A\)"),
        ([home(NAMELESS[0], "cuda:0"), home(NAMELESS[1], "cuda:0")], "gloo", "may be one device of one"),
        ([home(NAMELESS[0], "cuda:0"), home(NAMELESS[1], "cuda:1")], "nccl", ""),
        ([home(NAMELESS[0], "cuda:0"), home(NAMELESS[0], "cuda:1")], "nccl", ""),
        ([home(XPUS[0], "xpu:0"), home(XPUS[1], "xpu:0")], "xccl", ""),
        ([home(NPUS[0], "npu:0"), home(NPUS[1], "npu:0")], "gloo", ""),
        ([home(TWO[0], "cuda:0"), home(TWO[1], "cpu")], "gloo", ""),
        ([home(TWO[0], "cuda:0"), home(XPUS[1], "xpu:0")], "gloo", ""),
        ([home(SIMULATED[0], "cuda:0"), home(SIMULATED[1], "cuda:0")], "gloo", ""),
    ],
)
def test_devices_that_can_talk_to_each_other_do(
    homes: list[Any], expected: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    channels = Channels("auto", "nccl", "xccl")
    with caplog.at_level(logging.WARNING, "distruntime"):
        assert [channels.name_for(homes, None) for _ in range(2)] == [expected] * 2
    assert len(caplog.messages) == bool(reason)
    assert re.search(reason, "".join(caplog.messages))


def test_where_a_torch_lacks_the_devices_own_channel_they_go_through_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    homes = [home(TWO[0], "cuda:0"), home(TWO[1], "cuda:0")]
    channels = Channels("auto")
    with caplog.at_level(logging.WARNING, "distruntime"):
        assert [channels.name_for(homes, None) for _ in range(3)] == ["gloo"] * 3
    (said,) = caplog.messages
    assert "node 0 cuda:0 and node 1 cuda:0 go through gloo" in said and "built without nccl" in said
    assert channels.asked == 1
    # What the user has named is not replaced.
    assert channels.name_for(homes, "nccl") == Channels({"cuda": "nccl"}).name_for(homes, None) == "nccl"
    assert Channels("tcp").name_for(homes, None) == Channels({"cuda": "tcp"}).name_for(homes, None) == "tcp"
    assert Channels({"xpu": "tcp"}, "nccl").name_for(homes, None) == "nccl"


def test_a_worker_in_anothers_place_is_asked_what_it_has() -> None:
    """It may have another torch: another node of the same number, with devices of the same names."""
    homes = [home(TWO[0], "cuda:0"), home(TWO[1], "cuda:0")]
    channels = Channels("auto")
    assert channels.name_for(homes, None) == "gloo"
    channels.have = ("nccl",)
    assert channels.name_for(homes, None) == "gloo"
    homes[1] = home(node(1, ("cuda:0", "C"), ("cuda:1", "D")), "cuda:0")
    assert channels.name_for(homes, None) == "nccl"


@pytest.mark.parametrize("nodes, device", [(SHARED, "cuda:0"), (XPUS, "xpu:0"), (NPUS, "npu:0")])
def test_what_goes_through_the_nodes_memory_takes_the_channel_that_was_named_for_it(
    nodes: list[Any], device: str
) -> None:
    homes = [home(node, device) for node in nodes]
    assert Channels({"cpu": "tcp+tls"}, "nccl").name_for(homes, None) == "tcp+tls"


def test_a_type_of_device_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=r"types of devices are cpu, cuda, .*xpu"):
        dr.init_master_worker(data_channel={"gpu": "nccl"})


def test_a_channel_takes_no_device_that_is_not_its_own(session: Session) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match="xccl"):
        dr.distributed.new_group([0, 1], backend="xccl")
