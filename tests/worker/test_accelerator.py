"""What a worker says of its accelerators: names, figures, and why there is none. Torch is played."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from distruntime.errors import ConfigurationError
from distruntime_worker.machine import accelerator, hardware
from distruntime_worker.machine.devices import Devices
from distruntime_worker.machine.figures import device_properties, memory_figures

OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


class Played:
    """Torch on a machine with two devices of a kind. `contexts` are the devices that were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "xpu", count: int = 2) -> None:
        self.contexts: list[str] = []
        properties = SimpleNamespace(name="Card", total_memory=1000, uuid="uuid-1", gpu_subslice_count=56)
        module = SimpleNamespace(
            get_device_properties=lambda device: properties, is_initialized=lambda: bool(self.contexts)
        )
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_stream", self._stream)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", self._memory)
        monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 30)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(accelerator, "_in_use", {})

    def _stream(self, device: torch.device) -> PlayedStream:
        self.contexts.append(str(device))
        return PlayedStream(str(device))

    def _memory(self, device: torch.device) -> tuple[int, int]:
        self.contexts.append(str(device))
        return 600, 1000


class PlayedStream:
    def __init__(self, name: str) -> None:
        self.name, self.device = name, torch.device(name)
        self.waited: list[str] = []

    def record_event(self) -> str:
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    yield Played(monkeypatch)


def test_devices_have_the_names_that_torch_has_for_them(played: Played) -> None:
    devices = Devices()
    assert devices.names == ["cpu", "xpu:0", "xpu:1"]
    assert devices.asynchronous == [torch.device("xpu:0"), torch.device("xpu:1")]
    only = Devices(("xpu:1",))
    assert only.names == ["xpu:1"] and only.real(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ConfigurationError, match=r"no cuda:0; it has cpu, xpu:0, xpu:1$"):
        Devices(("cpu", "cuda:0"))
    with pytest.raises(RuntimeError, match="this worker has no device cuda:0; it has cpu, xpu:0, xpu:1"):
        devices.real(torch.device("cuda:0"))


def test_a_greeting_opens_no_context(played: Played) -> None:
    devices = Devices()
    rows = devices.info()
    assert rows[1][:3] == ("xpu:0", "Card", 1000) and rows[1].uuid == "uuid-1" and rows[1].capability == ""
    assert played.contexts == [] and accelerator.untouched()
    assert [row.free for row in rows[1:]] == [1000, 1000]
    assert devices.real(torch.device("xpu:1")) == torch.device("xpu:1")
    assert [row.free for row in devices.info()[1:]] == [1000, 600]
    assert set(played.contexts) == {"xpu:1"} and not accelerator.untouched()
    assert device_properties(torch.device("xpu:1")) == ["Card", 1000, 0, 0, 56]


def test_an_allocator_without_figures_has_zeros(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(device: torch.device) -> int:
        raise RuntimeError("Allocator for xpu is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", unknown)
    for name in ("max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.accelerator, name, unknown)
    accelerator.begin(torch.device("xpu:0"))
    assert memory_figures(torch.device("xpu:0")) == [1000, 1000, 30, 0, 0, 0]


def test_a_device_that_comes_into_use_waits_for_what_the_others_have_waited_for(played: Played) -> None:
    accelerator.begin(torch.device("xpu:0"))
    accelerator.wait_on_defaults(["an event"])  # type: ignore[list-item]
    accelerator.begin(torch.device("xpu:1"))
    accelerator.begin(torch.device("xpu:1"))
    first, second = accelerator.default_streams()
    assert first.waited == ["an event"] and second.waited == ["event of xpu:0"]  # type: ignore[attr-defined]


def test_a_driver_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_old() -> bool:
        warnings.warn(f"{OLD} (Triggered internally at CUDAFunctions.cpp:119.)", stacklevel=1)
        return False

    Played(monkeypatch, "cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", too_old)
    with caplog.at_level(logging.WARNING, "distruntime.worker"):
        assert Devices().names == ["cpu"]
    why = f"torch was built for cuda and says: {OLD}"
    assert caplog.messages == [f"offering the CPU only: {why}"]
    with pytest.raises(ConfigurationError) as caught:
        Devices(("cuda:0",))
    assert str(caught.value) == f"--devices cuda:0: this machine has no cuda:0; it has cpu. {why}"


def test_a_torch_for_gpus_on_a_machine_without_any_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Played(monkeypatch, "cuda", 0)
    assert Devices().names == ["cpu"] and not caplog.messages


def test_a_device_with_one_stream_has_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    Played(monkeypatch, "mps", 1)
    monkeypatch.setattr(accelerator, "_one_stream", lambda kind: True)
    device = torch.device("mps:0")
    one = accelerator.stream(device, 0)
    assert one is accelerator.stream(device, -1) is accelerator.default_stream(device)
    with accelerator.entered(one):
        assert not hardware.has_pinned_memory(device)
