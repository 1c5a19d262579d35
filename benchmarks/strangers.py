"""How fast a session goes on under a flood of strangers at its worker's port, who hold no key.

The flood takes processor time by itself, which on two cores is the session's. So it is compared with the same
flood at the port of another worker.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import distruntime as dr
from distruntime.wire.keys import KeyPair

from .harness import ROOT, Figure, daemon, seconds

# Silent connections, half-open handshakes a second, announced frames of 8 GiB, frames that are held back but
# for a byte; the last two are dialled again so many seconds after they were hung up on.
STRANGERS = ("1000", "100", "20", "20", "1")
STORM = ("1000", "100", "20", "20", "0")  # as fast as one process can: some 2,000 connections a second


def _flooded(address: str, work: int, flood_of: tuple[str, ...]) -> float:
    """Return the seconds of a read while the port of `address` is flooded."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}"}
    command = [
        sys.executable,
        str(ROOT / "tests" / "help" / "flooding.py"),
        address.rpartition(":")[2],
        *flood_of,
    ]
    flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path)
    assert flood.stdin is not None and flood.stdout is not None
    try:
        flood.stdout.readline()
        return _reads(work)
    finally:
        flood.stdin.close()
        flood.stdout.close()
        flood.kill()
        flood.wait()


def _reads(work: int) -> float:
    x = torch.zeros((), device="remote")

    def run() -> None:
        x.add_(1)
        x.item()

    return seconds(run, work)


def measure(quick: bool) -> list[Figure]:
    """Return the figures; two workers on TCP with a key."""
    work, rounds = (1000, 3) if quick else (5000, 7)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        KeyPair.generate().save(key)
        with daemon("--key", str(key)) as ours, daemon("--key", str(key)) as other:
            with dr.init_master_worker(workers=[ours], key=key, quiet=True):
                _reads(work)
                return [
                    _figure(
                        "session under 1,000 strangers / strangers elsewhere",
                        0.9,
                        STRANGERS,
                        ours,
                        other,
                        work,
                        rounds,
                    ),
                    _figure(
                        "session under a storm of strangers / the storm elsewhere",
                        None,
                        STORM,
                        ours,
                        other,
                        work,
                        rounds,
                    ),
                ]


def _figure(
    name: str, bar: float | None, flood: tuple[str, ...], ours: str, other: str, work: int, rounds: int
) -> Figure:
    pairs = [(_flooded(other, work, flood), _flooded(ours, work, flood), _reads(work)) for _ in range(rounds)]
    elsewhere, here, none = (statistics.median(times) for times in zip(*pairs))
    ratio = statistics.median(a / b for a, b, _ in pairs)
    note = (
        f"{1 / here:,.0f} operations with reads a second, "
        f"{1 / elsewhere:,.0f} with the flood at another worker, {1 / none:,.0f} with none"
    )
    return Figure(name, ratio, "x", bar, note, most=False)
