"""Many random programs, of several threads at once, with what is wrong and how to run it again.

    PYTHONPATH=.:worker:tests python tests/long/programs.py --seconds 600 --threads 2 --seed 1
    PYTHONPATH=.:worker:tests python tests/long/programs.py --programs 20000 --publish
    PYTHONPATH=.:worker:tests python tests/long/programs.py --only 1000003 --repeat 100    # one program, by the number that was printed

Ends with 1 where a value is wrong, an operation raises, or a thread does nothing for two minutes: then every thread's stack is printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import distruntime as dr
from random_programs import Program, Run, Tally, World


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--programs", type=int, default=1 << 60)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--simulate-cuda", type=int, default=0, help="GPUs of each node that are really CPU tensors")
    parser.add_argument("--publish", action="store_true", help="another thread publishes pairs all the time")
    parser.add_argument("--most-wrong", type=int, default=5, help="end after so many programs that are wrong")
    parser.add_argument("--patience", type=float, default=120, help="seconds for which a thread may do nothing")
    parser.add_argument("--only", type=int, help="run this one program, by its own seed")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run it")
    parser.add_argument("--keep", type=str, help="of its operations only these: 3,7,12")
    return parser.parse_args()


def main() -> int:
    given = options()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's own objects need not be looked through by each collection
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DISTRUNTIME_SIGNING_KEY"] = f"{folder}/signing-key"
        with dr.init_master_worker(world_size=given.nodes, simulate_cuda=given.simulate_cuda, timeout=90):
            world = World(Path(folder))
            tally = one(given, world) if given.only is not None else many(given, world)
    print(tally)
    return 1 if tally.wrong else 0


def one(given: argparse.Namespace, world: World) -> Tally:
    """Run one program again and again, until it is wrong."""
    tally, keep = Tally(), None if given.keep is None else {int(k) for k in given.keep.split(",")}
    for _ in range(given.repeat):
        program = Program(given.only, world)
        faulthandler.dump_traceback_later(120, exit=True)
        program.run(keep)
        faulthandler.cancel_dump_traceback_later()
        tally.note(program)
        if program.wrong:
            print(*program.wrong, sep="\n")
            print("all of it:\n    " + "\n    ".join(program.said))
            break
    return tally


def many(given: argparse.Namespace, world: World) -> Tally:
    run = Run(world, given.seed, given.threads, given.seconds, given.programs, given.publish, given.most_wrong, given.patience)
    started = time.monotonic()
    run.report = lambda: print(f"{time.monotonic() - started:.0f} s: {run.tally}", flush=True)
    tally = run.go()
    if run.stuck:
        print(f"STUCK after {time.monotonic() - started:.0f} s: {run.stuck}\n{tally}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
    for wrong in tally.wrong:
        print(wrong)
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s, {tally.counts['programs'] / seconds:.1f} programs a second")
    return tally


if __name__ == "__main__":
    sys.exit(main())
