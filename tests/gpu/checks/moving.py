"""Checks 17 and 18: large copies up and down, and many small ones at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

import distruntime as dr
from box import Box, seconds_of
from listing import check

MIB, GIB = 1 << 20, 1 << 30
KINDS = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def resident(pid: int) -> int:
    """Return how much main memory a process has, in bytes; 0 where the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0
    return next(
        int(line.split()[1]) * 1024
        for line in status.read_text(encoding="utf-8").splitlines()
        if "VmRSS" in line
    )


def _largest(box: Box, place: dr.types.Place) -> int:
    """Return the size of the largest copy that fits: 8 GiB, or less where memory is short."""
    if box.quick:
        return 64 * MIB
    free, _ = torch.remote.mem_get_info(place)
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(8 * GIB, free // 3 // GIB * GIB, host // 6 // GIB * GIB) or 64 * MIB


@check(
    17,
    "copies of 1 B to 8 GiB",
    does="sends noise up and down in growing sizes and in all dtypes, compares it, and looks at the memory",
    failure=(
        "bytes that differ: look at worker/distruntime_worker/values/staging.py (up) and values/streams.py "
        "(down). A peak of twice the size on the GPU is finding D1, an upload that is allocated twice: "
        "log/instructions.py. Main memory that stays with the worker is finding D6, pinned memory without a "
        "bound."
    ),
    seconds=120,
)
def copies(box: Box) -> None:
    with box.session() as places:
        place, pid = places[0], dr.nodes()[0].pid
        remote, before = torch.remote, resident(pid)
        for dtype in KINDS:
            source = torch.randint(0, 2, (1000,)).to(dtype)
            found = source.to(place).cpu()
            box.require(
                found.dtype == dtype and torch.equal(found.view(torch.uint8), source.view(torch.uint8)),
                f"{dtype} does not come back as it was",
            )
        box.saw(f"{len(KINDS)} dtypes come back as they were")
        noise, largest = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8), _largest(box, place)
        sizes = [1, 1000, 65_537, MIB, 16 * MIB + 7, 64 * MIB, 256 * MIB, GIB, 8 * GIB]
        for size in sorted({size for size in sizes if size <= largest} | {largest}):
            source = noise[:size] if size <= noise.numel() else noise.repeat(size // noise.numel())
            dr.synchronize()
            real = not box.simulate_cuda
            if real:
                remote.reset_peak_memory_stats(place)
            held = remote.memory_allocated(place)
            kept: list[torch.Tensor] = []

            def up(source: torch.Tensor = source, kept: list[torch.Tensor] = kept) -> None:
                kept.append(source.to(place))
                # It is read, so that the device has it and not only the worker.
                kept[0][-1].item()

            upward = seconds_of(up)
            peak = (remote.max_memory_allocated(place) - held) / size if real else 0.0
            began = time.perf_counter()
            back = kept[0].cpu()
            downward = time.perf_counter() - began
            box.require(torch.equal(back, source), f"{size:,} bytes came back changed")
            if size >= MIB:
                rates = (
                    f"up {size / upward / GIB:.2f}, down {size / downward / GIB:.2f} GiB/s, first of its size"
                )
                box.saw(
                    f"{size / MIB:,.0f} MiB: {rates}"
                    + (f", peak there {peak:.2f} times its size" if real else "")
                )
            if real and size >= 64 * MIB:
                box.require(peak < 1.5, f"{size:,} bytes took {peak:.2f} times as much on the device (D1)")
            kept.clear()
            del source, back
        more = resident(pid) - before
        box.saw(f"the worker's main memory has grown by {more / MIB:,.0f} MiB")
        if largest >= 4 * GIB:
            box.require(more < 0.75 * largest, f"the worker keeps {more / GIB:.1f} GiB of main memory (D6)")


@check(
    18,
    "1,500 tensors in one fetch",
    does="fetches a state of 1,500 tensors while the device is busy, and counts the worker's threads",
    failure=(
        "finding C4: a thread for each value that is waited for. Look at "
        "worker/distruntime_worker/log/answers.py: one thread for each device must do."
    ),
    seconds=60,
)
def many_values(box: Box) -> None:
    with box.session() as places:
        pid = dr.nodes()[0].pid
        tasks = Path(f"/proc/{pid}/task")
        if not tasks.exists():
            return box.leave_out("the count of threads", "needs /proc")
        state = {f"w{k}": torch.full((64,), float(k), device=places[0]) for k in range(1500)}
        dr.synchronize()
        x = torch.ones(512, 512, device=places[0]) / 512
        for _ in range(300):
            x = x @ x
        base, peak, done = len(os.listdir(tasks)), 0, threading.Event()

        def look() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, len(os.listdir(tasks)))

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            began = time.perf_counter()
            found = dr.fetch(state)
            took = time.perf_counter() - began
        finally:
            done.set()
            watcher.join()
        box.saw(f"fetched in {took:.2f} s; threads of the worker: {base} before, {peak} at most")
        wrong = [name for name, value in found.items() if not bool((value == float(name[1:])).all())]
        box.require(not wrong, f"{len(wrong)} values are wrong, such as {wrong[:3]}")
        box.require(peak <= base + 20, f"the worker went from {base} to {peak} threads")
