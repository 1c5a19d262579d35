"""Checkpoints of a GPU's tensors: copied to pinned memory in the order of the stream, and back to the GPU
where they were.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.checkpoint.training import Checkpoint

# The side of the products that keep a GPU busy. A device in software is busy with smaller ones.
SIDE = int(os.environ.get("DISTRUNTIME_TEST_SIDE", "2048"))


@pytest.mark.parametrize("async_op", [False, True])
def test_the_values_are_those_at_this_point_of_the_program(
    gpu: dr.types.Place, tmp_path: Path, async_op: bool
) -> None:
    with dr.on(gpu):
        x = torch.zeros(1 << 22, device="remote")
        work = torch.ones(SIDE, SIDE, device="remote") / SIDE
    for _ in range(300):
        work = work @ work
    x += work[0, 0] * 0 + 1
    saving = dr.save(
        {"x": x, "turned": x.view(2048, 2048).t(), "n": torch.tensor(3)}, tmp_path, async_op=async_op
    )
    x += 1
    if saving is not None:
        saving.wait()
    found = dr.load(tmp_path)
    assert found["x"].place == gpu and found["x"].unique().tolist() == [1.0]
    assert found["turned"].stride() == (1, 2048) and found["n"].item() == 3
    assert dr.load(tmp_path, place=dr.place(0, "cpu"))["x"].unique().tolist() == [1.0]
    assert dr.load(tmp_path, place="cpu")["x"].unique().tolist() == [1.0]


def test_streams(gpu: dr.types.Place, tmp_path: Path) -> None:
    side = dr.Stream(gpu)
    with dr.stream(side):
        work = torch.ones(SIDE, SIDE, device="remote") / SIDE
        for _ in range(300):
            work = work @ work
        x = work[0].clone() * 0 + 2
    dr.save(x, tmp_path, async_op=True)
    with dr.stream(side):
        x.zero_()
    assert dr.load(tmp_path).unique().tolist() == [2.0]


def test_dropout_goes_on(gpu: dr.types.Place, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def train(ckpt: Checkpoint) -> torch.Tensor:
        if ckpt.load() is None:
            ckpt.save({})
            kept.append(torch.rand(5, device="remote").cpu())
            raise dr.errors.NodeFailed("says a test")
        return torch.rand(5, device="remote").cpu()

    with dr.on(gpu):
        assert torch.equal(dr.run_with_restarts(train, checkpoint=tmp_path), kept[0])
