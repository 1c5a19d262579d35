"""Checks 14 to 16: streams, and the order that they keep."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch.nn import functional as F

import distruntime as dr
from box import ROOT, Box, busy, first_line
from listing import check

Turn = Callable[[], AbstractContextManager[object]]


@check(
    14,
    "forward on one stream, backward on another",
    does="takes gradients of attention and of an LSTM with seven choices of streams, 30 times each",
    failure=(
        "finding B3: torch runs a recorded backward on the stream of its forward, and the memory of its "
        "gradients belongs to that stream. Another stream still copies them when that stream takes the "
        "memory again: `replay_backward` in worker/distruntime_worker/values/functions.py must record the "
        "copying stream."
    ),
    seconds=90,
)
def two_streams(box: Box) -> None:
    trials, length = (3, 32) if box.quick else (30, 2048)
    shape = (2, 16, length, 64)
    with box.session() as places:
        place = places[0]
        given = [torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(place) for k in range(3)]
        lstm = torch.nn.LSTM(64, 128, num_layers=2).to(place)
        steps = torch.randn(16, 32, 64).to(place)
        first, second = dr.Stream(place), dr.Stream(place)

        def attend(inputs: list[torch.Tensor]) -> torch.Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True).square().sum()

        def recur(inputs: list[torch.Tensor]) -> torch.Tensor:
            return lstm(inputs[0])[0].square().sum()

        none: Turn = contextlib.nullcontext
        one: Turn = lambda: dr.stream(first)  # noqa: E731
        two: Turn = lambda: dr.stream(second)  # noqa: E731
        rows: dict[str, tuple[Turn, Turn, Turn | None]] = {
            "default / default / default": (none, none, none),
            "S / S / S": (one, one, one),
            "S / default / nothing": (one, none, None),
            "S / default / S": (one, none, one),
            "S / U / S": (one, two, one),
            "default / S / default": (none, one, none),
            "default / S / nothing": (none, one, None),
        }
        wrong = {}
        for what, work, values in (("attention", attend, given), ("LSTM", recur, [steps])):

            def gradients(forward: Turn, backward: Turn, after: Turn | None) -> list[torch.Tensor]:
                inputs = [value.detach().clone().requires_grad_() for value in values]  # noqa: B023
                with forward():
                    loss = work(inputs)  # noqa: B023
                with backward():
                    loss.backward()
                filler = []
                if after is not None:
                    with after():
                        # It takes the memory of gradients that nobody holds.
                        filler = [torch.full_like(inputs[0], 7.0) for _ in range(12)]
                found = dr.fetch([t.grad for t in inputs])
                del filler
                return found

            expected = gradients(none, none, None)
            for name, row in rows.items():
                bad = 0
                for _ in range(trials):
                    found = gradients(*row)
                    bad += not all(
                        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected)
                    )
                lstm.zero_grad()
                box.saw(f"{what}, forward / backward / next on {name}: {bad} of {trials} wrong")
                if bad:
                    wrong[f"{what} on {name}"] = bad
    box.require(not wrong, f"wrong gradients: {wrong}")


def _order_programs() -> ModuleType:
    path = ROOT / "tests" / "streams" / "test_stream_order.py"
    spec = importlib.util.spec_from_file_location("stream_order_programs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@check(
    15,
    "a thousand random programs on several streams",
    does=(
        "runs 1,000 programs over 2 workers and 3 streams each, and then 20 that keep no order, which must "
        "race"
    ),
    failure=(
        "a read has seen another value than a serial run gives: a wait is missing (distruntime/log/order.py) "
        "or does not reach the GPU (worker/distruntime_worker/log/waits.py, values/streams.py). If only the "
        "last part fails, no program raced, so the device is too quick for the check to show anything."
    ),
    seconds=90,
    needs=("pytest",),
)
def random_programs(box: Box) -> None:
    programs, count = _order_programs(), 60 if box.quick else 1000
    with box.session(world_size=programs.NODES):
        began, good, done = time.monotonic(), 0, 0
        while done < count and time.monotonic() - began < 60:
            good += programs.run(done, 20, draws=False, delay=1 if box.quick else 8)
            done += 20
        box.saw(f"{good} of {done} programs agree with their serial run")
        box.require(good == done, f"{done - good} of {done} programs differ from their serial run")
        raced = 0
        dr.set_implicit_waits(False)
        try:
            raced = 20 - programs.run(0, 20, draws=False, delay=1 if box.quick else 16)
        except dr.errors.InternalError as error:
            # A value that is not there yet is a race too, and an error that a user should not see.
            raced = 1
            box.saw(f"without the implicit waits a read raised {first_line(str(error))}")
        finally:
            dr.set_implicit_waits(True)
        box.saw(f"without the implicit waits {raced} of 20 race")
        box.require(raced, "no program raced without the waits, so the programs show nothing on this device")


@check(
    16,
    "events",
    does=(
        "polls an event while it goes on issuing, and compares `elapsed_time` with that of torch's own events"
    ),
    failure=(
        "finding C5: an event is recorded when it is asked for, at the end of the stream, and so `query` "
        "never becomes true: look at `MARK` in worker/distruntime_worker/log/ and at "
        "distruntime/streams/stream.py. If times differ by more than a tenth, the stamps stand in another "
        "stream than the work."
    ),
    seconds=60,
)
def events(box: Box) -> None:
    with box.session() as places:
        place = places[0]
        with dr.on(place):
            busy(place, 10, box.quick)[0, 0].item()
            event = dr.Event()
            busy(place, 20, box.quick)
            event.record()
            polls, began = 0, time.monotonic()
            while not event.query() and time.monotonic() - began < 10:
                busy(place, 4, box.quick)
                polls += 1
            took = time.monotonic() - began
            box.saw(f"query() is true after {polls} polls that issued work in between, {took:.2f} s")
            box.require(took < 10, "query() stays false while work is issued behind the event")
            dr.synchronize()
            event = dr.Event()
            event.record()
            event.synchronize(20)
            box.require(event.query(), "query() is false after synchronize()")

            def timed() -> float:
                start, end = dr.Event(enable_timing=True), dr.Event(enable_timing=True)
                start.record()
                busy(place, 40, box.quick)
                end.record()
                return start.elapsed_time(end)

            timed()
            there = statistics.median(timed() for _ in range(5))
        if not box.cuda:
            box.saw(f"elapsed_time: {there:.1f} ms")
            return box.leave_out("the comparison with torch.cuda.Event", "needs CUDA in this process")

        def local() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            busy("cuda", 40, box.quick)
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        local()
        here = statistics.median(local() for _ in range(5))
    box.saw(f"the same products: {there:.1f} ms by remote events, {here:.1f} ms by torch.cuda.Event")
    box.require(
        abs(there - here) < 0.1 * here, f"{there:.1f} ms and {here:.1f} ms differ by more than a tenth"
    )
