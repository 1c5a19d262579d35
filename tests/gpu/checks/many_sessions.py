"""Check 25: two sessions on one worker, and what is left when one ends."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

import torch

import distruntime as dr
from box import ROOT, Box, until
from first_steps import daemon
from listing import check

MIB = 1 << 20
# The worker gives memory back so many seconds after its last session has ended, at the latest.
_MOMENT = 3.0

# The other master: it holds memory, and then trains until somebody ends it.
_OTHER = """
import signal, sys
import torch, distruntime as dr
# A shell starts background jobs with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
address, nbytes, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with dr.init_master_worker(workers=[address], quiet=True, grace=2, timeout=90):
    place = dr.place(0, "accelerator")
    held = torch.ones(nbytes, dtype=torch.uint8, device=place)
    w = torch.randn(size, size, device=place, requires_grad=True)
    held[-1].item()
    print("ready", flush=True)
    while True:
        for _ in range(10):
            loss = (w @ w).square().mean()
            loss.backward()
            w.grad = None
        # Who never reads gets ahead of the device without end.
        loss.item()
"""


@check(
    25,
    "two sessions on one worker",
    does="reads numbers while another process trains on the same worker, ends that, then kills another one",
    failure=(
        "reads that wait behind the other session's kernels are finding D12 (all sessions share a stream). "
        "Memory that a worker keeps after a session has ended is finding D5: look at "
        "worker/distruntime_worker/session/daemon.py and machine/, which must give the allocator's cache "
        "back."
    ),
    seconds=120,
)
def two_sessions(box: Box) -> None:
    nbytes, size = (16 * MIB, 64) if box.quick else (1024 * MIB, 2048)
    with daemon(box) as (address, _, _):
        with dr.init_master_worker(workers=[address], quiet=True, timeout=90):
            place = box.accelerators(0)[0]
            remote, x = torch.remote, torch.ones((), device=place)

            def median() -> float:
                taken = []
                for _ in range(30):
                    began = time.perf_counter()
                    x.item()
                    taken.append(time.perf_counter() - began)
                return statistics.median(taken) * 1e3

            def reserved() -> float:
                """The MiB that the worker's allocator holds on the device, for all sessions."""
                return remote.memory_reserved(place) / MIB if not box.simulate_cuda else 0.0

            median()
            alone, start = median(), reserved()
            for how in (signal.SIGINT, signal.SIGKILL):
                other = subprocess.Popen(
                    [sys.executable, "-c", _OTHER, address, str(nbytes), str(size)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ},
                )
                try:
                    assert other.stdout is not None
                    box.require(other.stdout.readline().strip() == "ready", "the other master did not begin")
                    beside, held = median(), reserved()
                    other.send_signal(how)
                    other.wait(30)
                finally:
                    if other.poll() is None:
                        other.kill()
                        other.wait()
                    other.stdout.close()
                box.saw(
                    f"a read takes {alone:.2f} ms alone, {beside:.2f} ms beside a training; held {held:.0f} "
                    "MiB"
                )
                until(lambda: dr.nodes()[0].sessions == 1, 40, "the worker has dropped the other session")
                box.saw(f"ended by {how.name}: {reserved():.0f} MiB are held after it, {start:.0f} before")
            box.require(
                beside < alone + 50, f"a read takes {beside:.0f} ms beside another session's training (D12)"
            )
        if box.simulate_cuda:
            box.leave_out("the device's memory", "needs an accelerator with an allocator of its own")
            return

        def kept() -> float:
            """The MiB that are held where no session has been for a moment, as a new one sees them."""
            time.sleep(_MOMENT)
            with dr.init_master_worker(workers=[address], quiet=True, timeout=90):
                return torch.remote.memory_reserved(box.accelerators(0)[0]) / MIB

        until(
            lambda: kept() < start + nbytes / MIB / 4, 60, "the memory of ended sessions is given back (D5)"
        )
