"""Many random functions for `torch.compile`, called as they are and compiled: three to six seconds each.

    PYTHONPATH=.:worker:tests/help python tests/long/compiled.py --functions 200
    PYTHONPATH=.:worker:tests/help python tests/long/compiled.py --only 137

All that a function gives, writes and leaves must be what it is uncompiled. Ends with 1 where that is not so,
and prints the seed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings

import torch

import distruntime as dr
from compiled_programs import acts_of, differs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1000, help="the first function's")
    parser.add_argument("--functions", type=int, default=200)
    parser.add_argument("--only", type=int, help="run the function of this seed")
    given = parser.parse_args()
    # Dynamo tells of each break, and the backend of each graph that runs operator by operator.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first = given.seed if given.only is None else given.only
    count, wrong, began = given.functions if given.only is None else 1, 0, time.monotonic()
    with dr.init_master_worker(world_size=2, quiet=True, timeout=120):
        for seed in range(first, first + count):
            try:
                odd = differs(seed)
            # A wrong function is counted, whatever it raises, and the others still run.
            except Exception as error:
                odd = f"{type(error).__name__}: {error}"
                torch._dynamo.reset()
            if odd:
                wrong += 1
                print(f"seed {seed}: {odd}\n  {[act.name for act in acts_of(seed)]}", flush=True)
    print(f"{count} functions from seed {first}: {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
