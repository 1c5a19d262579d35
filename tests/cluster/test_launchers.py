"""The plug point for who starts workers: what a launcher gets, and the suite for one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.cluster.local_workers import LocalLauncher
from distruntime.testing import check_launcher
from distruntime.wire.keys import KeyPair
from processes import PATH, free_port, until

REMOTE = "remote"


class ShellWorker(dr.workers.WorkerProcess):
    """A process group: a shell, and the worker below it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"the shell says {code}"

    def last_lines(self, count: int = 20) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-count:])

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def stop(self, timeout: float = 5.0) -> None:
        self.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def leave(self) -> None:
        """A shell needs nobody."""

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


class ShellLauncher(dr.workers.Launcher):
    """Starts workers below a shell, which hands signals on by being in one group with them."""

    def __init__(self) -> None:
        self.specs: list[dr.workers.LaunchSpec] = []
        self.started: list[ShellWorker] = []

    def start(self, spec: dr.workers.LaunchSpec) -> ShellWorker:
        self.specs.append(spec)
        log = spec.directory / f"shell-{len(self.specs)}.log"
        environment = {**os.environ, **spec.environment, "PYTHONPATH": os.pathsep.join(PATH)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    "sh",
                    "-c",
                    '"$@"; exit $?',
                    "sh",
                    sys.executable,
                    "-m",
                    "distruntime_worker",
                    *spec.arguments(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.started.append(ShellWorker(process, log))
        return self.started[-1]


@pytest.fixture(autouse=True)
def _own_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    dr.shutdown()
    yield
    dr.shutdown()


@pytest.fixture
def shells() -> Iterator[ShellLauncher]:
    launcher = ShellLauncher()
    yield launcher
    # A session that restarts its workers would start others for those that stop here.
    dr.shutdown()
    for worker in launcher.started:
        worker.stop(0.0)


@pytest.mark.timeout(400)
@pytest.mark.slow(reason="starts workers by all ways that a launcher has, 3 s")
def test_the_embedded_launcher_passes() -> None:
    check_launcher(LocalLauncher(), timeout=90)


@pytest.mark.timeout(400)
@pytest.mark.slow(reason="starts workers by all ways that a launcher has, 6 s")
def test_a_launcher_of_ones_own_passes(shells: ShellLauncher) -> None:
    check_launcher(shells, timeout=90)
    assert [spec.node for spec in shells.specs] == [0, 1, 1, 1, 0, 1]
    assert [bool(spec.listen) for spec in shells.specs] == [False] * 4 + [True] * 2


@pytest.mark.timeout(400)
def test_workers_at_a_port_get_the_key(shells: ShellLauncher, tmp_path: Path) -> None:
    key = tmp_path / "key"
    KeyPair.generate().save(key)
    options: dict[str, Any] = dict(world_size=2, listen="tcp://127.0.0.1:0", key=key, timeout=90)
    dr.init_master_worker(launcher=shells, restart_workers=True, simulate_cuda=1, **options)
    assert {spec.master for spec in shells.specs} == {dr.nodes()[0].address}
    for spec in shells.specs:
        assert (
            spec.key == key
            and str(key) in spec.arguments()
            and "elsewhere" in spec.arguments(Path("elsewhere"))
        )
    assert [len(node.devices) for node in dr.nodes()] == [2, 2]
    os.killpg(shells.started[1].pid, signal.SIGKILL)
    until(lambda: len(shells.started) == 3 and dr.nodes()[1].state == "ready", 90)
    assert torch.ones(3, device=REMOTE).to(node=1).sum().item() == 3


@pytest.mark.timeout(400)
@pytest.mark.slow(reason="workers are waited for before the launcher starts them: 15.8 s")
def test_auto_starts_the_workers_that_have_died_since(
    shells: ShellLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = dict(
        world_size=2, listen=f"tcp://127.0.0.1:{free_port()}", session="day", resume="auto", insecure=True
    )
    dr.init_master_worker(launcher=shells, timeout=90, **options)
    dr.publish("x", torch.full((2,), 3.0, device=REMOTE))
    pids = [node.pid for node in dr.nodes()]
    dr.detach()
    os.killpg(shells.started[1].pid, signal.SIGKILL)
    dr.init_master_worker(launcher=shells, timeout=90, **options)
    assert dr.nodes()[0].pid == pids[0] and dr.lookup("x").tolist() == [3, 3]
    assert [spec.node for spec in shells.specs] == [0, 1, 1]
    assert "node 1 of session 'day' has not dialled within 5 s. A new worker starts" in caplog.text
    dr.detach()
    for worker in shells.started:
        worker.stop(0.0)
    dr.init_master_worker(launcher=shells, timeout=90, **options)
    assert [spec.node for spec in shells.specs] == [0, 1, 1, 0, 1]
    assert torch.ones(2, device=REMOTE).to(node=1).tolist() == [1, 1]  # type: ignore[call-overload]


class Deaf(ShellWorker):
    def poll(self) -> str | None:
        return None


class Immortal(ShellWorker):
    def stop(self, timeout: float = 5.0) -> None:
        """Leave it as it is."""


class Numberless(ShellWorker):
    @property
    def pid(self) -> int:
        return "7"  # type: ignore[return-value]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Deaf, r"after stop\(0.0\) poll\(\) says how the worker has ended, got None"),
        (Immortal, r"after stop\(0.0\) poll\(\) says how"),
        (Numberless, "pid is an int, got '7'"),
    ],
)
def test_what_is_wrong_with_a_launcher_is_said(
    shells: ShellLauncher, kind: type[ShellWorker], said: str
) -> None:
    class Wrong(dr.workers.Launcher):
        def start(self, spec: dr.workers.LaunchSpec) -> dr.workers.WorkerProcess:
            right = shells.start(spec)
            return kind(right.process, right.log)

    with pytest.raises(AssertionError, match=said):
        check_launcher(Wrong(), timeout=90)


@pytest.mark.timeout(400)
def test_a_worker_that_ends_at_once_is_quoted(shells: ShellLauncher) -> None:
    class Broken(ShellLauncher):
        def start(self, spec: dr.workers.LaunchSpec) -> ShellWorker:
            log = spec.directory / "broken.log"
            with log.open("wb") as output:
                process = subprocess.Popen(["sh", "-c", "echo no such partition; exit 3"], stdout=output)
            return ShellWorker(process, log)

    with pytest.raises(
        dr.errors.ConnectionFailed, match=r"worker 0 ended before it was ready \(the shell says 3\)"
    ) as caught:
        dr.init_master_worker(world_size=1, launcher=Broken(), timeout=90)
    assert "no such partition" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"launcher": ShellLauncher}, "launcher is a distruntime.workers.Launcher, got"),
        ({"launcher": LocalLauncher(), "workers": ["tcp://127.0.0.1:1"]}, "launcher= starts workers"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dr.errors.ConfigurationError, match=said):
        dr.init_master_worker(**options)


@pytest.mark.slow(reason="starts workers by a launcher, 3 s")
def test_a_check_needs_to_be_alone(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1)
    with pytest.raises(dr.errors.UsageError, match="end the open one first"):
        check_launcher(LocalLauncher())
