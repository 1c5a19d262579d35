"""The options of `distruntime launch`."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Start workers, then a script, and end the workers with it. In the script, init_master_worker() finds them.
SCRIPT is a file of Python, `repl` for a prompt, or with -m the name of a module.
"""
# Workers that have ended are replaced so often, over the whole launch.
RESTARTS = 3


def add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `launch` and its options."""
    parser = commands.add_parser(
        "launch",
        help="start workers here, on other machines, by Slurm, MPI or Ray, and then a script",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--workers",
        dest="count",
        type=_positive,
        metavar="N",
        help="the number of workers (here: 2; by Slurm: one for each task; with --mpi: of processes)",
    )
    _add_where(parser)
    parser.add_argument(
        "--simulate-cuda",
        type=_count,
        default=0,
        metavar="N",
        help="each worker simulates N GPUs with CPU tensors",
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="threads of each worker's kernels")
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=RESTARTS,
        metavar="N",
        help=f"replace workers that have ended N times in all (default: {RESTARTS})",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="the cluster's key file")
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="where the script listens for workers, such as tcp://0.0.0.0:29400 (default: any free port)",
    )
    parser.add_argument("--verbose", action="store_true", help="show routine lines of the workers' logs too")
    _add_for_clusters(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--no-python", action="store_true", help="SCRIPT is a program, and no script of Python"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="with its arguments")


def _add_where(parser: argparse.ArgumentParser) -> None:
    """Add the options that say who starts the workers, of which one is given."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="start a worker on each of these machines, by ssh")
    where.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="the same for the machines of a file: a line for each, such as `gpu1 slots=2`",
    )
    where.add_argument(
        "--slurm",
        action="store_true",
        help="start workers by srun in this allocation",
    )
    where.add_argument(
        "--mpi",
        action="store_true",
        help="this is one of the processes of mpirun or srun: rank 0 runs the script, the others are workers",
    )
    where.add_argument("--ray", action="store_true", help="start workers as actors of a Ray cluster")


def _add_for_clusters(parser: argparse.ArgumentParser) -> None:
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument(
        "--requeue",
        action="store_true",
        help="at Slurm's SIGUSR1, end the script with SIGTERM and queue the job again",
    )
    mpi = parser.add_argument_group("with --mpi")
    mpi.add_argument(
        "--meet", type=Path, metavar="FOLDER", help="a folder that all machines share, for address and key"
    )
    mpi.add_argument(
        "--master",
        metavar="ADDRESS",
        help="where rank 0 is, such as tcp://node1:29400, instead of such a folder; each machine has the key",
    )
    ray = parser.add_argument_group("with --ray")
    ray.add_argument("--gpus", type=_count, default=0, metavar="N", help="GPUs of each worker")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {value}, expected 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected 1 or more")
    return value
