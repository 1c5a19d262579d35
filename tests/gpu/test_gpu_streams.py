"""Streams of a GPU worker are CUDA streams: side by side, in order where they share a value, memory kept
while somebody reads it.
"""

from __future__ import annotations

import pytest
import torch

import distruntime as dr


def busy(products: int = 200) -> torch.Tensor:
    """Keep the GPU's current stream busy for some milliseconds."""
    x = torch.ones(2048, 2048, device="remote") / 2048
    for _ in range(products):
        x = x @ x
    return x


def test_two_streams_run_side_by_side(gpu: dr.Place) -> None:
    one, two = dr.Stream(gpu), dr.Stream(gpu)
    with dr.stream(one):
        busy(2000)
    with dr.stream(two):
        assert torch.ones(2, device="remote").sum().item() == 2
    assert not one.query()
    one.synchronize()
    assert one.query()


@pytest.mark.parametrize("implicit", [True, False])
def test_reads_and_writes_of_two_streams_come_in_order(gpu: dr.Place, implicit: bool) -> None:
    dr.set_implicit_waits(implicit)
    try:
        one, two = dr.Stream(gpu), dr.Stream(gpu)
        x = torch.zeros(1 << 20, device=one.device)
        dr.synchronize()
        for k in range(20):
            with dr.stream(one):
                busy(5)
                x.add_(1)
            if not implicit:
                two.wait_stream(one)
            with dr.stream(two):
                y = x * 1
                busy(5)
                z = x * 1
            if not implicit:
                one.wait_stream(two)
            assert [t.cpu().unique().tolist() for t in (y, z)] == [[k + 1], [k + 1]]
    finally:
        dr.set_implicit_waits(True)


def test_freed_memory_is_not_used_while_another_stream_reads_it(gpu: dr.Place) -> None:
    one, two = dr.Stream(gpu), dr.Stream(gpu)
    for k in range(50):
        with dr.stream(one):
            x = torch.full((1 << 22,), float(k), device="remote")
        with dr.stream(two):
            busy(10)
            y = x + 0
        del x
        with dr.stream(one):
            filler = [torch.full((1 << 22,), -1.0, device="remote") for _ in range(3)]
        assert y.cpu().unique().tolist() == [k]
        del filler


def test_a_fetch_sees_the_value_of_its_moment(gpu: dr.Place) -> None:
    one, two = dr.Stream(gpu), dr.Stream(gpu)
    with dr.stream(one):
        busy()
        x = torch.ones(1 << 22, device="remote")
    future = dr.fetch_async(x)
    with dr.stream(two):
        x.zero_()
    assert future.result(timeout=60).unique().tolist() == [1]
    assert x.sum().item() == 0
    assert "0." in repr(x)


def test_elapsed_time_is_the_gpus_own(gpu: dr.Place) -> None:
    stream = dr.Stream(gpu)
    start, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    with dr.stream(stream):
        busy(10)
        start.record()
        busy(2000)
        end.record()
    elapsed = start.elapsed_time(end)
    assert elapsed > 1
    assert end.query()


def test_a_gpu_waits_for_another_nodes_event(gpu: dr.Place) -> None:
    dr.shutdown()
    dr.init_master_worker(world_size=2)
    here, there = dr.Stream(0, "cuda:0"), dr.Stream(1, "cuda:0")
    with dr.stream(here):
        busy(2000)
    event = here.record_event()
    event.wait(there)
    with dr.stream(there):
        y = torch.ones(2, device="remote") + 1
    there.synchronize(60)
    assert event.query()
    assert y.sum().item() == 4
    dr.shutdown()
    dr.init_master_worker(world_size=1)
