"""Checks 1 to 4: what the machine has, a daemon, the first tensor, the first read."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import distruntime as dr
from box import Box, until
from listing import check

# A context takes some 500 MiB of a card.
_CONTEXT = 200


def nvidia_smi(query: str, kind: str = "gpu") -> list[list[str]]:
    """Return the rows that nvidia-smi has for a query; none where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-{kind}={query}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return [[cell.strip() for cell in row.split(",")] for row in answer.stdout.splitlines() if row.strip()]


@contextmanager
def daemon(box: Box, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Run a worker that listens; give its address, its process and its log."""
    log = box.state / f"worker-daemon-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "distruntime_worker", "--listen", "tcp://127.0.0.1:0", *options]
    if box.simulate_cuda:
        command += ["--simulate-cuda", str(box.simulate_cuda)]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        listening = re.compile(r"tcp://127\.0\.0\.1:([1-9]\d*)")

        def ready() -> bool:
            box.require(
                process.poll() is None, f"the worker ended:\n{log.read_text(encoding='utf-8')[-2000:]}"
            )
            return listening.search(log.read_text(encoding="utf-8")) is not None

        until(ready, 60, "the worker says in its log where it listens")
        found = listening.search(log.read_text(encoding="utf-8"))
        assert found is not None
        yield found[0], process, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@check(
    1,
    "the machine",
    does="asks nvidia-smi and this process's torch what there is",
    failure=(
        "this torch cannot use the GPU: torch's build and the driver do not go together (the number that "
        "nvidia-smi shows as CUDA version must be at least torch.version.cuda), or CUDA_VISIBLE_DEVICES "
        "hides the GPU, or it is in an exclusive compute mode, in which a second process is refused. "
        "distruntime has no part in it."
    ),
)
def the_machine(box: Box) -> None:
    box.saw(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {sys.executable}")
    if not box.cuda:
        box.leave_out("nvidia-smi and torch.cuda", "need CUDA in this process")
        with box.session() as places:
            box.saw(f"a worker offers {', '.join(place.local_device for place in places)}")
            box.saw(dr.nodes())
        return
    rows = nvidia_smi("name,driver_version,memory.used,memory.total,compute_mode,mig.mode.current")
    for row in rows:
        box.saw("{}, driver {}, {} of {} MiB used, compute mode {}, MIG {}".format(*row))
    arguments = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else "none"
    box.saw(f"built for CUDA {torch.version.cuda}, NCCL {arguments}, {torch.cuda.device_count()} GPUs")
    box.require(torch.cuda.is_available(), "torch.cuda.is_available() is False")
    for row in rows:
        box.require(row[4] in ("Default", "[N/A]"), f"compute mode {row[4]}: `nvidia-smi -c DEFAULT` as root")
        if row[2].isdigit() and int(row[2]) > 2048:
            box.saw("somebody else uses this GPU: the figures below are not to be quoted")
        if row[5] == "Enabled":
            box.saw("MIG is on: NCCL takes no two parts of one card")


@check(
    2,
    "a worker that listens, and the greeting",
    does="starts `distruntime-worker --listen`, opens a session with it, and looks for contexts on the cards",
    failure=(
        "the worker does not offer the GPU, or it opens a context on "
        "cards that it does not use, each of 0.5 GB (finding A5). Look at "
        "worker/distruntime_worker/machine/, which knows the devices, and at the worker's log, which is "
        "shown."
    ),
    seconds=90,
)
def a_daemon(box: Box) -> None:
    def used() -> list[int]:
        return [int(row[0]) if row[0].isdigit() else 0 for row in nvidia_smi("memory.used")]

    before = used()
    with daemon(box, "--log-level", "debug") as (address, _, log):
        offers = [line for line in log.read_text(encoding="utf-8").splitlines() if "offer" in line]
        box.saw("\n".join(offers) or log.read_text(encoding="utf-8")[-500:])
        idle = used()
        began = time.monotonic()
        session = dr.init_master_worker(backend="zmq", workers=[address], quiet=True, timeout=60)
        greeting = time.monotonic() - began
        with session:
            box.saw(dr.nodes())
            box.saw(f"from greeting to session {greeting:.2f} s")
            greeted = used()
            (place, *_) = box.accelerators(0)
            box.require((torch.ones(2, device=place) + 1).sum().item() == 4, "1 + 1 is not 2 there")
            working = used()
    if not before:
        return box.leave_out("contexts on the cards", "need nvidia-smi")
    rises = [[after[k] - before[k] for after in (idle, greeted, working)] for k in range(len(before))]
    box.saw("MiB more on each card, started / greeted / working: " + ", ".join(map(str, rises)))
    box.require(rises[0][0] < _CONTEXT, "a worker without a session has a context already")
    box.require(
        all(rise[2] < _CONTEXT for rise in rises[1:]), "a worker has contexts on cards that it has not used"
    )


@check(
    3,
    "the first tensor",
    does='makes a tensor on "remote", adds 1, brings it back',
    failure=(
        "nothing works. The text of the error names the instruction; the worker's log (shown) has the "
        "traceback of its thread. Look at worker/distruntime_worker/session/executor.py."
    ),
    seconds=60,
)
def the_first_tensor(box: Box) -> None:
    with box.session() as places:
        x = torch.arange(6.0, device="remote")
        box.saw(f"{x!r} at {x.place!r}; + 1 is {(x + 1).cpu().tolist()}")
        box.require((x + 1).cpu().tolist() == [1, 2, 3, 4, 5, 6], f"the worker's log:\n{box.logs()[-2000:]}")
        box.require(
            x.place == places[0],
            f'"remote" is {x.place}, expected the node\'s first accelerator, {places[0]}',
        )


@check(
    4,
    "reading a number",
    does="reads a number 1,000 times: from the accelerator, from the worker's CPU, and from a local tensor",
    failure=(
        "a read from the accelerator takes more than 5 times as long as one from the worker's CPU (finding "
        "D3): the worker's way of waiting for an event is slow. Look at "
        "worker/distruntime_worker/log/answers.py and values/streams.py (HostCopy)."
    ),
)
def reading_a_number(box: Box) -> None:
    times = 100 if box.quick else 1000

    def median(x: torch.Tensor) -> float:
        taken = []
        for _ in range(times + 20):
            began = time.perf_counter()
            x.item()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[20:]) * 1e6

    with box.session() as places:
        there, cpu, here = (
            median(torch.ones((), device=device)) for device in (places[0], dr.place(0, "cpu"), box.local)
        )
    box.saw(f"median of {times}: accelerator {there:.0f} us, worker's CPU {cpu:.0f} us, local {here:.1f} us")
    box.require(there < 5 * max(cpu, 50), f"{there:.0f} us is {there / cpu:.1f} times the CPU's {cpu:.0f} us")
