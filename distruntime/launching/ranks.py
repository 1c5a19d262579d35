"""Workers that another program starts, one process for each rank: `mpirun`, `srun` or a Job of Kubernetes.

Rank 0 runs the script, and the others become its workers. They meet at an address. It is given, or rank 0
leaves it in a folder that all of them see, with a key for this launch. `farewell` ends the workers.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError, ConnectionFailed
from ..wire.keys import KeyPair
from ..wire.scratch import own_shared
from .job import Meeting

# These are the variables of a rank, of the number of ranks, of those on one machine, and what names the job:
# Open MPI, other MPIs, Slurm, and Kubernetes. A Job of Kubernetes does not tell how many ranks there are.
_STARTERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_JOBID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "", "SLURM_JOB_ID"),
    ("JOB_COMPLETION_INDEX", "", "", ""),
)
# What MPI itself reads begins so.
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "ORTE_")
# A rank looks again for the address after so many seconds.
_AGAIN = 0.05
_ADDRESS, _KEY = "address", "key"


@dataclass(frozen=True)
class Rank:
    """A process among those of a job.

    Attributes:
        rank: its number, from 0.
        size: how many there are; 0: it is not said.
        alone: whether all of them are on this machine.
        job: what names the job; "" where nothing does.
        source: the variable that has told the number.
    """

    rank: int
    size: int
    alone: bool
    job: str
    source: str


def this_rank(environment: Mapping[str, str] = os.environ, size: int | None = None) -> Rank:
    """Return which rank this process is.

    Args:
        environment: its variables.
        size: how many ranks there are; left out: as the variables say.

    Raises:
        ConfigurationError: nobody has numbered this process, or there is no worker.
    """
    for rank, total, local, job in _STARTERS:
        if not environment.get(rank, "").isdigit():
            continue
        said = environment.get(total, "")
        count = size or (int(said) if said.isdigit() else 0)
        names = [environment[name] for name in (job, "SLURM_STEP_ID") if environment.get(name)]
        alone = bool(local) and environment.get(local) == said != ""
        if count < 2:
            raise ConfigurationError(
                f"got {count or 'an unknown number of'} processes, expected two or more: rank 0 runs the "
                "script, and each other rank is a worker. Start more of them, as in `mpirun -n 5 distruntime "
                "launch --mpi train.py`, or say how many there are: -n 5"
            )
        return Rank(int(environment[rank]), count, alone, "-".join(names), rank)
    raise ConfigurationError(
        "got --mpi, and nobody has numbered this process: none of "
        f"{', '.join(f'${row[0]}' for row in _STARTERS)} is set. Start it with mpirun or srun, or leave "
        "--mpi out to start workers here"
    )


def meeting_folder(named: Path | None, rank: Rank, state: Path) -> Path:
    """Return the folder in which rank 0 leaves the address and the key.

    Args:
        named: as the user says.
        state: this user's folder for what programs keep.

    Raises:
        ConfigurationError: nothing names the job, so that two jobs would meet in one folder.
    """
    if named is not None:
        return named
    if not rank.job:
        raise ConfigurationError(
            f"got a rank from ${rank.source}, and nothing that names the job. Name a folder that all "
            "processes of this launch see, and no other launch uses: --meet FOLDER. Or say where rank 0 is: "
            "--master tcp://HOST:PORT"
        )
    return state / "launch" / re.sub(r"[^\w.-]", "_", rank.job)


def open_meeting(folder: Path, rank: Rank) -> Meeting:
    """Be rank 0: choose a port, make a key, and leave both in the folder.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    host = "127.0.0.1" if rank.alone else socket.gethostname()
    port = free_port()
    master = f"tcp://{host}:{port}"
    KeyPair.generate().save(folder / _KEY)
    # A launch that is killed leaves it to the next one.
    own_shared(folder)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
            file.write(master)
        # Other ranks find the whole address, or none.
        os.replace(file.name, folder / _ADDRESS)
    except OSError as error:
        raise ConfigurationError(
            f"the address of this launch cannot be left in {folder}: {error.strerror}. Name a folder that "
            "can be written: --meet FOLDER"
        ) from error
    listen = master if rank.alone else f"tcp://0.0.0.0:{port}"
    return Meeting(listen, master, folder / _KEY, rank.size - 1)


def join_meeting(folder: Path, rank: Rank, timeout: float) -> Meeting:
    """Be another rank: wait until rank 0 has left the address. Block for `timeout` seconds at most.

    Raises:
        ConnectionFailed: it has not.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            master = (folder / _ADDRESS).read_text(encoding="ascii")
            return Meeting("", master, folder / _KEY, rank.size - 1)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise ConnectionFailed(
                    f"rank {rank.rank} on {socket.gethostname()} has not found {folder / _ADDRESS} within "
                    f"{timeout:.0f} s, which rank 0 writes. Name a folder that all machines share: --meet "
                    "FOLDER. Or say where rank 0 is: --master tcp://HOST:PORT, with a key on each machine"
                ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{folder / _ADDRESS} cannot be read: {error.strerror}. Name another folder: --meet FOLDER"
            ) from error
        time.sleep(_AGAIN)


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def become_worker(meeting: Meeting, rank: Rank, arguments: list[str]) -> None:
    """Turn this process into the worker of a rank."""
    where = ["--master", meeting.master, "--node", str(rank.rank - 1)]
    key = ["--key", str(meeting.key)] if meeting.key is not None else []
    words = [sys.executable, "-m", "distruntime_worker", *where, *key, *arguments]
    # Where mpi4py is installed, a worker begins MPI, which waits for all ranks: rank 0 never does.
    mine = {k: v for k, v in os.environ.items() if not k.startswith(_OF_MPI)}
    os.execve(sys.executable, words, mine)
