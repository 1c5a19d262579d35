"""What `torch.remote` says of the places: how many, which is current, their memory, their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distruntime as dr
from processes import until

K = 1024
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _two_nodes_one_with_a_simulated_gpu() -> Iterator[None]:
    dr.shutdown()
    dr.init_master_worker(world_size=2, simulate_cuda=1)
    yield
    dr.shutdown()


@pytest.fixture
def remote() -> Any:
    return torch.remote  # type: ignore[attr-defined]


def total() -> int:
    """Return the main memory of this machine, where the workers are too."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * K


def test_it_counts_the_places_and_knows_the_current_one(remote: Any) -> None:
    assert (remote.device_count(), remote.current_device(), remote.is_available()) == (4, 0, False)
    with dr.on(1, "cpu"):
        assert remote.current_device() == 3 and torch.ones(1).device.index == 3
    try:
        remote.set_device(dr.place(1, "cuda:0"))
        assert remote.current_device() == 2 and torch.ones(1, device="remote").device.index == 2
        assert torch.ones(1, device="remote:0").device.index == 0
    finally:
        remote.set_device(0)
    with remote.device(None):
        assert remote.current_device() == 0


def test_torch_accelerator_agrees(remote: Any) -> None:
    theirs = torch.accelerator
    held = torch.ones(MIB, device=dr.place(1, "cpu"))
    assert theirs.current_accelerator() == torch.device("remote") and theirs.device_count() == 4
    for where in (3, "remote:3", dr.place(1, "cpu").device):
        assert theirs.memory_allocated(where) == remote.memory_allocated(where) >= held.nbytes
        assert theirs.get_memory_info(where)[1] == total()
        theirs.synchronize(where)
    stats = theirs.memory_stats(3)
    assert stats["allocated_bytes.all.current"] == remote.memory_allocated(3)
    theirs.reset_peak_memory_stats(3)
    theirs.empty_cache()
    theirs.synchronize()
    assert theirs.max_memory_allocated(3) > 0 and theirs.memory_reserved(3) == theirs.memory_allocated(3)
    assert theirs.current_device_index() == 0 and theirs.current_stream().device.index == 0
    with theirs.device_index(3):
        assert theirs.current_device_index() == 3 and torch.ones(1, device="remote").place == dr.place(
            1, "cpu"
        )
    try:
        theirs.set_device_index(2)
        assert remote.current_device() == 2
    finally:
        theirs.set_device_index(0)


@pytest.mark.parametrize("spelled", [3, "remote:3", torch.device, dr.types.Place, None])
def test_memory_of_a_cpu_is_what_the_session_holds(remote: Any, spelled: Any) -> None:
    place = dr.place(1, "cpu")
    where = place.device if spelled is torch.device else place if spelled is dr.types.Place else spelled
    with dr.on(place):
        assert remote.memory_allocated(where) == remote.memory_reserved(where) == 0
        kept = torch.ones(25 * MIB // 4, device=place)
        views = kept[:2], kept.view(-1, 2)
        assert remote.memory_allocated(where) == 25 * MIB and len(views) == 2
        assert remote.max_memory_allocated(where) >= 25 * MIB <= remote.max_memory_reserved(where)
        free, whole = remote.mem_get_info(where)
        assert whole == total() and 0 < free < whole
    assert remote.memory_allocated(dr.place(0, "cpu")) == 0
    del kept, views
    assert remote.memory_allocated(place) == 0
    remote.empty_cache()


def test_the_peak_begins_anew(remote: Any) -> None:
    kept = torch.ones(128 * MIB // 4, device="remote:1")
    peak = remote.max_memory_allocated(1)
    assert peak >= 128 * MIB
    del kept
    remote.empty_cache()
    assert remote.max_memory_allocated(1) >= 128 * MIB
    remote.reset_peak_memory_stats(1)
    assert 0 < remote.max_memory_allocated(1) <= peak - 64 * MIB


def test_a_poisoned_value_holds_nothing(remote: Any) -> None:
    kept = torch.ones(K, K, device="remote:3")
    bad = kept[torch.tensor([K], device="remote:3")]
    assert remote.memory_allocated(3) == 4 * K * K
    with pytest.raises(IndexError):
        bad.sum().item()


def test_what_kind_of_device_it_is(remote: Any) -> None:
    for k in range(remote.device_count()):
        found = remote.get_device_properties(k)
        assert found.total_memory == total() and found.multi_processor_count >= 1
        assert (found.major, found.minor) == remote.get_device_capability(k) == (0, 0)
        assert remote.get_device_name(k) == found.name != ""
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = [line for line in lines if line.startswith("model name")]
        assert not named or found.name in named[0]


def test_figures_come_after_what_was_issued_before(remote: Any) -> None:
    x = torch.ones(400, 400, device="remote:1")
    for _ in range(50):
        x = x @ x / 400
    y = torch.ones(MIB // 4, device="remote:1")
    assert remote.memory_allocated(1) == MIB + 400 * 400 * 4
    until(lambda: dr.nodes()[0].state == "ready")
    assert x.sum().item() == 400 * 400 and y.sum().item() == MIB // 4


def test_a_fork_of_the_generators_takes_every_place_and_no_warning(remote: Any) -> None:
    def draw() -> list[list[float]]:
        return [torch.rand(3, device=f"remote:{k}").tolist() for k in range(remote.device_count())]

    torch.manual_seed(3)
    expected = [torch.rand(2).tolist(), draw()]
    torch.manual_seed(3)
    # Warnings are errors here.
    with torch.random.fork_rng():
        torch.manual_seed(99)
        draw()
    with torch.random.fork_rng(devices=[3], device_type="remote"):
        torch.rand(5, device="remote:3")
    assert [torch.rand(2).tolist(), draw()] == expected


FIGURES = [
    "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_peak_memory_stats", "get_device_name", "get_device_properties", "get_device_capability",
]  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_what_has_no_figures_is_refused(remote: Any, name: str) -> None:
    ask: Callable[[object], object] = getattr(remote, name)
    with pytest.raises(dr.errors.PlacementError, match="got 'cuda:0', expected"):
        ask("cuda:0")
    mesh = dr.init_device_mesh("cpu", (2,))
    with pytest.raises(dr.errors.UsageError, match=r"mesh\.places"):
        ask(mesh.device)


def test_figures_of_a_lost_node_are_an_error(fresh_session: Callable[..., Any], remote: Any) -> None:
    """It stands last, as it has a session of its own."""
    session = fresh_session(world_size=2)
    session.lose(session.nodes[1], "was lost by this test")
    for name in FIGURES:
        with pytest.raises(dr.errors.NodeFailed, match="was lost by this test"):
            getattr(remote, name)(1)
    assert remote.device_count() == 2 and remote.memory_allocated(0) == 0
    remote.empty_cache()
    with torch.random.fork_rng():
        torch.rand(1)
    dr.shutdown()
    assert remote.device_count() == 0
    for name in FIGURES:
        with pytest.raises(dr.errors.SessionClosed):
            getattr(remote, name)()
