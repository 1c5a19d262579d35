"""The fuzzer for an hour, with seeds of its own each time: against a worker, as a stranger, and against a
master, in turns.

    PYTHONPATH=.:worker:tests/help python tests/long/fuzz_hour.py [seconds] [seed]

Ends with 1 where something was found, which it prints with the command that repeats it.
"""

from __future__ import annotations

import random
import sys

import fuzzing

if __name__ == "__main__":
    seconds, seed = [
        *sys.argv[1:],
        *("3600", str(random.SystemRandom().randrange(1 << 30)))[len(sys.argv) - 1 :],
    ][:2]
    sys.argv[1:] = ["run", "--seconds", seconds, "--seed", seed]
    print(f"seed {seed}", flush=True)
    sys.exit(fuzzing.main())
