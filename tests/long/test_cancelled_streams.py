"""Cancelled streams at length; `PYTHONPATH=.:worker:tests/help python tests/long/test_cancelled_streams.py
600` goes on for ten minutes.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from itertools import count

import pytest

import distruntime as dr
from tests.streams.test_stream_cancel import _two_nodes as _two_nodes
from tests.streams.test_stream_cancel import run

PROGRAMS = 12


@pytest.mark.parametrize("seed", range(1000, 1200))
def test_what_a_cancelled_stream_leaves_is_what_a_serial_run_gives(seed: int) -> None:
    found = run(seed, PROGRAMS)
    assert found["wrong"] == found["dropped for no reason"] == 0, found


def main(seconds: float) -> None:
    """Run programs for so long, say what was found, and fail if anything was wrong."""
    dr.init_master_worker(world_size=2)
    end, found, bad = time.monotonic() + seconds, Counter[str](), list[int]()
    for seed in count(10_000):
        if time.monotonic() > end:
            break
        new = run(seed, PROGRAMS)
        found += new
        if new["wrong"] or new["dropped for no reason"]:
            bad.append(seed)
            print(f"seed {seed}: {dict(new)}", flush=True)
    print(f"{(seed - 10_000) * PROGRAMS} programs: {dict(found)}, bad seeds {bad}")
    dr.shutdown()
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(float(sys.argv[1]))
