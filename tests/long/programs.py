"""Many random programs, of several threads at once, with what is wrong and how to run it again.

    PYTHONPATH=.:worker:tests/help python tests/long/programs.py --seconds 600 --threads 2 --seed 1
    PYTHONPATH=.:worker:tests/help python tests/long/programs.py --programs 20000 --publish --masters 2
    PYTHONPATH=.:worker:tests/help python tests/long/programs.py --programs 500 --trace
    PYTHONPATH=.:worker:tests/help python tests/long/programs.py --programs 2000 --about Lending --streams 3
    PYTHONPATH=.:worker:tests/help python tests/long/programs.py --only 1000003 --repeat 100

With `--masters 2` another process runs programs of its own on the same workers, and a third reads what this
one publishes. Ends with 1 where a value is wrong, an operation raises, or a thread does nothing for two
minutes: then every thread's stack is printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import distruntime as dr
from distruntime.session.session import active_session
from processes import ListeningWorker
from random_programs import FAILED, Program, Reader, Run, Tally, World

ENDING = 300.0  # seconds for other masters to end, once this one has


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--programs", type=int, default=1 << 60)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--simulate-cuda", type=int, default=0, help="GPUs of each node that are really CPU tensors"
    )
    parser.add_argument("--real", action="store_true", help="the workers' accelerators are no CPU tensors")
    parser.add_argument("--publish", action="store_true", help="another thread publishes pairs all the time")
    parser.add_argument(
        "--trace", action="store_true", help="the first thread's programs run under a trace each"
    )
    parser.add_argument(
        "--masters", type=int, default=1, help="how many processes run programs on the same workers"
    )
    parser.add_argument("--most-wrong", type=int, default=5, help="end after so many programs that are wrong")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds for which a thread may do nothing"
    )
    parser.add_argument("--only", type=int, help="run this one program, by its own seed")
    parser.add_argument("--about", default="", help="a class of operations that they are about: Lending")
    parser.add_argument("--streams", type=int, help="how many streams each place has in every program")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run it")
    parser.add_argument("--keep", help="of its operations only these: 3,7,12")
    parser.add_argument("--workers", help=argparse.SUPPRESS)  # addresses, for the other masters
    parser.add_argument("--read", help=argparse.SUPPRESS)  # the owner of what is published
    return parser.parse_args()


def main() -> int:
    given = options()
    torch.set_num_threads(1)
    logging.getLogger("distruntime").setLevel(logging.ERROR)  # failures are part of programs
    gc.collect()
    gc.freeze()  # torch's own objects need not be looked through by each collection
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("DISTRUNTIME_SIGNING_KEY", f"{folder}/signing-key")
        with workers(given, folder) as addresses:
            if addresses:
                session = dr.init_master_worker(workers=addresses, timeout=90)
            else:
                session = dr.init_master_worker(
                    world_size=given.nodes, simulate_cuda=given.simulate_cuda, timeout=90
                )
            with session:
                if given.read is not None:
                    return read(given.read)
                world = World(
                    folder, given.real, given.about, given.streams, given.masters > 1 or bool(given.workers)
                )
                with others(given, addresses, active_session().name) as failed:
                    tally = one(given, world) if given.only is not None else many(given, world)
                failures_are_known()
    print(tally)
    return 1 if tally.wrong or failed else 0


def failures_are_known() -> None:
    """Have what has failed and was never read raised here, so that the end of the session need not."""
    for _ in range(1000):
        try:
            dr.synchronize(timeout=ENDING)
            return
        except FAILED:
            pass


@contextmanager
def workers(given: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Yield the addresses of workers for several masters; none for one, which starts its own."""
    if given.workers is not None or given.masters == 1:
        yield given.workers.split(",") if given.workers else []
        return
    arguments = ["--insecure", "--simulate-cuda", str(given.simulate_cuda)]
    started = []
    for k in range(given.nodes):
        (folder / str(k)).mkdir()
        started.append(ListeningWorker(folder / str(k), "--listen", f"ipc://{folder}/worker-{k}", *arguments))
    try:
        yield [worker.address for worker in started]
    finally:
        for worker in started:
            worker.stop()


@contextmanager
def others(given: argparse.Namespace, addresses: list[str], owner: str) -> Iterator[list[str]]:
    """Run the other masters meanwhile; yield a list of those that fail."""
    failed: list[str] = []
    command = [
        sys.executable,
        __file__,
        "--workers",
        ",".join(addresses),
        "--most-wrong",
        str(given.most_wrong),
    ]
    lines = []
    for k in range(1, given.masters):
        limits = [
            "--seconds",
            str(given.seconds),
            "--programs",
            str(given.programs),
            "--patience",
            str(given.patience),
        ]
        if given.about:
            limits += ["--about", given.about]
        if given.streams is not None:
            limits += ["--streams", str(given.streams)]
        lines.append(
            [*command, *limits, "--threads", str(given.threads), "--seed", str(given.seed + 1_000_000 * k)]
        )
    if given.masters > 1 and given.publish:
        lines.append([*command, "--read", owner])
    running = [subprocess.Popen(line, stdin=subprocess.PIPE) for line in lines]
    try:
        yield failed
    finally:
        for process in running:
            if process.stdin is not None:
                process.stdin.close()  # the reader ends with it
        for process, line in zip(running, lines):
            try:
                code: object = process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code != 0:
                failed.append(" ".join(line))
                print(f"ended with {code}: {failed[-1]}")


def read(owner: str) -> int:
    """Look up what another master publishes, until standard input ends."""
    reader, over = Reader(owner), threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    while not over.wait(0.02) and len(reader.wrong) < 5:
        faulthandler.dump_traceback_later(120, exit=True)
        reader.look()
    faulthandler.cancel_dump_traceback_later()
    print(f"the reader: {reader}", *reader.wrong, sep="\n", flush=True)
    return 1 if reader.wrong else 0


def one(given: argparse.Namespace, world: World) -> Tally:
    """Run one program again and again, until it is wrong."""
    tally, keep = Tally(), None if given.keep is None else {int(k) for k in given.keep.split(",")}
    for _ in range(given.repeat):
        program = Program(given.only, world)
        faulthandler.dump_traceback_later(given.patience, exit=True)
        program.run(keep)
        faulthandler.cancel_dump_traceback_later()
        tally.note(program)
        if program.wrong:
            print(*program.wrong, sep="\n")
            print("all of it:\n    " + "\n    ".join(program.said))
            break
    return tally


def many(given: argparse.Namespace, world: World) -> Tally:
    run = Run(
        world,
        given.seed,
        given.threads,
        given.seconds,
        given.programs,
        given.publish,
        given.most_wrong,
        traced=given.trace,
        patience=given.patience,
    )
    started = time.monotonic()
    run.report = lambda: print(f"{time.monotonic() - started:.0f} s: {run.tally}", flush=True)
    tally = run.go()
    seconds = time.monotonic() - started
    for wrong in tally.wrong:
        print(wrong)
    if run.stuck:
        print(f"STUCK after {seconds:.0f} s: {run.stuck}\n{tally}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)  # nothing that hangs can be ended in order
    print(
        f"seed {given.seed}: {seconds:.0f} s, {tally.counts['programs'] / seconds:.1f} programs a second",
        flush=True,
    )
    return tally


if __name__ == "__main__":
    sys.exit(main())
