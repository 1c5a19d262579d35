"""The options of `distruntime-worker`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from distruntime.version import __version__

# Open MPI, other MPIs, Slurm and Kubernetes number the processes that they start.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line of a worker."""
    parser = argparse.ArgumentParser(
        prog="distruntime-worker",
        description="Hold tensors and run operations for a distruntime master.",
        epilog=(
            "`distruntime-worker keygen [FILE]` makes the key that the master and all workers share. Each "
            "option may stand as DISTRUNTIME_WORKER_... in the environment."
        ),
        allow_abbrev=False,
    )
    _add_meeting(parser)
    _add_work(parser)
    _add_reports(parser)
    parser.add_argument("--version", action="version", version=f"distruntime {__version__}")
    # local_workers.py passes this: the worker ends with its last session.
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    # local_workers.py passes this: the master with this process id started the worker. It writes the key to
    # stdin, and keeps stdin open for as long as it lives.
    parser.add_argument("--local", type=int, metavar="PID", help=argparse.SUPPRESS)
    return parser


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where masters are met."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="listen for masters on ADDRESS: tcp://host:port (port 0: any free one) or ipc://path",
    )
    where.add_argument("--master", metavar="ADDRESS", help="connect to the master that listens on ADDRESS")
    parser.add_argument(
        "--node",
        type=_node,
        metavar="K",
        help="ask that master for node number K; `rank`: the number that mpirun, srun or Kubernetes gives",
    )


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the worker offers, and to whom."""
    parser.add_argument(
        "--devices",
        type=_names,
        default=(),
        metavar="D,D",
        help="offer only these devices, by the names that torch has for them there (default: all)",
    )
    parser.add_argument(
        "--simulate-cuda", type=_count, default=0, metavar="N", help="simulate N GPUs with CPU tensors"
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the file with the cluster's key (default: $DISTRUNTIME_KEY or ~/.config/distruntime/key); "
        "-: read it from standard input, both halves in one line",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="use no key: whoever reaches the address may run code here"
    )
    parser.add_argument(
        "--threads",
        type=_count,
        default=0,
        metavar="N",
        help="run torch's kernels with N threads (default: torch chooses)",
    )
    parser.add_argument(
        "--max-memory",
        type=_memory,
        metavar="SIZE",
        help=(
            "limit the memory of one session on each device: 8GiB, or 50%% of the device (default: no limit)"
        ),
    )
    parser.add_argument(
        "--no-functions",
        action="store_true",
        help="run operators only: refuse the functions of masters (dr.remote), and unpickle nothing",
    )
    parser.add_argument(
        "--data-address",
        type=_host_and_port,
        default=("", 0),
        metavar="HOST[:PORT]",
        help=(
            "the address at which other workers reach this one (default: the worker finds it out, and takes "
            "any free port)"
        ),
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the worker tells of itself, and where."""
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: each line of the log is an object, with time, level, logger, message, host and pid",
    )
    parser.add_argument(
        "--metrics",
        type=_metrics,
        metavar="[HOST:]PORT",
        help=(
            "serve health (/healthz) and figures for Prometheus (/metrics) over HTTP, on this machine unless "
            "a host is given; `distruntime-worker token` prints the word that /metrics wants"
        ),
    )


def keygen_parser() -> argparse.ArgumentParser:
    """Return what reads the command line of `keygen`."""
    parser = argparse.ArgumentParser(
        prog="distruntime-worker keygen",
        description="Make the key that the master and all workers of a cluster share.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="write the key to FILE (default: $DISTRUNTIME_KEY or ~/.config/distruntime/key)",
    )
    return parser


def token_parser() -> argparse.ArgumentParser:
    """Return what reads the command line of `token`."""
    parser = argparse.ArgumentParser(
        prog="distruntime-worker token",
        description="Print the bearer token of a worker's /metrics. It follows from the cluster's key.",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="the file with the cluster's key")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {value}, expected 0 or more")
    return value


def _node(text: str) -> int:
    """Return a node's number: the one given, or that of this process among its kind."""
    if text != "rank":
        return _count(text)
    for name in _RANKS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    raise argparse.ArgumentTypeError(
        f"got 'rank', and none of {', '.join(f'${name}' for name in _RANKS)} is set. Start this with mpirun "
        "or srun, or name the number"
    )


def _memory(text: str) -> int | float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]i?B|B|%)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a size with its unit, as 8GiB, 512MiB or 16GB, or a part, as 50%"
        )
    number, unit = float(found[1]), found[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected more than 0% and at most 100%")
        return number / 100
    size = int(number * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]))
    if size < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}: no session could hold anything")
    return size


def _metrics(text: str) -> tuple[str, int]:
    host, port = _host_and_port(text if ":" in text else f"127.0.0.1:{text}")
    return host, port


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, "0"
    if not port.isdigit() or int(port) > 65535 or not host:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected HOST or HOST:PORT, as 10.0.0.7:29500 or [fe80::1]:29500"
        )
    return host.strip("[]"), int(port)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected names of devices with commas between. Leave --devices out to offer all"
        )
    return names
