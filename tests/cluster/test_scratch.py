"""What killed processes leave in the temporary folder goes with the next start of a session or a worker, and
what killed workers leave goes with the end of their session.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.cluster import named_sessions
from distruntime.cluster.nursery import _nurseries
from distruntime.launching.ray_actors import Host
from distruntime.launching.ssh_address import SshAddress
from distruntime.launching.ssh_connection import SshConnection
from distruntime.session.session import active_session
from distruntime.wire.keys import KeyPair
from distruntime.wire.scratch import _base, sweep
from distruntime_worker.python.agent import Agent
from distruntime_worker.python.children import Surroundings
from processes import ROOT, STARTING, Child, ListeningWorker, until

if sys.platform != "linux":
    pytest.skip("which start of the machine a folder is of is known on Linux only", allow_module_level=True)

SCRIPT = """
import signal
print("it runs", flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, this process's, too. That of a test has too long a path for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        if _base("session") != folder:
            pytest.skip(f"{folder} has too long a path for sockets, so they lie elsewhere")
        yield Path(folder)


def left(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.glob("distruntime-*"))


def kinds(temporary: Path) -> set[str]:
    return {name.split("-")[1] for name in left(temporary)}


def at(folder: str) -> None:
    """Let this process, and those that it starts, have their temporary files there."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def start_of_a_worker(temporary: Path, folder: Path) -> None:
    ListeningWorker(folder, "--listen", "tcp://127.0.0.1:0", "--insecure", TMPDIR=str(temporary)).stop()


def swept(temporary: Path) -> None:
    """Sweep until nothing is left: what was killed may take a moment to end."""

    def gone() -> bool:
        sweep()
        return not left(temporary)

    until(gone)


def master(folder: str, package: str) -> None:
    """Have a session and workers that have made folders of all kinds, and wait to be killed."""
    at(folder)
    sys.path.insert(0, package)
    dr.init_master_worker(world_size=2, data_channel="tcp", quiet=True)
    # The workers make the folders for the sockets of data channels.
    x = torch.ones(3, device=dr.place(0))
    print(x.to(dr.place(1)).sum().item())
    dr.workers.ship(importlib.import_module("shipped_here"))
    for node in active_session().nodes:
        print(node.welcome.pid)
    print("ready", flush=True)
    signal.pause()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    made = tmp_path / "packages" / "shipped_here"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text("answer = 1\n", encoding="utf-8")
    return made.parent


def killed(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    assert child.gone(60)


def test_of_a_killed_master(temporary: Path, tmp_path: Path, package: Path) -> None:
    with Child(master, str(temporary), str(package)) as child:
        assert child.line(STARTING) == "3.0"
        workers = [int(child.line()) for _ in range(2)]
        assert child.line() == "ready"
        before = left(temporary)
        assert kinds(temporary) == {"session", "data", "code"}
        # What lives keeps all of it.
        sweep()
        assert left(temporary) == before
        killed(child)
    until(lambda: all(map(ended, workers)))
    assert kinds(temporary) >= {"session"}
    start_of_a_worker(temporary, tmp_path)
    assert left(temporary) == []


def test_of_killed_workers(temporary: Path, package: Path) -> None:
    with Child(master, str(temporary), str(package)) as child:
        assert child.line(STARTING) == "3.0"
        for _ in range(2):
            os.kill(int(child.line()), signal.SIGKILL)
        assert child.line() == "ready"

        def gone() -> bool:
            sweep()
            return kinds(temporary) == {"session"}

        # The master lives, and its folder stays.
        until(gone)
        killed(child)
    swept(temporary)


def outlived(folder: str, package: str) -> None:
    """Have a worker make a folder, kill it, and end the session."""
    at(folder)
    sys.path.insert(0, package)
    dr.init_master_worker(world_size=1, quiet=True)
    dr.workers.ship(importlib.import_module("shipped_here"))
    print("before", sorted(kinds(Path(folder))), flush=True)
    os.kill(active_session().nodes[0].welcome.pid, signal.SIGKILL)
    dr.shutdown()
    print("after", left(Path(folder)), flush=True)


def test_the_end_of_a_session_removes_what_a_killed_worker_has_left(temporary: Path, package: Path) -> None:
    with Child(outlived, str(temporary), str(package)) as child:
        assert child.expect("before", STARTING) == "['code', 'session']"
        assert child.expect("after") == "[]"


def nursery(folder: str) -> None:
    """Say which process forks this one's workers, and wait to be killed."""
    at(folder)
    dr.init_master_worker(world_size=1, quiet=True)
    print(_nurseries[0].pid, flush=True)
    signal.pause()


def test_of_a_killed_nursery(temporary: Path) -> None:
    with Child(nursery, str(temporary)) as child:
        os.kill(int(child.line(STARTING)), signal.SIGKILL)
        sweep()
        # The master has the folder, and not its nursery.
        assert kinds(temporary) == {"session"}
        killed(child)
    swept(temporary)


@pytest.mark.slow(reason="starts torchrun's ranks, 7 s")
def test_of_a_killed_run(temporary: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "-m", "distruntime", "run", "--nproc-per-node", "1", str(script)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=tmp_path) as run:
        try:
            assert run.stdout is not None
            assert any(b"it runs" in line for line in run.stdout)
            sweep()
            # The ranks' logs have a folder of their own, which their worker holds.
            assert kinds(temporary) == {"session", "run"}
        finally:
            run.kill()
    swept(temporary)


def files_of_a_run(folder: str) -> None:
    """Unpack the files of a run, as a worker does that does not see them, and wait to be killed."""
    at(folder)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        files.add(__file__, "train.py")
    agent = Agent(Surroundings(lambda device: device, str, nullcontext, lambda: False))
    print(os.listdir(agent.unpack(packed.getvalue())), flush=True)
    signal.pause()


def test_of_a_killed_worker_of_a_run(temporary: Path) -> None:
    with Child(files_of_a_run, str(temporary)) as child:
        assert child.line(STARTING) == "['train.py']"
        sweep()
        assert kinds(temporary) == {"run"}
        killed(child)
    swept(temporary)


def lasting(folder: str) -> None:
    """Begin a session with a name, and wait to be killed."""
    at(folder)
    dr.init_master_worker(world_size=1, session="stays", quiet=True)
    print(active_session().nodes[0].welcome.pid, flush=True)
    signal.pause()


def test_of_a_named_session_once_its_workers_have_died_too(own_state: None, temporary: Path) -> None:
    with Child(lasting, str(temporary)) as child:
        worker = int(child.line(STARTING))
        killed(child)
    sweep()
    assert kinds(temporary) == {"session"}
    os.kill(worker, signal.SIGKILL)
    swept(temporary)
    named_sessions.delete("stays")


def test_the_start_of_a_session_sweeps(fresh_session: Callable[..., Any], temporary: Path) -> None:
    with Child(master_alone, str(temporary)) as child:
        child.line(STARTING)
        killed(child)
    (before,) = left(temporary)
    fresh_session(world_size=1)
    assert before not in left(temporary)
    assert kinds(temporary) == {"session"}
    dr.shutdown()
    assert left(temporary) == []


def master_alone(folder: str) -> None:
    """Begin a session, and wait to be killed."""
    at(folder)
    dr.init_master_worker(world_size=1, quiet=True)
    print("ready", flush=True)
    signal.pause()


def actor(folder: str) -> None:
    """Be an actor of Ray's, and wait to be killed."""
    at(folder)
    host = Host(["--master", f"ipc://{folder}/nobody", "--insecure"], {}, b"")
    print(host.pid(), flush=True)
    signal.pause()


def test_of_a_killed_actor(temporary: Path) -> None:
    with Child(actor, str(temporary)) as child:
        child.line(STARTING)
        sweep()
        assert kinds(temporary) == {"ray"}
        killed(child)
    swept(temporary)


def test_of_a_killed_agent_of_ssh(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard and its worker own the folder, too."""
    programs = tmp_path / "bin"
    programs.mkdir()
    # No sshd is needed: this machine is the other end.
    (programs / "ssh").write_text("#!/bin/sh\nexec sh\n", encoding="utf-8")
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "worker")]))
    keys = KeyPair.generate()
    connection = SshConnection(SshAddress.parse("ssh://box"), tmp_path / "s", tmp_path / "errors", 10.0)
    try:
        connection.become_agent(sys.executable, float("inf"), lambda: True)
        # The agent's Python would read a request too early that comes before it says hello.
        assert "hello" in next(told(connection))
        connection.ask(
            do="start",
            name="",
            must_run=False,
            address="",
            arguments=["--once", "--key", "-", "--threads", "1"],
            environment={"OMP_NUM_THREADS": "1"},
            key=f"{keys.public.decode()} {keys.secret.decode()}",
        )
        said = list(told(connection))
        worker = said[-1]["pid"]
        guard = int(Path(f"/proc/{worker}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        assert said[0]["started"].startswith(f"{temporary}/distruntime-ssh-")
        for pid in (connection.process.pid, guard):
            os.kill(pid, signal.SIGKILL)
            until(partial(ended, pid))
            sweep()
            assert kinds(temporary) == {"ssh"}
        os.kill(worker, signal.SIGKILL)
    finally:
        connection.close()
    swept(temporary)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def told(connection: SshConnection) -> Iterator[dict[str, Any]]:
    for line in connection.lines(None, lambda: True):
        said = json.loads(line)
        assert "ended" not in said, said
        if "log" not in said:
            yield said
        if "port" in said:
            return
