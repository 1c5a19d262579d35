"""The options of the command `distruntime`, and of `distruntime launch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .version import __version__

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
    _add_simulated(parser)
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


def _add_simulated(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate-cuda",
        type=_count,
        default=0,
        metavar="N",
        help="each worker that it starts simulates N GPUs with CPU tensors",
    )


def _count(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text}, expected {least} or more")
    return int(text)


# These are torchrun's flags, and whether a value follows. A run with one of them is a run of torchrun.
_TORCHRUN = {
    "--nnodes": True,
    "--nproc-per-node": True,
    "--rdzv-backend": True,
    "--rdzv-endpoint": True,
    "--rdzv-id": True,
    "--rdzv-conf": True,
    "--standalone": False,
    "--max-restarts": True,
    "--monitor-interval": True,
    "--start-method": True,
    "--event-log-handler": True,
    "--role": True,
    "--no-python": False,
    "--run-path": False,
    "--log-dir": True,
    "--redirects": True,
    "--tee": True,
    "--local-ranks-filter": True,
    "--duplicate-stdout-filters": True,
    "--duplicate-stderr-filters": True,
    "--node-rank": True,
    "--master-addr": True,
    "--master-port": True,
    "--local-addr": True,
    "--logs-specs": True,
    "--numa-binding": True,
    "--signals-to-handle": True,
    "--shutdown-timeout": True,
    "--virtual-local-rank": False,
    # Torch has these from 2.15 on.
    "--log-line-prefix-template": True,
    "--print-completion": True,
}
_SHORT = {"--redirects": ("-r",), "--tee": ("-t",)}


class _Flag(argparse.Action):
    """Notes one of torchrun's flags, with its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Add the flag to those that were given."""
        namespace.torchrun = [*namespace.torchrun, (self.const, values if isinstance(values, str) else "")]


def _session_options() -> argparse.ArgumentParser:
    """Return the options of commands that open a session."""
    session = argparse.ArgumentParser(add_help=False)
    session.add_argument(
        "workers",
        nargs="*",
        metavar="ADDRESS",
        help="the address of a running worker, such as tcp://gpu1:29400; without one, workers start here",
    )
    session.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="the number of workers to start here, or to wait for with --listen (default: 2)",
    )
    session.add_argument("--listen", metavar="ADDRESS", help="listen at ADDRESS for workers that connect")
    _add_simulated(session)
    session.add_argument("--key", metavar="FILE", help="the cluster's key file (distruntime-worker keygen)")
    session.add_argument(
        "--insecure", action="store_true", help="use no key: whoever reaches a port may run code there"
    )
    return session


def command_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m distruntime", description=description, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"distruntime {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("demo", help="train a small network on a worker of this machine")
    session = _session_options()
    commands.add_parser(
        "repl", help="open a prompt with a session, in IPython if it is installed", parents=[session]
    )
    _add_comm(commands, session)
    _add_run(commands)
    commands.add_parser(
        "key", help="print your public signing key, for the trusted-keys file of others; make one if needed"
    )
    _add_looks(commands)
    add_launch(commands)
    return parser


def _add_comm(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], session: argparse.ArgumentParser
) -> None:
    """Add the command that tries collectives."""
    comm = commands.add_parser(
        "comm", help="try the collectives between workers, and time them", parents=[session]
    )
    comm.add_argument(
        "--sizes",
        default="1K,1M,16M",
        metavar="LIST",
        help="bytes for each member, with commas between, and K, M or G behind (default: 1K,1M,16M)",
    )
    comm.add_argument("--data-channel", default="auto", metavar="NAME", help="such as gloo or nccl")


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command that runs a script with a session, or as torchrun does."""
    run = commands.add_parser(
        "run",
        help="run a script with a session, such as one for CUDA with --as-cuda, or under torchrun's flags",
        description=(
            "Run a script with a session of workers. With one of torchrun's flags (--nproc-per-node, "
            "--nnodes, --standalone, --max-restarts, --rdzv-..., and so on) the workers run it, as torchrun "
            "does."
        ),
        allow_abbrev=False,
    )
    run.add_argument(
        "--as-cuda",
        action="store_true",
        help='"cuda" and torch.cuda mean the workers: the script needs no change',
    )
    run.add_argument(
        "--all",
        action="store_true",
        help="with --as-cuda: each GPU of the session is a device; without it there is one",
    )
    run.add_argument(
        "--workers",
        metavar="ADDRESS,ADDRESS",
        help="the addresses of running workers; without them, workers start here",
    )
    run.add_argument(
        "--world-size", type=int, metavar="N", help="the number of workers to start (default: 1)"
    )
    _add_simulated(run)
    run.add_argument("--session", metavar="NAME", help="the session's name: it is attached to if it is there")
    run.add_argument("--key", metavar="FILE", help="the cluster's key file (distruntime-worker keygen)")
    run.add_argument("--insecure", action="store_true", help="use no key")
    run.add_argument(
        "-m", "--module", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    for name, valued in _TORCHRUN.items():
        spellings = dict.fromkeys([name, "--" + name[2:].replace("-", "_"), *_SHORT.get(name, ())])
        run.add_argument(
            *spellings,
            dest="torchrun",
            action=_Flag,
            const=name,
            nargs=None if valued else 0,
            default=[],
            help=argparse.SUPPRESS,
        )
    run.add_argument("script", metavar="SCRIPT", help="the file to run")
    rest = run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    # It may be empty, so the error for a command without a script need not name it.
    rest.required = False


def _add_looks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that look at workers: see looking.py."""
    asking = argparse.ArgumentParser(add_help=False)
    asking.add_argument("--key", metavar="FILE", help="the cluster's key file (distruntime-worker keygen)")
    asking.add_argument("--insecure", action="store_true", help="use no key")
    asking.add_argument("--timeout", metavar="S", help="seconds to wait for an answer (5)")
    of = "the address of a worker, such as tcp://gpu1:29400; without one, the workers of your named sessions"
    for name, text in (
        ("status", "show what workers do, and their sessions"),
        ("top", "show the same again every second, and what each stream does"),
        ("stop", "end workers, with the sessions that they have"),
    ):
        command = commands.add_parser(name, help=text, parents=[asking])
        command.add_argument(
            "addresses",
            nargs="+" if name == "stop" else "*",
            metavar="ADDRESS",
            help=of.partition(";")[0] if name == "stop" else of,
        )
        if name == "top":
            command.add_argument(
                "--times", type=int, metavar="N", help="show it N times (default: until Ctrl-C)"
            )
    command = commands.add_parser("sessions", help="list your named sessions, or end one", parents=[asking])
    command.add_argument("--end", metavar="NAME", help="end this session: its workers drop its values")
    command.add_argument(
        "--force",
        action="store_true",
        help="end it even if a master uses it, and drop its note even if no worker answers",
    )
    command = commands.add_parser(
        "stacks", help="show where the threads of a worker are in its code", parents=[asking]
    )
    command.add_argument(
        "worker", metavar="NODE", help="the address of a worker, or the number of a node in a named session"
    )
    command.add_argument("--session", metavar="NAME", help="the named session that has this node")
    command = commands.add_parser("why-slow", help="say where the time of a trace went (dr.trace)")
    command.add_argument("trace", metavar="FILE", help="the file that dr.trace has written")
