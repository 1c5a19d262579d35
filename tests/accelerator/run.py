"""Run the lane: build the simulated accelerator, try it, and then the worker on it. `make accelerator`.

--only-build    build it, and print the folder that loads it from PYTHONPATH
--mutants       only the mutants: the worker with a line left out, which a test must notice
--programs N    so many random programs instead of 60
anything else   goes to pytest, for the device's own tests and the workers'; without it the mutants run too

The parts run two at a time, and each prints its time. What a part has printed comes with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import mutants
from building import NoCompiler, build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKERS = HERE / "workers"
PROCESSES = 2
# So many seconds has a test that names no others. On two cores with a load of 30, an import of torch took
# 48 s, and some tests start three workers.
LIMIT = 600
# Pytest says this where `-k` has left nothing of a part.
_NOTHING = 5


def with_device(built: Path) -> dict[str, str]:
    """Return an environment in which `import torch` loads the device."""
    paths = [str(built), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    found.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return found


def for_a_master(built: Path) -> dict[str, str]:
    """Return an environment for a master: it takes such a device's place, and only its workers find it."""
    return {**os.environ, "DISTRUNTIME_SIMULATED": str(built), "OMP_NUM_THREADS": "1"}


class Part(NamedTuple):
    """A part of the lane: `run` returns its exit status and what it has printed."""

    name: str
    run: Callable[[], tuple[int, str]]


def tests(name: str, paths: Sequence[Path | str], environment: dict[str, str], arguments: list[str]) -> Part:
    """Return a part that is one process of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", f"--timeout={LIMIT}", *map(str, paths), *arguments]

    def run() -> tuple[int, str]:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout

    return Part(name, run)


def mutant(one: mutants.Mutant, environment: dict[str, str]) -> Part:
    """Return a part that fails where no test notices a mutant."""

    def run() -> tuple[int, str]:
        wrong = mutants.survives(one, environment)
        return int(bool(wrong)), wrong

    return Part(f"mutant: {one.name}", run)


def parts(built: Path, arguments: list[str]) -> list[Part]:
    """Return what runs, the longest first: a long part at the end would run alone."""
    master = for_a_master(built)
    if "--mutants" in arguments:
        words = [word for word in arguments if word != "--mutants"]
        chosen = [one for one in mutants.MUTANTS if not words or any(word in one.name for word in words)]
        return [mutant(one, master) for one in chosen]
    # The suite's conftest would start sessions, and a master cannot have this device.
    own = ["--confcutdir", str(HERE), HERE / "test_device.py"]
    rest = [WORKERS / name for name in ("test_device_path.py", "test_mixed.py", "test_training.py")]
    found = [
        tests("the worker, random programs", [WORKERS / "test_programs.py"], master, arguments),
        tests("the worker, operators", [WORKERS / "test_op_db.py"], master, arguments),
        tests("the worker, the rest", rest, master, arguments),
        tests("the worker, lost devices", [HERE / "test_device_path.py"], master, arguments),
        tests("the device itself", own, with_device(built), arguments),
    ]
    return found if arguments else [*found, *(mutant(one, master) for one in mutants.MUTANTS)]


def timed(part: Part) -> tuple[int, str, float]:
    began = time.monotonic()
    status, told = part.run()
    return status, told, time.monotonic() - began


def main(arguments: list[str]) -> int:
    try:
        built = build()
    except NoCompiler as missing:
        print(f"skipped: {missing}")
        return 0
    if "--only-build" in arguments:
        print(built)
        return 0
    if "--programs" in arguments:
        at = arguments.index("--programs")
        os.environ["DISTRUNTIME_PROGRAMS"] = arguments[at + 1]
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    statuses = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        under_way = {pool.submit(timed, part): part for part in parts(built, arguments)}
        for ended in as_completed(under_way):
            status, told, seconds = ended.result()
            statuses.append(status)
            # What went well needs its last line alone, unless somebody has asked pytest for more.
            shown = told if status not in (0, _NOTHING) or arguments else told.rstrip().rpartition("\n")[2]
            outcome = {0: "ok", _NOTHING: "nothing to run"}.get(status, "FAILED")
            print(f"{under_way[ended].name}: {outcome} in {seconds:.0f} s. {shown}".rstrip(), flush=True)
    # Nothing at all was chosen, which is a mistake in the arguments.
    return max((status for status in statuses if status != _NOTHING), default=_NOTHING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
