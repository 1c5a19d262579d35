"""Run the benchmarks and print their figures: `python -m benchmarks [NAME ...] [--quick] [--against REV]`.

Ends with status 1 if a figure is on the wrong side of its bar, except with `--quick`. `against` has the run
of two commits in turn.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import distruntime

from . import against
from .harness import Figure, row

# Each is a module with a function `measure`.
BENCHMARKS = (
    "operation",
    "kinds",
    "issuing",
    "latency",
    "training_step",
    "bandwidth",
    "streams",
    "groups",
    "cut_convolution",
    "mesh",
    "pipeline",
    "overlap",
    "programs",
    "slow_programs",
    "scale",
    "growth",
    "startup",
    "distance",
    "survival",
    "strangers",
    "takeover",
    "functions",
    "timeline",
    "weights",
    "loader",
    "automatic_replay",
    "gpu",
)


def measure(name: str, quick: bool) -> list[Figure]:
    """Run one benchmark. It is imported here: where an older product lacks what one needs, the others run."""
    figures: list[Figure] = importlib.import_module(f"benchmarks.{name}").measure(quick)
    return figures


def as_json(name: str, found: list[Figure]) -> str:
    """Return a benchmark's figures as one line, with the folder whose product was measured."""
    tree = Path(distruntime.__file__).resolve().parent.parent
    return json.dumps({"benchmark": name, "tree": str(tree), "figures": [asdict(one) for one in found]})


def machine() -> str:
    """Return one line about this machine."""
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"of {', '.join(BENCHMARKS)}; all if none is given, gpu only where there is one",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that they run, not to quote")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one line of JSON for each benchmark")
    how.add_argument(
        "--against", metavar="REV", help="measure that commit and this tree in turn, before and after"
    )
    asked = parser.parse_args()
    unknown = set(asked.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    names = asked.names or [name for name in BENCHMARKS if name != "gpu" or torch.cuda.is_available()]
    today = f"{datetime.date.today()}, {machine()}, load {os.getloadavg()[0]:.1f}"
    if asked.against is not None:
        try:
            print(f"{today}\nbefore: {against.commit(asked.against)}; after: this tree\n")
        except ValueError as error:
            parser.error(str(error))
        return 0 if against.compare(names, BENCHMARKS, asked.against, asked.quick) else 1
    torch.set_num_threads(1)
    if not asked.json:
        print(f"{today}\n")
        print("| figure | measured | bar | met | in numbers |\n|---|---|---|---|---|", flush=True)
    passed = True
    for name in names:
        found = measure(name, asked.quick)
        print(as_json(name, found) if asked.json else "\n".join(map(row, found)), flush=True)
        passed &= all(figure.passed for figure in found)
    # Few rounds say whether a benchmark runs, and not on which side of its bar a figure is.
    return 0 if passed or asked.quick else 1


if __name__ == "__main__":
    sys.exit(main())
