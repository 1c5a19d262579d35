"""Slurm on this machine: munge, a controller and one node, with a configuration of their own.

It needs Debian's packages `slurmctld`, `slurmd`, `slurm-client` and `munge`, and root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from processes import STARTING, free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "salloc")

_CONFIG = """\
ClusterName=test
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
MpiDefault=none
"""


def configuration(folder: object, logs: object, **more: object) -> str:
    """Return Slurm's configuration: its files are in `folder` on each host, and its logs in `logs`.

    `more` is what differs. Slurm takes options in any order, but a node before its partition.
    """
    lines = [f"{name}={value}\n" for name, value in more.items()]
    return _CONFIG.format(folder=folder, logs=logs) + "".join(lines)


def lacking() -> str:
    """Return why there can be no Slurm here, or nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed: {', '.join(absent)} missing (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class OneNodeSlurm:
    """The daemons, as a context manager. `variables` let programs find them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname().partition(".")[0]
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OneNodeSlurm:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        text = configuration(
            self.folder,
            self.folder,
            SlurmctldHost=f"{self.host}(127.0.0.1)",
            SlurmctldPort=free_port(),
            SlurmdPort=free_port(),
            MinJobAge=300,
            NodeName=f"{self.host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
            PartitionName=f"all Nodes={self.host} Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4",
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.folder.chmod(0o711)
        options = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        options |= {"log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in options.items()]
        try:
            self._start("munged", "--foreground", "--force", *munge)
            until(lambda: (self.folder / "munge.socket").exists(), STARTING)
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D")
            until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), STARTING)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in reversed(self._daemons):
            with suppress(ProcessLookupError):
                daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    list(words), stdout=output, stderr=output, env={**os.environ, **self.variables}
                )
            )

    def ask(self, *words: str) -> str:
        """Return what one of Slurm's commands prints; "" where it fails."""
        done = subprocess.run(
            list(words), capture_output=True, text=True, timeout=60, env={**os.environ, **self.variables}
        )
        return done.stdout if done.returncode == 0 else ""

    def said(self) -> str:
        """Return what the daemons have written, for a test that fails."""
        files = sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.log"))
        texts = (file.read_text(encoding="utf-8", errors="replace")[-3000:] for file in files)
        return "\n".join(f"-- {file.name}\n{text}" for file, text in zip(files, texts))
