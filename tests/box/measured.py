"""The program that measures, as the master: what comes through a narrow link, and how fast operations are
issued while a link is long.

Before each part it says what it needs, and waits for a line on standard input: then the network is so.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import distruntime as dr

# These are numbers of float32: 5 MB take 2 s at 20 Mbit/s.
BULK = 1_250_000
OPERATIONS, TRIES, LAPS = 10_000, 4, 6


def ask(weather: str) -> None:
    sys.stdout.write(json.dumps({"at": weather}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def issued() -> float:
    """Return the operations a second that are issued, at best: nothing is read."""
    x = torch.ones(4, device=dr.place(0, "cpu"))

    def issue() -> None:
        for _ in range(OPERATIONS):
            x.add_(1)

    best = 0.0
    for _ in range(TRIES):
        best = max(best, OPERATIONS / seconds(issue))
        dr.synchronize()
    return best


def main(options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    dr.init_master_worker(backend="zmq", **options["begin"])
    here, there = dr.place(0, "cpu"), dr.place(1, "cpu")
    local = torch.rand(BULK)
    x = local.to(here)
    found: dict[str, float] = {}
    # Connections are made, and buffers are there.
    x.to(there).cpu()
    calm, long = "operations a second", "operations a second at 50 ms"
    # They take turns: a machine that others use is faster at one time than at another.
    for _ in range(LAPS):
        for weather, name in (("calm", calm), ("long", long)):
            ask(weather)
            found[name] = max(found.get(name, 0.0), issued())
    ask("narrow")
    bits = BULK * 32

    def arrives(target: dr.types.Place, tensor: torch.Tensor) -> None:
        tensor.to(target)
        dr.synchronize()

    found["to a worker"] = bits / seconds(lambda: arrives(here, local))
    found["from a worker"] = bits / seconds(lambda: x.cpu())
    found["from worker to worker"] = bits / seconds(lambda: arrives(there, x))
    dr.shutdown()
    sys.stdout.write(json.dumps({"found": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
