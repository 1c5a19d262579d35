"""A session of nodes with different accelerators: this one, simulated GPUs of CUDA's names, a bare CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import distruntime as dr
from processes import ListeningWorker

BUILT = os.environ.get("DISTRUNTIME_SIMULATED", "")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dr.types.Place]]:
    """The first accelerator of nodes 0 and 1, and the CPU of node 2, which has nothing else."""
    dr.shutdown()
    without = os.pathsep.join(path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path != BUILT)
    workers = []
    for arguments, variables in (
        ([], {}),
        (["--simulate-cuda", "1"], {"PYTHONPATH": without}),
        ([], {"PYTHONPATH": without}),
    ):
        folder = tmp_path_factory.mktemp("worker")
        address = f"ipc://{folder}/socket"
        # A nursery has imported torch with the device.
        workers.append(ListeningWorker(folder, "--listen", address, *arguments, under=("env",), **variables))
    dr.init_master_worker(workers=[worker.address for worker in workers], quiet=True)
    yield [dr.place(0, "simulated:0"), dr.place(1, "cuda:0"), dr.place(2, "cpu")]
    dr.shutdown()
    for worker in workers:
        worker.stop()


def test_each_node_says_what_it_has(mixed: list[dr.types.Place]) -> None:
    assert [[device.name for device in node.devices] for node in dr.nodes()] == [
        ["cpu", "simulated:0", "simulated:1"],
        ["cpu", "cuda:0"],
        ["cpu"],
    ]


def test_accelerator_is_whatever_the_node_has(mixed: list[dr.types.Place]) -> None:
    for node in (0, 1):
        with dr.on(node, "accelerator"):
            assert torch.ones(2, device="remote").place == mixed[node]
        assert torch.ones(2, device=dr.place(node, 0)).place == mixed[node]


def test_copies_between_kinds(mixed: list[dr.types.Place]) -> None:
    """They go through the memory of the hosts. So do copies within one node, from its device to its CPU."""
    x = torch.arange(70_000.0)
    for here in mixed:
        for there in mixed:
            sent = x.to(here) + 1
            got = sent.to(there) * 2
            assert got.place == there and got.cpu().equal((x + 1) * 2), (here, there)


def test_a_sum_over_kinds(mixed: list[dr.types.Place]) -> None:
    group = dr.distributed.new_group(mixed)
    parts = [torch.full((5,), float(k + 1), device=place) for k, place in enumerate(mixed)]
    dr.distributed.all_reduce(parts, group=group)
    assert [part.tolist() for part in parts] == [[6.0] * 5] * 3


def test_a_device_of_another_kind_names_what_the_node_has(mixed: list[dr.types.Place]) -> None:
    for node, asked, has in (
        (0, "cuda:0", "cpu, simulated:0, simulated:1"),
        (1, "simulated:0", "cpu, cuda:0"),
        (2, "cuda:0", "cpu"),
    ):
        with pytest.raises(
            dr.errors.PlacementError, match=f"node {node} .*has no device '{asked}': it has {has}"
        ):
            dr.place(node, asked)
    with pytest.raises(dr.errors.PlacementError, match=r"node 2 .*has no device 'accelerator': it has cpu"):
        dr.place(2, "accelerator")


def test_a_model_in_two_kinds_of_devices(mixed: list[dr.types.Place]) -> None:
    """A pipeline of two stages trains as it does here."""
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    first.load_state_dict(here[0].state_dict())
    second.load_state_dict(here[2].state_dict())
    first.to(mixed[0])
    second.to(mixed[1])
    x = torch.randn(6, 4)
    for _ in range(3):
        losses = []
        here.zero_grad()
        losses.append(here(x).square().sum())
        first.zero_grad()
        second.zero_grad()
        losses.append(second(first(x.to(mixed[0])).tanh().to(mixed[1])).square().sum())
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        with torch.no_grad():
            for p in (*here.parameters(), *first.parameters(), *second.parameters()):
                p -= 0.01 * p.grad
