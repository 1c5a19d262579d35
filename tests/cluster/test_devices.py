"""What workers say about their devices, and how `dr.nodes()` shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import distruntime as dr
from distruntime.cluster.nodes import Device, Nodes


def test_a_cpu_has_memory_and_no_capability(session: object) -> None:
    for info in dr.nodes():
        cpu = info.devices[0]
        assert (cpu.name, cpu.capability, cpu.allocated, cpu.reserved) == ("cpu", "", 0, 0)
        assert 0 < cpu.free < cpu.total and "threads" in cpu.description


def test_simulated_gpus_are_no_cards(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=2, quiet=True)
    (info,) = dr.nodes()
    assert [d.name for d in info.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert [d.capability for d in info.devices] == ["", "", ""]
    assert "GPUs simulated" in repr(dr.nodes()) and "×" not in repr(dr.nodes())


def _node(index: int, *cards: Device) -> dr.NodeInfo:
    cpu = Device("cpu", 1, "8 threads", 64 << 30, 32 << 30, "", 0, 0)
    return dr.NodeInfo(
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
