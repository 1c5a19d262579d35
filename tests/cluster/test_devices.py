"""What workers say about their devices, and how `dr.nodes()` shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.backend import install
from distruntime.cluster import local_workers
from distruntime.cluster.local_workers import LocalLauncher, share_of_gpus
from distruntime.cluster.nodes import Device, Nodes
from distruntime.log.current import device_context, device_name, meant_by
from distruntime.session.launcher import LaunchSpec
from processes import ListeningWorker


def test_a_cpu_has_memory_and_no_capability(session: object) -> None:
    for info in dr.nodes():
        cpu = info.devices[0]
        assert (cpu.name, cpu.capability, cpu.allocated, cpu.reserved) == ("cpu", "", 0, 0)
        assert 0 < cpu.free < cpu.total and "threads" in cpu.description


def test_a_mesh_of_a_kind_that_is_nowhere_names_what_pretends_it(session: object) -> None:
    with pytest.raises(
        dr.errors.PlacementError,
        match=r"0 cuda devices on 2 nodes: name a kind.*simulate_cuda=2 pretends two",
    ):
        dr.init_device_mesh("cuda", (2,))


def test_simulated_gpus_are_no_cards(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=2, quiet=True)
    (info,) = dr.nodes()
    assert [d.name for d in info.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert [d.capability for d in info.devices] == ["", "", ""]
    assert "GPUs simulated" in repr(dr.nodes()) and "×" not in repr(dr.nodes())


def test_cuda_is_the_first_gpu_that_a_node_offers(tmp_path: Path) -> None:
    """One worker for each GPU of a machine is the usual way to run eight of them."""
    dr.shutdown()
    worker = ListeningWorker(
        tmp_path, "--listen", f"ipc://{tmp_path}/w", "--simulate-cuda", "4", "--devices", "cpu,cuda:3"
    )
    try:
        dr.init_master_worker(workers=[worker.address])
        x = torch.ones(2, device="remote")
        with dr.on(0, "cpu"):
            on_cpu = torch.ones(2, device="remote")
        with dr.device("cuda"):
            in_context = torch.ones(2, device="remote")
        made = [
            x,
            in_context,
            on_cpu.cuda(),
            on_cpu.to("cuda"),
            on_cpu.to(3),
            dr.factories.FloatTensor(2, device="cuda"),
        ]
        assert {str(found.place) for found in made} == {"node 0 cuda:3"}  # type: ignore[attr-defined]
        assert {str(s.place) for s in (dr.Stream(0), dr.Stream(device="cuda"))} == {"node 0 cuda:3"}
        assert str(dr.init_device_mesh("cuda", (1,)).places[0]) == "node 0 cuda:3"
        for device in ("cuda:0", 0):
            with pytest.raises(dr.errors.PlacementError, match="has no device 'cuda:0': it has cpu, cuda:3"):
                x.to(device)
        with pytest.raises(dr.errors.PlacementError, match="has no device 'xpu:0': it has cpu, cuda:3"):
            x.to("xpu")
    finally:
        dr.shutdown()
        worker.stop()


@pytest.mark.parametrize(
    "workers, visible, shares",
    [
        (2, "", ["0,2,4", "1,3"]),
        (5, "", ["0", "1", "2", "3", "4"]),
        (2, "7, GPU-8fa,2", ["7,2", "GPU-8fa"]),
        (1, "", [None]),
        # There are fewer cards than workers, which share them.
        (6, "", [None] * 6),
    ],
)
def test_each_local_worker_has_its_share_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch, workers: int, visible: str, shares: list[str | None]
) -> None:
    """NCCL refuses two ranks on one card."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")) if visible else 5)
    found = [share_of_gpus(k, workers, {"CUDA_VISIBLE_DEVICES": visible}) for k in range(workers)]
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in found] == shares


@pytest.mark.slow(reason="starts workers that import torch, 6 s")
def test_local_workers_start_with_their_shares(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    # A forked process shows the environment of the one that it was forked from.
    monkeypatch.setattr("distruntime.cluster.local_workers.fork_worker", lambda *args, **kwargs: None)
    # The master may not load a device from outside of torch. Its workers do.
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    fresh_session(world_size=2)
    variables = [
        Path(f"/proc/{node.pid}/environ").read_text(encoding="utf-8").split("\0") for node in dr.nodes()
    ]
    assert [[v for v in own if v.startswith("CUDA_VIS")] for own in variables] == [
        ["CUDA_VISIBLE_DEVICES=0,2"],
        ["CUDA_VISIBLE_DEVICES=1,3"],
    ]
    assert not [v for own in variables for v in own if v.startswith("TORCH_DEVICE_BACKEND_AUTOLOAD")]


def test_a_launch_that_counts_gpus_imports_torch_beside_the_nursery(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has not imported torch itself, as the master of a session has."""
    steps: list[str] = []
    there = [False]

    def import_torch(name: str) -> object:
        steps.append(f"import {name}")
        there[0] = True
        return torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(local_workers, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(local_workers, "_has_torch", lambda: there[0])
    monkeypatch.setattr(local_workers.importlib, "import_module", import_torch)
    monkeypatch.setattr(local_workers, "begin_nursery", lambda *_: steps.append("nursery"))
    monkeypatch.setattr(
        local_workers, "start_worker", lambda node, **named: steps.append(str(named["variables"]))
    )
    spec = LaunchSpec(
        0, "ipc:///x", "", None, False, 1, 0, {"DISTRUNTIME_UNREACHABLE": "10"}, tmp_path, workers=2
    )
    for _ in range(2):
        LocalLauncher().start(spec)
    share = "{'CUDA_VISIBLE_DEVICES': '0,2'}"
    assert steps == ["nursery", "import torch", share, "import torch", share]


def test_a_number_or_no_number_is_the_first_kind_of_accelerator() -> None:
    have = ["cpu", "xpu:0", "xpu:1"]
    spelt = {name: meant_by(device_name(name), have) for name in ("xpu", 1, "accelerator", "accelerator:1")}
    assert spelt == {"xpu": "xpu:0", 1: "xpu:1", "accelerator": "xpu:0", "accelerator:1": "xpu:1"}
    # It is not there, and the error says so.
    assert meant_by("cuda", have) == "cuda:0"
    with device_context("xpu:1"):
        assert meant_by("accelerator", have) == meant_by("xpu", have) == "xpu:1"
    with device_context("cuda:1"):
        assert meant_by("accelerator", have) == "xpu:0"


def _node(index: int, *cards: Device) -> dr.types.NodeInfo:
    cpu = Device("cpu", 1, "8 threads", 64 << 30, 32 << 30, "", 0, 0)
    return dr.types.NodeInfo(
        index, "host", 7, "tcp://host:1", (cpu, *cards), False, "2.13.0", "3.11.7", 0.001, "ready"
    )


def _card(k: int, name: str = "NVIDIA H200", capability: str = "9.0") -> Device:
    return Device(f"cuda:{k}", 2 + k, name, 140 << 30, 139 << 30, capability, 0, 0)


def test_the_table_names_real_gpus_with_memory_and_capability() -> None:
    table = repr(
        Nodes([_node(0, _card(0), _card(1)), _node(1), _node(2, _card(0, "NVIDIA L4", "8.9"), _card(1))])
    )
    head, *rows = table.splitlines()
    cards = [row[head.index("GPUs") : head.index("memory free")].strip() for row in rows]
    assert cards == [
        "2 × NVIDIA H200 (9.0, 140.0 GiB)",
        "",
        "1 × NVIDIA L4 (8.9, 140.0 GiB), 1 × NVIDIA H200 (9.0, 140.0 GiB)",
    ]


@pytest.mark.parametrize("name", ["<b>", "A & B"])
def test_a_name_is_text_in_a_notebook(name: str) -> None:
    page = Nodes([_node(0, _card(0, name))])._repr_html_()
    assert name not in page and name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page


def test_a_device_from_outside_of_torch_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one key for such devices. Nothing is changed before the refusal."""
    monkeypatch.setattr(install, "_library", [])
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    before = torch.save
    with pytest.raises(
        dr.errors.ConfigurationError, match=r"'npu' is loaded.*TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    ):
        install.install()
    assert torch.save is before and not install._library
