"""What hosts of a box have beside workers: sshd, Slurm, Ray, a clock. It ends with its host."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from scenarios import MASTER

from hosts import Host
from one_node_slurm import configuration
from processes import PATH, ROOT, STARTING, until

_SSHD = "/usr/sbin/sshd"
_CLOCK = ROOT / "tests" / "help" / "moved_clock.c"
_NONE: Mapping[str, str] = {}
_MUNGE = ("--foreground", "--force")
# A node that does not answer is down after so many seconds.
_NODE_DOWN = 15


class Place(NamedTuple):
    """Where a service is to run."""

    hosts: Mapping[str, Host]
    # These are the hosts of workers.
    workers: tuple[str, ...]
    # A folder that all hosts see.
    logs: Path
    # What `~/.ssh/config` has on all hosts, beside what each of them needs.
    ssh: str


class Service(NamedTuple):
    """A service: why it cannot be had here, how it starts, and which of its processes come and go."""

    lacking: Callable[[], str]
    start: Callable[[Place], Mapping[str, str]]
    own: str = "$."


def _absent(programs: Mapping[str, str]) -> str:
    found = [f"there is no {name}: apt install {package}" for name, package in programs.items()]
    return next((text for text, name in zip(found, programs) if shutil.which(name) is None), "")


def _start(
    host: Host, words: list[str], log: Path, variables: Mapping[str, str] = _NONE
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return host.start(words, {"PYTHONPATH": os.pathsep.join(PATH), **variables}, output)


def _await(process: subprocess.Popen[bytes], log: Path, text: str) -> None:
    until(lambda: text.encode() in log.read_bytes() or process.poll() is not None, STARTING)
    assert process.poll() is None, log.read_text(encoding="utf-8")


def _start_nothing(place: Place) -> Mapping[str, str]:
    return {}


# -- sshd ----------------------------------------------------------------------------------------------------


def _sshd_lacks() -> str:
    return _absent({_SSHD: "openssh-server", "ssh": "openssh-client"})


def _start_sshd(place: Place) -> Mapping[str, str]:
    """Start an sshd on each host, at port 22. Each host lets the others in."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    keys = place.logs / "ssh"
    keys.mkdir()
    keys.chmod(0o700)
    for name in ("id", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    for name, host in place.hosts.items():
        home, folder = f"{host.home}/.ssh", f"{host.home}/bin"
        words = f"PYTHONPATH='{os.pathsep.join(PATH)}' OMP_NUM_THREADS=1 exec {sys.executable}"
        (keys / name).write_text(
            f"HostKey {keys}/host\nPidFile none\nAuthorizedKeysFile {keys}/id.pub\n"
            "StrictModes no\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"SetEnv TMPDIR={host.temporary} PATH={folder}:/usr/local/bin:/usr/bin:/bin\n",
            encoding="utf-8",
        )
        host.do(
            f"mkdir -m 700 {home} {folder} && cp {keys}/id {home}/id_ed25519\n"
            f"printf '* ' | cat - {keys}/host.pub > {home}/known_hosts\n"
            f"printf %s '{place.ssh}' > {home}/config\n"
            f'printf \'#!/bin/sh\\n%s "$@"\\n\' "{words}" > {folder}/python3 && chmod 755 {folder}/python3\n'
        )
        log = place.logs / f"sshd-{name}.log"
        _await(_start(host, [_SSHD, "-D", "-e", "-f", str(keys / name)], log), log, "Server listening")
    return {}


# -- Slurm ---------------------------------------------------------------------------------------------------


def _slurm_lacks() -> str:
    programs = {"slurmctld": "slurmctld", "slurmd": "slurmd", "salloc": "slurm-client", "munged": "munge"}
    return _absent(programs)


def _start_slurm(place: Place) -> Mapping[str, str]:
    """Start the controller on the master's host, and a node on each worker's."""
    config, key = place.logs / "slurm.conf", place.logs / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    own = f"{place.hosts[MASTER].temporary}/../slurm"
    nodes = ",".join(place.workers)
    text = configuration(
        own,
        place.logs,
        SlurmctldHost=MASTER,
        SlurmdTimeout=_NODE_DOWN,
        NodeName=f"{nodes} CPUs=2 State=UNKNOWN",
        PartitionName=f"all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP",
    )
    config.write_text(text, encoding="utf-8")
    # Its hosts share the user's folder, as Slurm's do.
    variables = {"SLURM_CONF": str(config), **_shared(place)}
    options = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={own}/munge.{name}" for option, name in options.items()]
    for name in (MASTER, *place.workers):
        host = place.hosts[name]
        host.do(f"mkdir -m 711 {own} && mkdir {own}/state {own}/spool")
        _start(host, ["munged", *_MUNGE, f"--key-file={key}", *munge], place.logs / f"munged-{name}.log")
        host.do(f"for k in $(seq 300); do [ -S {own}/munge.socket ] && exit; sleep 0.1; done; exit 1")
    daemons = {
        name: ["slurmctld", "-D", "-c"] if name == MASTER else ["slurmd", "-D"] for name in place.hosts
    }
    for name, words in daemons.items():
        _start(place.hosts[name], words, place.logs / f"{words[0]}-{name}.out", variables)
    asked = f"SLURM_CONF={config} sinfo -h -r -t idle -o %D || true"
    until(lambda: place.hosts[MASTER].do(asked).strip() == str(len(place.workers)), STARTING)
    return variables


# -- Ray -----------------------------------------------------------------------------------------------------


def _ray_lacks() -> str:
    return "" if importlib.util.find_spec("ray") else "there is no Ray: pip install ray"


def _start_ray(place: Place) -> Mapping[str, str]:
    """Start Ray's head on the master's host, and a node with one core on each worker's."""
    common = ["--disable-usage-stats", "--object-store-memory=80000000", "--block"]
    for name in (MASTER, *place.workers):
        host = place.hosts[name]
        head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        head += [f"--temp-dir={host.home}/ray"]
        words = head if name == MASTER else [f"--address={MASTER}:6379", "--num-cpus=1"]
        log = place.logs / f"ray-{name}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
        # Ray's workers are nice to all others otherwise, and others may be busy here.
        _await(_start(host, command, log, {"RAY_worker_niceness": "0"}), log, "Ray runtime started")
    return {"RAY_ADDRESS": f"{MASTER}:6379", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


# -- MPI -----------------------------------------------------------------------------------------------------


def _mpi_lacks() -> str:
    why = _absent({"mpirun": "openmpi-bin"})
    if why:
        return why
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "" if "Open MPI" in said else "the mpirun here is not Open MPI's"


def _shared(place: Place) -> Mapping[str, str]:
    """Return the variable that gives all hosts one folder for what programs keep."""
    return {"DISTRUNTIME_STATE": str(place.logs / "shared")}


def _mpi4py_lacks() -> str:
    return "" if importlib.util.find_spec("mpi4py") else "there is no mpi4py: pip install mpi4py"


# -- clocks --------------------------------------------------------------------------------------------------


def _clock_lacks() -> str:
    return _absent({"cc": "gcc"})


def _start_clock(place: Place) -> Mapping[str, str]:
    """Give each host a calendar clock of its own, which all of its processes read that get the variable."""
    library = place.logs / "moved_clock.so"
    words = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_CLOCK), "-ldl"]
    subprocess.run(words, check=True)
    for host in place.hosts.values():
        host.do(f"head -c 24 /dev/zero > {host.home}/clock")
        set_clock(host, 3600.0, 0.0)
        shown = f"HOME={host.home} LD_PRELOAD={library} date +%s"
        ahead = int(host.do(shown)) - time.time()
        assert abs(ahead - 3600) < 60, (
            f"the clock of {host.name} was to be an hour ahead, and is {ahead:.0f} s"
        )
        set_clock(host, 0.0, 0.0)
    return {"LD_PRELOAD": str(library)}


def set_clock(host: Host, ahead: float, gains: float) -> None:
    """Set how many seconds the clock of a host is ahead, and which part of the time it gains from now on."""
    numbers = struct.pack("qqq", round(ahead * 1e9), round(gains * 1e6), time.time_ns())
    text = "".join(f"\\{byte:03o}" for byte in numbers)
    # The processes see this file: another in its place is of no use.
    host.do(f"printf '{text}' | dd of={host.home}/clock conv=notrunc status=none")


SERVICES = {
    "sshd": Service(_sshd_lacks, _start_sshd),
    "slurm": Service(_slurm_lacks, _start_slurm),
    "ray": Service(_ray_lacks, _start_ray, own=r"^ray::|/ray/"),
    "mpirun": Service(_mpi_lacks, _shared),
    "clock": Service(_clock_lacks, _start_clock),
    "mpi4py": Service(_mpi4py_lacks, _start_nothing),
}


def lacking(names: tuple[str, ...]) -> str:
    """Return why one of these services cannot be had here, or nothing."""
    return next((why for name in names if (why := SERVICES[name].lacking())), "")


def is_own(names: tuple[str, ...], command: str) -> bool:
    """Whether a process belongs to one of these services, which starts and ends some as it likes."""
    return any(re.search(SERVICES[name].own, command) for name in names)
