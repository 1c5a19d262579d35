"""`distruntime launch`: which workers are started how, before a script, and on which machines."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from .cluster.local_workers import LocalLauncher, log_folder
from .cluster.named_sessions import folder
from .errors import ConfigurationError, DistruntimeError
from .launching import ranks, slurm
from .launching.job import Job, Meeting, run
from .launching.programs import end_with_parent
from .launching.script import Script, command
from .session.launcher import Launcher, LaunchSpec, dialled_at
from .wire.deadlines import CONNECT, UNREACHABLE
from .wire.keys import KeyPair, choose, default_path, needs_key
from .wire.scratch import own_shared, remove, scratch_folder, sweep_shared


def from_names(text: str) -> list[str]:
    """Return the machine of each worker, from "gpu1,gpu2"."""
    hosts = [name.strip() for name in text.split(",") if name.strip()]
    if not hosts:
        raise ConfigurationError(f"got --hosts {text!r}, expected names of machines: --hosts gpu1,gpu2")
    return hosts


def from_file(path: Path) -> list[str]:
    """Return the machine of each worker, from lines such as "gpu1 slots=2".

    Raises:
        ConfigurationError: the file cannot be read, or a line of it makes no sense.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"got --hostfile {path}, which cannot be read: {error.strerror}. Name a file with a machine in "
            "each line"
        ) from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = 1
        for word in words[1:]:
            name, _, value = word.partition("=")
            # MPI's files have the most slots as well, which is nothing that a worker needs.
            if name not in ("slots", "max_slots", "max-slots") or not value.isdigit() or not int(value):
                raise ConfigurationError(
                    f"{path}, line {number}: got {word!r}, expected slots=N behind the name of a machine"
                )
            slots = int(value) if name == "slots" else slots
        hosts += [words[0]] * slots
    if not hosts:
        raise ConfigurationError(f"got --hostfile {path} without a machine, expected one in each line")
    return hosts


def address(host: str, simulate_cuda: int) -> str:
    """Return the address of a worker that a session starts by ssh, for `init_master_worker(workers=)`.

    An address stays what it is.
    """
    if "://" in host:
        return host
    return f"ssh://{host}" + (f"?simulate_cuda={simulate_cuda}" if simulate_cuda else "")


# Without -n so many workers start here.
_COUNT = 2
# The workers of other ranks have so many seconds to hear that the script has ended.
_FAREWELL = 10.0


def launch(options: argparse.Namespace) -> int:
    """Do what the command line says. Block until the script has ended; return its exit code."""
    words: list[str] = options.words[1:] if options.words[:1] == ["--"] else options.words
    try:
        if not words:
            raise ConfigurationError(
                "got no script to run: distruntime launch -n 4 train.py, or `repl` for a prompt"
            )
        found = None
        if not (options.mpi or options.ray or options.hosts is not None or options.hostfile is not None):
            found = slurm.allocation(workers=options.count)
        _require_used(options, in_slurm=found is not None or options.slurm)
        if options.mpi:
            return _be_a_rank(options, words)
        if options.hosts is not None or options.hostfile is not None:
            return _on_hosts(options, words)
        if options.ray:
            return _on_ray(options, words)
        if found is not None:
            return _in_allocation(options, words, found)
        if options.slurm:
            raise ConfigurationError(
                "got --slurm outside of an allocation of Slurm. Ask for one with `salloc --nodes=2 "
                "distruntime launch ...`, or with a batch script (docs/launching.md#slurm)"
            )
        return _here(options, words)
    except DistruntimeError as error:
        print(f"distruntime launch: {error}", file=sys.stderr)
        return 2


def _require_used(options: argparse.Namespace, *, in_slurm: bool) -> None:
    """Raise `ConfigurationError` for an option of another way to start workers: it would do nothing."""
    for option, value, way, taken in (
        ("--requeue", options.requeue, "--slurm", in_slurm),
        ("--meet", options.meet, "--mpi", options.mpi),
        ("--master", options.master, "--mpi", options.mpi),
        ("--gpus", options.gpus, "--ray", options.ray),
    ):
        if value and not taken:
            raise ConfigurationError(f"got {option} without {way}, where it would do nothing: leave it out")


def _say(text: str) -> None:
    sys.stderr.write("".join(f"[launch] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


# -- where the workers are -----------------------------------------------------------------------------------


def _here(options: argparse.Namespace, words: list[str]) -> int:
    count, directory = options.count or _COUNT, scratch_folder("launch", sockets=True)
    listen = options.listen or f"ipc://{directory}/master"
    key = options.key
    if key is None and needs_key(listen):
        # It is made where it is missing.
        choose(listen)
        key = default_path()
    meeting = Meeting(listen, dialled_at(listen), key, count)
    # One core is the script's.
    threads = max(1, ((os.cpu_count() or 1) - 1) // count) if options.threads is None else options.threads
    return _run_job(_job(options, words, LocalLauncher(), meeting, directory, threads))


def _on_hosts(options: argparse.Namespace, words: list[str]) -> int:
    """Run a script whose sessions start their workers by ssh, and end them."""
    machines = from_names(options.hosts) if options.hosts else from_file(options.hostfile)
    if options.count is not None:
        machines = [machines[k % len(machines)] for k in range(options.count)]
    workers = ",".join(address(machine, options.simulate_cuda) for machine in machines)
    # A launch within another one has workers of its own.
    variables = {"DISTRUNTIME_WORKERS": workers, "DISTRUNTIME_LISTEN": "", "DISTRUNTIME_WORLD_SIZE": ""}
    if options.key is not None:
        variables["DISTRUNTIME_KEY"] = str(options.key)
    script = command(words, module=options.module, program=options.no_python)
    with Script(script, {**os.environ, **variables}) as child:
        return child.wait()


def _on_ray(options: argparse.Namespace, words: list[str]) -> int:
    actors = importlib.import_module(".launching.ray_actors", __package__)
    directory = scratch_folder("launch", sockets=True)
    meeting = _over_tcp(options, options.count or _COUNT, directory)
    return _run_job(_job(options, words, actors.RayLauncher(gpus=options.gpus), meeting, directory))


def _in_allocation(options: argparse.Namespace, words: list[str], found: slurm.Allocation) -> int:
    shared = folder() / "launch" / f"slurm-{found.job}-{os.getpid()}"
    alone = found.hosts == (socket.gethostname().partition(".")[0],)
    if not options.slurm:
        _say(
            f"this is the allocation {found.job} of Slurm: {found.count} workers start on {len(found.hosts)} "
            "machines by srun"
        )

    def queue_again() -> None:
        _say(slurm.queue_again(found.job) or f"job {found.job} is in the queue again")

    with ExitStack() as after:
        # The machines of an allocation share the user's folders, and the key with them.
        sweep_shared(shared.parent)
        shared.mkdir(mode=0o700, parents=True)
        own_shared(shared)
        after.callback(remove, shared)
        meeting = _over_tcp(options, found.count, shared, alone=alone)
        job = _job(
            options, words, slurm.SlurmLauncher(found), meeting, scratch_folder("launch", sockets=True)
        )
        job.before_limit = queue_again if options.requeue else None
        return _run_job(job)


def _over_tcp(options: argparse.Namespace, count: int, keys: Path, *, alone: bool = False) -> Meeting:
    """Return where workers of other machines meet the script, with a new key unless the user has named one.

    Args:
        keys: the folder for a new key.
        alone: whether all workers are on this machine.
    """
    host = "127.0.0.1" if alone else "0.0.0.0"
    listen = options.listen or f"tcp://{host}:{ranks.free_port()}"
    key = options.key
    if key is None:
        key = keys / "key"
        KeyPair.generate().save(key)
    return Meeting(listen, dialled_at(listen), key, count)


def _job(
    options: argparse.Namespace,
    words: list[str],
    launcher: Launcher,
    meeting: Meeting,
    directory: Path,
    threads: int = 0,
) -> Job:
    script = command(words, module=options.module, program=options.no_python)
    spec = LaunchSpec(
        node=0,
        master=meeting.master,
        listen="",
        key=meeting.key,
        insecure=False,
        threads=options.threads or threads,
        simulate_cuda=options.simulate_cuda,
        environment={UNREACHABLE.variable: str(UNREACHABLE.get()), "PYTHONFAULTHANDLER": "1"},
        directory=directory,
        logs=log_folder(f"{os.getpid()}-launch", directory),
        workers=meeting.count,
        once=False,
    )
    return Job(launcher, meeting, spec, options.max_restarts, script, options.verbose, _say)


def _run_job(job: Job) -> int:
    try:
        return run(job, os.environ)
    finally:
        remove(job.spec.directory)


# -- what others start ---------------------------------------------------------------------------------------


def _be_a_rank(options: argparse.Namespace, words: list[str]) -> int:
    """Be one of the processes that another program has started."""
    # A killed mpirun leaves its processes to themselves.
    end_with_parent()
    rank = ranks.this_rank(size=options.count)
    arguments = ["--simulate-cuda", str(options.simulate_cuda)]
    arguments += ["--threads", str(options.threads)] if options.threads is not None else []
    shared: Path | None = None
    if options.master is not None:
        # It is made on this machine where it is missing, and only one machine has it then.
        choose(options.master, path=options.key)
        port = options.master.rpartition(":")[2]
        key = options.key or default_path()
        meeting = Meeting(options.listen or f"tcp://0.0.0.0:{port}", options.master, key, rank.size - 1)
    else:
        sweep_shared(folder() / "launch")
        shared = ranks.meeting_folder(options.meet, rank, folder())
        meeting = (
            ranks.join_meeting(shared, rank, CONNECT.get()) if rank.rank else ranks.open_meeting(shared, rank)
        )
    if rank.rank:
        ranks.become_worker(meeting, rank, arguments)
    script = command(words, module=options.module, program=options.no_python)
    try:
        with Script(script, {**os.environ, **meeting.variables()}) as child:
            code = child.wait()
        farewell = importlib.import_module(".launching.farewell", __package__)
        missed: int = farewell.send_home(meeting, _FAREWELL)
        if missed:
            _say(
                f"{missed} of {meeting.count} workers have not heard within {_FAREWELL:.0f} s that "
                f"{shlex.join(script)} has ended: end them with the program that has started them"
            )
        return code
    finally:
        if shared is not None:
            remove(shared)
