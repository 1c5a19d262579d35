"""Many random programs for `dr.program`, called as they are and replayed: some 20 minutes.

    PYTHONPATH=.:worker:tests/help python tests/long/recorded.py --programs 200 --calls 25
    PYTHONPATH=.:worker:tests/help python tests/long/recorded.py --programs 2000 --calls 25 --one-way
    PYTHONPATH=.:worker:tests/help python tests/long/recorded.py --only 137

Each program runs four times on the same two workers: once undisturbed, once with two kinds of calls in
turns, once with a failure in one of its calls, and once with a connection that is cut in some of them. With
`--one-way` it runs once, and programs take the ways in turns. All values must be equal to eager's, bit for
bit. All calls but the first five must be replays, unless two kinds take turns. One program in five reads
state of this process that changes: some of its calls must be replays. Ends with 1 where that is not so, and
prints the seed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

import distruntime as dr
from network import Network
from processes import ListeningWorker
from recorded_programs import KINDS, compare, varying_of

# So many calls of a program are recorded at most.
RECORDED = 5
WAYS = ("undisturbed", "turns", "failure", "cut")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1000, help="the first program's")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--calls", type=int, default=25, help="so many of each program")
    parser.add_argument("--one-way", action="store_true", help="run each program in one of the four ways")
    parser.add_argument("--only", type=int, help="run the program of this seed")
    return parser.parse_args()


def tried(seed: int, way: str, calls: int, network: Network, counts: Counter[str]) -> str:
    """Run one program in one way; return what is wrong with it, or nothing."""
    kind = [*KINDS][seed % len(KINDS)]
    varying = varying_of(seed, calls)
    cuts = (calls // 3, calls // 2, calls - 1) if way == "cut" else ()

    def before(k: int) -> None:
        if k in cuts:
            network.tear()
            counts["cuts"] += 1

    try:
        bad = calls * 2 // 3 if way == "failure" else -1
        program = compare(seed, kind, calls, bad, before, turns=way == "turns", varying=varying)
    # A wrong program is counted, whatever it raises, and the others still run.
    except Exception as error:
        return f"seed {seed}, {kind}, {way}: {type(error).__name__}: {error}"
    finally:
        # A failure that nothing depends on is still to be told.
        with suppress(IndexError):
            for _ in range(20 if way == "failure" else 0):
                dr.synchronize()
    counts[f"programs, {way}"] += 1
    counts[f"calls, {way}"] += calls
    counts[f"replays, {way}"] += program.replays
    if varying.names:
        counts["programs that read state"] += 1
    few = not program.replays if varying.names else program.replays < calls - RECORDED or program.why
    if few and way != "turns":
        read = f", reads {', '.join(varying.names)}" if varying.names else ""
        return f"seed {seed}, {kind}, {way}{read}: {program.replays} replays of {calls} calls, {program.why}"
    return ""


def main() -> int:
    given = options()
    torch.set_num_threads(1)
    gc.collect()
    # The objects of torch itself need not be looked through by each collection.
    gc.freeze()
    # Failures are part of it.
    logging.getLogger("distruntime").setLevel(logging.ERROR)
    seeds = [given.only] if given.only is not None else range(given.seed, given.seed + given.programs)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, one) for one in "ab"]
        for folder in folders:
            folder.mkdir()
        os.environ.setdefault("DISTRUNTIME_SIGNING_KEY", f"{name}/signing-key")
        workers = [ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0") for folder in folders]
        try:
            with Network(workers[0].address) as network:
                dr.init_master_worker(workers=[network.address, workers[1].address], timeout=90, quiet=True)
                for k, seed in enumerate(seeds):
                    # The kinds take turns with the seeds, too. The quotient lets each kind meet each way.
                    turn = (seed // len(KINDS)) % len(WAYS)
                    for way in WAYS[turn : turn + 1] if given.one_way else WAYS:
                        odd = tried(seed, way, given.calls, network, counts)
                        if odd:
                            wrong.append(odd)
                            print(odd, flush=True)
                    if (k + 1) % 10 == 0:
                        print(f"{k + 1} programs in {time.monotonic() - began:.0f} s", flush=True)
                # The planted failures that nothing depends on are still to be told.
                for _ in range(20):
                    with suppress(IndexError):
                        dr.synchronize()
                dr.shutdown()
        finally:
            for worker in workers:
                worker.stop()
    print(f"{len(seeds)} programs in {time.monotonic() - began:.0f} s, {len(wrong)} wrong; {dict(counts)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
