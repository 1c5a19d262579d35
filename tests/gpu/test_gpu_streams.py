"""Streams of a GPU worker are CUDA streams: side by side, in order where they share a value, memory kept
while somebody reads it.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

import device_streams
import distruntime as dr

# The side of the products that keep a GPU busy. A device in software is busy with smaller ones.
SIDE = int(os.environ.get("DISTRUNTIME_TEST_SIDE", "2048"))


def busy(products: int = 200) -> torch.Tensor:
    """Keep the GPU's current stream busy for some milliseconds."""
    x = torch.ones(SIDE, SIDE, device="remote") / SIDE
    for _ in range(products):
        x = x @ x
    return x


def test_two_streams_run_side_by_side(gpu: dr.types.Place) -> None:
    stream = device_streams.two_run_side_by_side(gpu, partial(busy, 2000), lambda: None)
    assert stream.query()


@pytest.mark.parametrize("implicit", [True, False])
def test_reads_and_writes_of_two_streams_come_in_order(gpu: dr.types.Place, implicit: bool) -> None:
    device_streams.reads_and_writes_come_in_order(gpu, partial(busy, 5), implicit, 1 << 20, rounds=20)


def test_freed_memory_is_not_used_while_another_stream_reads_it(gpu: dr.types.Place) -> None:
    device_streams.freed_memory_is_kept_while_it_is_read(gpu, partial(busy, 10), 1 << 22, rounds=50)


def test_a_fetch_sees_the_value_of_its_moment(gpu: dr.types.Place) -> None:
    x = device_streams.a_fetch_sees_the_value_of_its_moment(gpu, busy, 1 << 22)
    assert "0." in repr(x)


def test_elapsed_time_is_the_gpus_own(gpu: dr.types.Place) -> None:
    with dr.stream(dr.Stream(gpu)):
        busy(10)
        device_streams.events_time_the_current_stream(partial(busy, 2000), least=1)


def test_a_gpu_waits_for_another_nodes_event(two_nodes: list[dr.types.Place]) -> None:
    here, there = (dr.Stream(place) for place in two_nodes)
    device_streams.a_stream_waits_for_an_event_of_another(here, there, partial(busy, 2000))
