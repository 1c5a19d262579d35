"""Workers in an allocation of Slurm, each behind an `srun`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ..errors import ConfigurationError, ConnectionFailed
from ..session.launcher import Launcher, LaunchSpec
from .programs import ProgramWorker, start_program

# Slurm's own commands have so many seconds to answer.
_ANSWER = 60.0
# A step has its own numbers of these. The allocation's would contradict them.
_OF_THE_ALLOCATION = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_DISTRIBUTION",
    "SLURM_CPU_BIND",
)


@dataclass(frozen=True)
class Allocation:
    """Machines that Slurm has given to a job.

    Attributes:
        job: its number.
        hosts: the names of the machines.
        workers: so many workers each of them is to have.
        gpus: so many GPUs each of them has for the job; 0: none, or nobody knows.
    """

    job: str
    hosts: tuple[str, ...]
    workers: tuple[int, ...]
    gpus: int = 0

    @property
    def count(self) -> int:
        """The number of workers on all machines."""
        return sum(self.workers)

    def host(self, node: int) -> tuple[str, int, int]:
        """Return a worker's machine, its number among the workers there, and how many these are."""
        for host, workers in zip(self.hosts, self.workers):
            if node < workers:
                return host, node, workers
            node -= workers
        raise IndexError(node)


def allocation(environment: Mapping[str, str] = os.environ, workers: int | None = None) -> Allocation | None:
    """Return the allocation in which this process runs; None where it runs in none.

    Args:
        environment: the variables in which Slurm describes it.
        workers: the number of workers on all machines. Left out: one for each task that the job asks for, and
            else one on each machine.

    Raises:
        ConfigurationError: Slurm's `scontrol` is not here, or fails; the workers cannot be spread.
    """
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    hosts = _answer(["scontrol", "show", "hostnames", nodes]).split()
    if workers is not None:
        if workers < len(hosts):
            raise ConfigurationError(
                f"got -n {workers} in an allocation of {len(hosts)} machines, expected at least one worker "
                "on each. Ask Slurm for fewer machines (--nodes), or leave -n out"
            )
        spread = [workers // len(hosts) + (k < workers % len(hosts)) for k in range(len(hosts))]
    elif "SLURM_NTASKS" in environment or "SLURM_NTASKS_PER_NODE" in environment:
        spread = tasks(environment.get("SLURM_TASKS_PER_NODE", ""), len(hosts))
    else:
        # Slurm then counts the cores as tasks.
        spread = [1] * len(hosts)
    gpus = environment.get("SLURM_GPUS_ON_NODE", "0")
    return Allocation(job, tuple(hosts), tuple(spread), int(gpus) if gpus.isdigit() else 0)


def tasks(text: str, hosts: int) -> list[int]:
    """Return the numbers that Slurm writes as "2(x3),1": 2, 2, 2, 1. Where there are others, 1 for each."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found if len(found) == hosts and all(found) else [1] * hosts


def _answer(words: Sequence[str]) -> str:
    """Return what one of Slurm's commands prints."""
    try:
        done = subprocess.run(
            list(words),
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_ANSWER,
            check=True,
        )
    except FileNotFoundError:
        raise ConfigurationError(
            f"Slurm's command {words[0]!r} is not on the PATH of this machine. Run this on a machine of the "
            "cluster, or load Slurm's module"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConnectionFailed(
            f"{shlex.join(words)} has not answered within {_ANSWER:.0f} s: Slurm's controller may be down. "
            "`scontrol ping` asks it"
        ) from None
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip() or f"exit code {error.returncode}"
        raise ConfigurationError(f"{shlex.join(words)} failed: {why}") from None
    return done.stdout


@final
class SlurmLauncher(Launcher):
    """Starts workers with `srun` in an allocation, as steps of their own.

    Each ends with its `srun`, which ends with this process.
    """

    def __init__(self, found: Allocation, *, srun: str = "srun") -> None:
        self._found, self._srun = found, srun

    def start(self, spec: LaunchSpec) -> ProgramWorker:
        """Start a step with a worker."""
        host, number, workers = self._found.host(spec.node % self._found.count)
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_ALLOCATION}
        environment.update(spec.environment)
        if workers > 1 and self._found.gpus >= workers:
            # NCCL refuses two ranks on one card.
            cards = range(self._found.gpus)[number::workers]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, cards))
        words = [
            self._srun,
            f"--jobid={self._found.job}",
            *("--nodes=1", "--ntasks=1", f"--nodelist={host}"),
            # Several steps share a machine, its memory and its GPUs.
            *("--overlap", "--mem=0", "--cpu-bind=none"),
            *("--input=none", "--unbuffered", "--quiet", "--export=ALL"),
            f"--job-name=distruntime-worker-{spec.node}",
            *(sys.executable, "-m", "distruntime_worker", *spec.arguments()),
        ]
        return start_program("srun", words, spec, environment, ends=not spec.lasting)


def queue_again(job: str) -> str:
    """Put a job that runs into the queue again. Slurm ends this process soon after. Return what it says."""
    return _answer(["scontrol", "requeue", job]).strip()
