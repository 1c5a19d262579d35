"""What the streams of a device have to do, on a GPU as on the device in software.

`busy` keeps the current stream at work for some milliseconds. Without that, what runs side by side or too
early does not show. A device in software is busy with less than a GPU, and takes smaller tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import distruntime as dr
from agree import REMOTE

Busy = Callable[[], object]


def two_run_side_by_side(place: dr.types.Place, busy: Busy, hurry: Callable[[], object]) -> dr.Stream:
    """Try two streams of a place; return the one that `busy` kept busy until it was told to hurry."""
    one, two = dr.Stream(place), dr.Stream(place)
    with dr.stream(one):
        busy()
        done = one.record_event()
    with dr.stream(two):
        assert torch.ones(2, device=REMOTE).sum().item() == 2
    assert not one.query() and not done.query()
    hurry()
    one.synchronize()
    assert done.query()
    assert one.query()
    return one


def reads_and_writes_come_in_order(
    place: dr.types.Place, busy: Busy, implicit: bool, count: int, rounds: int
) -> None:
    dr.set_implicit_waits(implicit)
    try:
        one, two = dr.Stream(place), dr.Stream(place)
        x = torch.zeros(count, device=place)
        dr.synchronize()
        for k in range(rounds):
            with dr.stream(one):
                busy()
                x.add_(1)
            if not implicit:
                two.wait_stream(one)
            with dr.stream(two):
                y = x * 1
                busy()
                z = x * 1
            if not implicit:
                one.wait_stream(two)
            assert [t.cpu().unique().tolist() for t in (y, z)] == [[k + 1], [k + 1]]
    finally:
        dr.set_implicit_waits(True)


def freed_memory_is_kept_while_it_is_read(place: dr.types.Place, busy: Busy, count: int, rounds: int) -> None:
    one, two = dr.Stream(place), dr.Stream(place)
    for k in range(rounds):
        with dr.stream(one):
            x = torch.full((count,), float(k), device=REMOTE)
        with dr.stream(two):
            busy()
            y = x + 0
        del x
        with dr.stream(one):
            filler = [torch.full((count,), -1.0, device=REMOTE) for _ in range(3)]
        assert y.cpu().unique().tolist() == [k]
        del filler


def a_fetch_sees_the_value_of_its_moment(place: dr.types.Place, busy: Busy, count: int) -> torch.Tensor:
    """Return the value, which has changed since."""
    one, two = dr.Stream(place), dr.Stream(place)
    with dr.stream(one):
        busy()
        x = torch.ones(count, device=REMOTE)
    future = dr.fetch_async(x)
    with dr.stream(two):
        x.zero_()
    assert future.result(timeout=60).unique().tolist() == [1]
    assert x.sum().item() == 0
    return x


def events_time_the_current_stream(busy: Busy, least: float) -> None:
    """`busy` takes more than `least` milliseconds on the device."""
    start, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
    start.record()
    busy()
    end.record()
    # Without the kernels, the two stamps lie next to each other.
    took = start.elapsed_time(end)
    assert took > least, f"{took} ms"
    assert end.query()


def a_stream_waits_for_an_event_of_another(here: dr.Stream, there: dr.Stream, busy: Busy) -> None:
    with dr.stream(here):
        busy()
    event = here.record_event()
    event.wait(there)
    with dr.stream(there):
        y = torch.ones(2, device=REMOTE) + 1
    there.synchronize(60)
    assert event.query()
    assert y.sum().item() == 4
