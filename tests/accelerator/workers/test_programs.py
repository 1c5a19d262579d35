"""Random programs of several streams on two workers with two devices each: `tests/help/random_programs.py`.

`make accelerator ARGS="--programs 5000"` runs more of them than the lane does by itself.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import distruntime as dr
from on_device import set_delay
from random_programs import FAILED, Run, World

PROGRAMS = int(os.environ.get("DISTRUNTIME_PROGRAMS", "60"))
# It is enough for a stream to lag behind its thread, and few enough for programs that wait for every read.
DELAY_US = 30


# A keeper gives memory that it holds, and the worker tells where it has copied that. The values are right.
@pytest.mark.filterwarnings("ignore:.* returned a tensor in memory that somebody else holds:UserWarning")
@pytest.mark.timeout(120 + 10 * PROGRAMS)
def test_random_programs_read_what_they_read_here(
    workers: list[list[dr.types.Place]], tmp_path: Path
) -> None:
    # Failures are part of programs.
    logging.getLogger("distruntime").setLevel(logging.ERROR)
    try:
        world = World(tmp_path, real=True)
        for node in range(len(workers)):
            set_delay(node, DELAY_US)
        run = Run(world, seed=16, programs=PROGRAMS)
        tally = run.go()
        assert not run.stuck, run.stuck
        for _ in range(1000):
            try:
                dr.synchronize(timeout=60)
                break
            except FAILED:
                pass
        assert not tally.wrong, "\n".join(map(str, tally.wrong))
        assert tally.counts["programs"] == PROGRAMS
    finally:
        logging.getLogger("distruntime").setLevel(logging.NOTSET)
