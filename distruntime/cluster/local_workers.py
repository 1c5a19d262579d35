"""Workers on this machine: they end with this process, or with the named session that they are for.

Also where their logs go, and how long these stay.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import final

from ..launching.programs import ProcessWorker, how_ended
from ..session.launcher import Launcher, LaunchSpec
from ..wire.deadlines import UNREACHABLE
from ..wire.descriptors import naming
from ..wire.keys import KeyPair
from .named_sessions import folder, names
from .nursery import NOBODY_KNOWS, ForkedWorker, begin_nursery, fork_worker

# So many folders stay, besides those of sessions that may still run.
_KEPT = 50


def log_folder(session: str, directory: Path) -> Path | None:
    """Return the folder for the logs of a session, after removing old ones; None where none can be made.

    `directory` is the session's own. Its name tells sessions apart that have one name, one after the other.
    """
    logs = folder() / "logs"
    made = logs / f"{session}-{directory.name.rpartition('-')[2]}"
    try:
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(logs, made)
    except OSError:
        # The user has no directory that can be written. Then the logs go with the session.
        return None
    return made if os.access(made, os.W_OK) else None


def _remove_old(logs: Path, made: Path) -> None:
    found: list[tuple[float, Path]] = []
    for path in logs.iterdir():
        # Another master of this user's may be removing it at the same time.
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    noted = set(names())
    for _, path in sorted(found, reverse=True)[_KEPT:]:
        if path != made and path.name.rpartition("-")[0] not in noted and not _runs(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _runs(session: str) -> bool:
    """Whether the process that began a session without a name may still be there: its name begins with it."""
    pid = session.partition("-")[0]
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# Fresh pages, not the socket, are what large messages cost: 64 MiB over loopback went from 1.1 to 4.0 GiB/s
# with the three together.
_MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483648:glibc.malloc.arena_max=1"

# The drivers of GPUs have these devices: NVIDIA's, AMD's, and the one of Windows' own Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")

_Process = subprocess.Popen[bytes] | ForkedWorker

_left: list[_Process] = []


@final
class LocalWorker(ProcessWorker):
    """A worker process that this process started. Its output goes to `log`."""

    _process: _Process

    def __init__(self, node: int, process: _Process, log: Path) -> None:
        super().__init__(process, log)
        self.node = node

    def poll(self) -> str | None:
        """Return how the process ended ("killed by signal 9 (SIGKILL)"), or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code == NOBODY_KNOWS:
            return "ended, and nobody knows how: the process that forked it had ended before"
        return how_ended(code)

    def terminate(self) -> None:
        """Ask the process to end, and close its standard input. Return at once."""
        super().terminate()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def leave(self) -> None:
        """Let the process run on, with the session that it is for."""
        _left[:] = [process for process in _left if process.poll() is None]
        # Python warns if nobody waits for a process.
        _left.append(self._process)

    def __repr__(self) -> str:
        ended = "" if self._process.returncode is None else ", ended"
        return f"<LocalWorker node {self.node}, pid {self.pid}{ended}>"


@final
class LocalLauncher(Launcher):
    """Starts workers as processes of this machine.

    A worker that dials this process ends with it, in any case.
    """

    def start(self, spec: LaunchSpec) -> LocalWorker:
        """Start a worker."""
        directory = spec.logs or spec.directory
        if not spec.simulate_cuda and spec.workers > 1 and _must_import_torch():
            # This process and the one that forks workers then import it side by side.
            with _log(directory, spec.node).open("ab") as output:
                begin_nursery(worker_environment(spec.threads), output)
        return start_worker(
            spec.node,
            master=spec.master,
            listen=spec.listen,
            key=None if spec.key is None else KeyPair.load(spec.key),
            threads=spec.threads,
            simulate_cuda=spec.simulate_cuda,
            directory=directory,
            unreachable=float(spec.environment[UNREACHABLE.variable]),
            variables=share_of_gpus(spec.node, spec.workers, os.environ) if not spec.simulate_cuda else {},
        )


def expect_workers() -> None:
    """Start the process that will fork this process's workers. Return at once.

    It and this process import torch side by side then, where the worker would be two seconds later.
    """
    # A process that cannot begin is started again by the first worker, with a log.
    with Path(os.devnull).open("ab") as nothing:
        begin_nursery(worker_environment(1), nothing)


def start_worker(
    node: int,
    *,
    master: str = "",
    listen: str = "",
    key: KeyPair | None = None,
    threads: int,
    simulate_cuda: int = 0,
    directory: Path,
    unreachable: float | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    fork: bool = True,
) -> LocalWorker:
    """Start a worker. Return at once.

    To import torch takes about two seconds, which forked workers spend once for all.

    Args:
        master: what it dials: then it ends with this process, however that ends.
        listen: where it waits for masters instead: then it ends with its last session.
        key: what it proves itself with; it travels over stdin.
        threads: of torch's kernels.
        directory: where its output goes, worker-K.log; what was there stays in front of it.
        unreachable: seconds of silence after which it gives a connection up.
        variables: what its environment has beside this process's.
        fork: whether to fork it from a process that has imported torch, where that is possible.
    """
    environment = {**worker_environment(threads), **variables}
    if unreachable is not None:
        environment[UNREACHABLE.variable] = str(unreachable)
    log = _log(directory, node)
    arguments = ["--threads", str(threads), "--simulate-cuda", str(simulate_cuda)]
    if listen:
        arguments += ["--listen", listen, "--once"]
    else:
        arguments += ["--master", master, "--node", str(node), "--local", str(os.getpid())]
    with naming(f"no worker can be started for node {node}"), log.open("ab") as output:
        process: _Process | None = None
        if fork:
            process = fork_worker(arguments, environment, output, piped=not listen)
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "distruntime_worker", *arguments],
                bufsize=0,
                stdin=subprocess.DEVNULL if listen else subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the master's terminal is the master's alone.
                start_new_session=True,
            )
    worker = LocalWorker(node, process, log)
    if not listen:
        _hand_over(key, process)
    return worker


def _log(directory: Path, node: int) -> Path:
    return directory / f"worker-{node}.log"


def _hand_over(key: KeyPair | None, process: _Process) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write((key.public + b" " + key.secret if key else b"") + b"\n")
    except BrokenPipeError:
        # The process has ended already: poll() and last_lines() tell why.
        pass


def share_of_gpus(worker: int, workers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that leaves one of this machine's workers its share of the GPUs: every n-th.

    NCCL refuses two ranks on one card, and "remote" of every worker would be the first card. Where there are
    fewer GPUs than workers, these share them all.
    """
    if workers < 2 or not (_has_torch() or _must_import_torch()):
        return {}
    # `distruntime launch` has not imported it. The import takes two seconds.
    torch = importlib.import_module("torch")
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    # This count needs no context on the cards.
    count: int = torch.cuda.device_count()
    if count < workers:
        return {}
    named = [name.strip() for name in environment.get(variable, "").split(",") if name.strip()]
    cards = named[:count] if named else [str(k) for k in range(count)]
    # A worker that came to the session later has a number beyond them.
    return {variable: ",".join(cards[worker % workers :: workers])}


def _has_torch() -> bool:
    return "torch" in sys.modules


def _must_import_torch() -> bool:
    """Whether only torch can tell how many GPUs are here: a driver has put its device there."""
    return not _has_torch() and any(Path(device).exists() for device in _DRIVERS)


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker of this machine that has so many threads for its kernels."""
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = str(threads)
    # A crash in a kernel then leaves its Python stack in the log.
    environment["PYTHONFAULTHANDLER"] = "1"
    # A master sets it where a device from outside of torch is installed (see backend/install.py), which is
    # what its workers are there for.
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = [path for path in _import_paths() if path not in installed]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    tunables = environment.get("GLIBC_TUNABLES", "")
    # Settings of the user's stay as they are.
    if platform.libc_ver()[0] == "glibc" and "glibc.malloc." not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_MALLOC}" if tunables else _MALLOC
    return environment


def _import_paths() -> list[str]:
    """Return where both packages are found, so that workers run from a checkout as well."""
    here = Path(__file__).resolve().parents[2]
    # The package is found and not imported: the master's side never runs the worker's.
    spec = importlib.util.find_spec("distruntime_worker")
    found = (
        [Path(folder).parent for folder in spec.submodule_search_locations or ()]
        if spec
        else [here / "worker"]
    )
    return list(dict.fromkeys(map(str, [here, *found])))
