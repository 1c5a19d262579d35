"""Random programs of groups, copies and streams, longer ones than in `make test`, with the count. Ten minutes; not in `make test`.

    PYTHONPATH=.:worker:tests python tests/long/hostile_order.py [programs] [first seed]

Ends with 1 at the first program that is wrong, and by the watchdog if one does not end.
"""

from __future__ import annotations

import faulthandler
import sys

import torch

import distruntime as dr
from hostile import check

PATIENCE = 120  # seconds for one program


def main() -> int:
    torch.set_num_threads(1)
    programs, first = (int(word) for word in (*sys.argv[1:], "500", "0")[:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 0)
    with dr.init_master_worker(world_size=4):
        for k in range(programs):
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            check(first + k, 2 + k % 3, steps=60 + 20 * (k % 12))
            if k % 50 == 49:
                print(f"{k + 1} programs give their serial result", flush=True)
    print(f"together: {programs} programs, none hangs, none differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
