"""Run the benchmarks and print their figures: `python -m benchmarks [NAME ...] [--quick] [--markdown]`.

Ends with status 1 if a figure is on the wrong side of its bar.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Callable

import torch

from . import (
    automatic_replay,
    bandwidth,
    cut_convolution,
    distance,
    floor,
    functions,
    gpu,
    groups,
    latency,
    loader,
    mesh,
    overlap,
    pipeline,
    programs,
    scale,
    slow_programs,
    startup,
    strangers,
    streams,
    survival,
    takeover,
    timeline,
    training_step,
    weights,
)
from .harness import Figure, row

BENCHMARKS: dict[str, Callable[[bool], list[Figure]]] = {
    "floor": floor.measure,
    "latency": latency.measure,
    "training_step": training_step.measure,
    "bandwidth": bandwidth.measure,
    "streams": streams.measure,
    "groups": groups.measure,
    "cut_convolution": cut_convolution.measure,
    "mesh": mesh.measure,
    "pipeline": pipeline.measure,
    "overlap": overlap.measure,
    "programs": programs.measure,
    "slow_programs": slow_programs.measure,
    "scale": scale.measure,
    "startup": startup.measure,
    "distance": distance.measure,
    "survival": survival.measure,
    "strangers": strangers.measure,
    "takeover": takeover.measure,
    "functions": functions.measure,
    "timeline": timeline.measure,
    "weights": weights.measure,
    "loader": loader.measure,
    "automatic_replay": automatic_replay.measure,
    "gpu": gpu.measure,
}


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
    asked = parser.parse_args()
    unknown = set(asked.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, {machine()}, load {os.getloadavg()[0]:.1f}\n")
    print("| figure | measured | bar | met | in numbers |\n|---|---|---|---|---|", flush=True)
    figures: list[Figure] = []
    for name in asked.names or [name for name in BENCHMARKS if name != "gpu" or torch.cuda.is_available()]:
        found = BENCHMARKS[name](asked.quick)
        figures += found
        print("\n".join(map(row, found)), flush=True)
    return 0 if all(figure.passed for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
