"""Copies and collectives between two workers, against plain torch.distributed with gloo between two
processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import distruntime as dr
from distruntime.session.session import active_session

from .harness import ROOT, Figure, in_turn

dist: Any = torch.distributed

_LARGE = 16 << 20  # float32 elements: 64 MiB
_SMALL = 256  # 1 KiB
_FLIGHT = 100


def _inverse(measure: Callable[[], float]) -> float:
    return 1 / measure()


def plain(rank: int, store: str) -> None:
    """Be one of the two processes of plain torch.distributed: read what to do and how often, say how long one
    took.
    """
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    large, small = torch.ones(_LARGE), [torch.ones(_SMALL) for _ in range(_FLIGHT)]

    def copy() -> None:
        if rank == 0:
            dist.send(large, 1)
        else:
            dist.recv(large, 0)

    def in_flight() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in small]:
            work.wait()

    def one_by_one() -> None:
        for tensor in small:
            dist.all_reduce(tensor)

    work = {
        "copy": copy,
        "all_reduce": lambda: dist.all_reduce(large),
        "in_flight": in_flight,
        "one_by_one": one_by_one,
    }
    for line in sys.stdin:
        name, times = line.split()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(int(times)):
            work[name]()
        dist.barrier()
        print((time.perf_counter() - start) / int(times), flush=True)


class _Plain:
    """The two processes."""

    def __init__(self, store: str) -> None:
        command = [sys.executable, "-m", "benchmarks.groups"]
        self._members = [
            subprocess.Popen(
                [*command, str(k), store], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for k in (0, 1)
        ]

    def time(self, name: str, times: int) -> float:
        """Return the seconds of one."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write(f"{name} {times}\n")
            member.stdin.flush()
        return max(float(member.stdout.readline()) for member in self._members if member.stdout is not None)

    def close(self) -> None:
        for member in self._members:
            member.kill()
            member.wait(10)


def measure(quick: bool) -> list[Figure]:
    """Return each figure against gloo's own, in turn."""
    times, rounds = (2, 3) if quick else (8, 7)
    with tempfile.TemporaryDirectory() as folder, dr.init_master_worker(quiet=True):
        gloo = _Plain(str(Path(folder) / "store"))
        try:
            figures = _measure(gloo, times, rounds)
        finally:
            gloo.close()
    rounds = 1 if quick else 3
    ratio, tls, tcp = in_turn(
        lambda: _rate("tcp+tls", times, rounds), lambda: _rate("tcp", times, rounds), rounds
    )
    return [
        *figures,
        Figure(
            "64 MiB copy by tcp+tls / by tcp", ratio, "x", None, f"{tls:.2f} GiB/s, tcp {tcp:.2f}", most=False
        ),
    ]


def _rate(channel: str, times: int, rounds: int) -> float:
    """Copy 64 MiB between two workers of a session of its own; return the GiB/s of the best round."""
    with dr.init_master_worker(quiet=True, data_channel=channel):
        large = [torch.ones(_LARGE, device=f"remote:{dr.nodes()[k].devices[0].number}") for k in (0, 1)]
        seconds = []
        for _ in range(rounds + 1):  # the first is for fresh pages
            dr.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                large[1].copy_(large[0])
            dr.synchronize()
            seconds.append((time.perf_counter() - start) / times)
        return _LARGE * 4 / 2**30 / min(seconds)


def _measure(gloo: _Plain, times: int, rounds: int) -> list[Figure]:
    places = [dr.nodes()[k].devices[0].number for k in (0, 1)]
    large = [torch.ones(_LARGE, device=f"remote:{number}") for number in places]
    small = [[torch.ones(_SMALL, device=f"remote:{number}") for number in places] for _ in range(_FLIGHT)]

    def seconds(work: Any, count: int) -> float:
        dr.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            work()
        dr.synchronize()
        return (time.perf_counter() - start) / count

    def copy() -> None:
        large[1].copy_(large[0])

    def flight() -> None:
        for pair in small:
            dr.distributed.all_reduce(pair)

    figures: list[Figure] = []
    for work in (copy, flight, lambda: dr.distributed.all_reduce(large)):
        seconds(work, 2)
    gib = _LARGE * 4 / 2**30
    # As rates, so that more is better, as the bar says.
    for name, plain_name, work in (
        ("copy", "copy", copy),
        ("all_reduce", "all_reduce", lambda: dr.distributed.all_reduce(large)),
    ):
        measure, plain = partial(seconds, work, times), partial(gloo.time, plain_name, times)
        ratio, ours, theirs = in_turn(partial(_inverse, measure), partial(_inverse, plain), rounds)
        figures.append(
            Figure(
                f"64 MiB {name} between 2 workers / plain gloo",
                ratio,
                "x",
                0.95,
                f"{ours * gib:.2f} GiB/s, gloo {theirs * gib:.2f}",
                most=False,
            )
        )
    channel = active_session().channel
    dr.synchronize()
    before = channel.sent_bytes + channel.received_bytes
    seconds(copy, 16)
    kib = (channel.sent_bytes + channel.received_bytes - before) / 1024
    figures.append(
        Figure(
            "1 GiB copied between workers, through the command channel",
            kib,
            "KiB",
            100,
            "16 copies of 64 MiB",
        )
    )
    for plain_name, text, bar in (("one_by_one", "one by one", 1.3), ("in_flight", "100 in flight too", 1.3)):
        ratio, ours, theirs = in_turn(
            partial(seconds, flight, times), partial(gloo.time, plain_name, times), rounds
        )
        note = f"{ours / _FLIGHT * 1e6:.0f} us, gloo {theirs / _FLIGHT * 1e6:.0f} us"
        figures.append(Figure(f"1 KiB all_reduce, 100 in flight / gloo's own, {text}", ratio, "x", bar, note))
    return figures


if __name__ == "__main__":
    plain(int(sys.argv[1]), sys.argv[2])
