"""The program of a data channel, as the master: copies from worker to worker and back, and collectives where
the channel has them. It says whether each is what it must be.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import distruntime as dr

# The larger one has 800 KB.
SIZES = (3, 200_000)


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def wrong(collectives: bool) -> str:
    """Return what a round has given that it must not; nothing if all is right."""
    one, other = dr.place(0, "cpu"), dr.place(1, "cpu")
    for size in SIZES:
        local = torch.randn(size)
        there = local.to(one)
        far = there.to(other)
        if not torch.equal((far * 2).to(one).cpu(), local * 2):
            return f"a copy of {size} numbers, there and back"
        # Nothing waits in between: both ways at once.
        moved = [(there + k).to(other) for k in range(4)], [(far - k).to(one) for k in range(4)]
        if not all(torch.equal(x.cpu(), local + k) for k, x in enumerate(moved[0])):
            return f"copies of {size} numbers to node 1"
        if not all(torch.equal(x.cpu(), local - k) for k, x in enumerate(moved[1])):
            return f"copies of {size} numbers to node 0"
        if collectives:
            dr.distributed.all_reduce([there, far])
            if not all(torch.equal(x.cpu(), local * 2) for x in (there, far)):
                return f"a sum of {size} numbers"
    whole = torch.arange(12.0).reshape(3, 4)
    return (
        "" if torch.equal(whole.to(one).t().to(other).cpu(), whole.t()) else "a copy of a transposed tensor"
    )


def main(options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        with dr.init_master_worker(backend="zmq", **options["begin"]):
            for number in range(options["rounds"]):
                say(at=f"round {number}")
                sys.stdin.readline()
                if found := wrong(options["collectives"]):
                    say(failed=f"it is wrong: {found}")
                    return 1
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
        return 1
    say(result="right", seconds=time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
