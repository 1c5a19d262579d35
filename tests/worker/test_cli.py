"""The worker's command line: what it takes, what it refuses, how it stops."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from distruntime.wire.channel import Channel
from distruntime.wire.keys import KeyPair, default_path
from distruntime_worker import cli
from distruntime_worker.session import daemon
from distruntime_worker.session.config import WorkerConfig
from fewer import fewer
from processes import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRUNTIME_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerConfig]]:
    """What main() would serve, without serving it; the signal handlers are as before afterwards."""
    configs: list[WorkerConfig] = []

    def serve(config: WorkerConfig, stop: threading.Event) -> None:
        configs.append(config)

    monkeypatch.setattr(daemon, "serve", serve)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield configs
    for number, handler in before.items():
        signal.signal(number, handler)


Worker = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Starts workers that the test need not end."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, program: Sequence[str] = ("-m", "distruntime_worker")
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "error", *program, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_options_become_the_config(served: list[WorkerConfig], tmp_path: Path) -> None:
    KeyPair.generate().save(tmp_path / "key")
    arguments = (
        "--master tcp://gpu1:29400 --node 3 --devices cpu,cuda:0 --simulate-cuda 2 "
        "--threads 4 --log-level error --no-functions"
    )
    assert cli.main([*arguments.split(), "--key", str(tmp_path / "key")]) == 0
    assert served == [
        WorkerConfig(
            master="tcp://gpu1:29400",
            node=3,
            devices=("cpu", "cuda:0"),
            simulate_cuda=2,
            threads=4,
            keys=KeyPair.load(tmp_path / "key"),
            functions=False,
        )
    ]


def test_a_loopback_worker_makes_the_key_that_its_master_finds(served: list[WorkerConfig]) -> None:
    assert cli.main(["--listen", "tcp://127.0.0.1:0"]) == 0
    assert served == [WorkerConfig(listen="tcp://127.0.0.1:0", keys=KeyPair.load(default_path()))]


@pytest.mark.parametrize("where", ["--listen", "--master"])
@pytest.mark.parametrize("address", ["tcp://*:29400", "tcp://0.0.0.0:29400", "tcp://gpu1:29400"])
def test_beyond_this_machine_it_takes_a_key_or_the_word_insecure(
    served: list[WorkerConfig],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    where: str,
    address: str,
) -> None:
    assert cli.main([where, address]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("distruntime-worker: got tcp://")
        and "keygen" in error
        and "--insecure" in error
        and not served
    )
    assert cli.main([where, address, "--insecure"]) == 0
    assert [config.keys for config in served] == [None]
    assert "may run code" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--listen gpu1:29400", "expected tcp://host:port"),
        ("--listen tcp://127.0.0.1:0 --node 1", "Leave --node out"),
        ("--listen tcp://127.0.0.1:0 --key /nonexistent/key", "keygen"),
        ("--listen tcp://127.0.0.1:0 --key x --insecure", "Leave one out"),
        ("--listen ipc:///tmp/s --data-address 127.0.0.1:29500", "Leave the port out"),
    ],
)
def test_what_it_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], served: list[WorkerConfig], arguments: str, says: str
) -> None:
    assert cli.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "Traceback" not in error and not served


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--listen a --master b",
        "--listen x --threads -1",
        "--listen x --simulate-cuda many",
        "--listen x --log-level loud",
        "--listen x --devices ,",
        "--list x",
    ],
)
def test_what_argparse_refuses(
    capsys: pytest.CaptureFixture[str], served: list[WorkerConfig], arguments: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments.split())
    assert exit_.value.code == 2 and "usage: distruntime-worker" in capsys.readouterr().err and not served


def test_help_names_every_option_and_keygen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert exit_.value.code == 0
    assert argparse.SUPPRESS not in shown and "--local" not in shown
    words = "--listen --master --node --devices --simulate-cuda --key --insecure --threads --log-level keygen"
    for word in words.split():
        assert word in shown


def test_keygen_writes_the_default_key_or_the_file_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["keygen"]) == 0
    assert str(default_path()) in capsys.readouterr().out
    assert cli.main(["keygen", str(tmp_path / "other")]) == 0
    assert KeyPair.load(tmp_path / "other") != KeyPair.load(default_path())
    assert cli.main(["keygen"]) == 2
    assert "never overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("number", fewer([signal.SIGTERM, signal.SIGINT], 2, "another signal, 3 s"))
def test_a_signal_stops_it_with_code_0_and_no_traceback(
    worker: Worker, tmp_path: Path, number: signal.Signals
) -> None:
    process = worker("--listen", f"ipc://{tmp_path}/s")
    until(lambda: (tmp_path / "s").exists())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors and "listening on ipc://" in errors
    why = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
    assert errors.splitlines()[-1].endswith(f"INFO distruntime.worker: stopped: {why}")


class Stop(threading.Event):
    """What a worker's handlers of signals set. Each time, another SIGTERM comes within."""

    sets = 0

    def set(self) -> None:
        self.sets += 1
        # The real one has a lock, which a thread cannot take twice.
        if self.sets == 1:
            signal.raise_signal(signal.SIGTERM)
        super().set()


@pytest.fixture
def asked() -> Iterator[tuple[Stop, list[str]]]:
    """What a worker's handlers of signals say, in this process. Afterwards the handlers are as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop, reasons = Stop(), list[str]()
    cli._stop_on_signals(stop, reasons)
    yield stop, reasons
    for number, handler in before.items():
        signal.signal(number, handler)


def test_another_sigterm_does_not_kill_a_worker_that_is_ending(asked: tuple[Stop, list[str]]) -> None:
    """A launcher asks all of its workers to end, and then each while it waits for it."""
    stop, reasons = asked
    signal.raise_signal(signal.SIGTERM)
    assert stop.is_set() and stop.sets == 1
    # The default would end this process.
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM)
    assert reasons == ["SIGTERM"] * 3 and stop.sets == 1


def test_the_second_ctrl_c_ends_a_worker_that_hangs(asked: tuple[Stop, list[str]]) -> None:
    stop, reasons = asked
    signal.raise_signal(signal.SIGINT)
    assert stop.is_set() and reasons[0] == "Ctrl-C (SIGINT)"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


# Nothing here holds this module's names but the module: what is written to `kept` comes out when Python takes
# the module apart.
_ENDING = """
import atexit, operator, runpy, sys
from distruntime_worker.session import daemon

kept = open(1, "w", closefd=False)
kept.write("taken apart")
atexit.register(print, "at exit")
daemon.serve = operator.is_
sys.argv[1:] = ["--listen", "ipc:///nowhere", "--insecure", "--log-level", "error"]
runpy.run_module("distruntime_worker", run_name="__main__")
"""


def test_the_interpreter_is_not_taken_apart_around_running_threads(worker: Worker) -> None:
    """A thread that comes out of a kernel, or is gloo's, would end the process by SIGABRT then."""
    process = worker(program=("-c", _ENDING))
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "at exit\n"), errors


def test_an_address_in_use_is_one_line(worker: Worker) -> None:
    taken = Channel(listen="tcp://127.0.0.1:*")
    try:
        process = worker("--listen", taken.address)
        _, errors = process.communicate(timeout=60)
    finally:
        taken.close()
    words = "another program listens there already"
    assert process.returncode == 2 and words in errors and "Traceback" not in errors


def test_two_workers_on_one_key_one_master_each(worker: Worker, tmp_path: Path) -> None:
    """A worker that dials names its node to whoever listens with the same key."""
    KeyPair.generate().save(tmp_path / "key")
    master = Channel(listen="tcp://127.0.0.1:*", keys=KeyPair.load(tmp_path / "key"))
    try:
        for node in range(2):
            worker("--master", master.address, "--node", str(node), "--key", str(tmp_path / "key"))
        joined: list[bytes] = []

        def both() -> bool:
            joined.extend(peer for peer, _ in master.receive(0.1))
            return len(set(joined)) == 2

        until(both)
    finally:
        master.close()


def test_a_worker_for_one_session_ends_if_no_master_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTRUNTIME_DIAL_TIMEOUT", "0.1")
    made = daemon.Daemon(WorkerConfig(listen=f"ipc://{tmp_path}/worker", once=True))
    try:
        made.run(threading.Event())
    finally:
        made.close()
    assert "no master has come within 0.1 s" in caplog.text


def test_a_key_comes_over_standard_input(served: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    key = KeyPair.generate()
    reading, writing = os.pipe()
    try:
        os.write(writing, key.public + b" " + key.secret + b"\n")
        monkeypatch.setattr(cli.os, "read", lambda fd, count: _read(reading, count))
        assert cli.main(["--listen", "tcp://127.0.0.1:0", "--key", "-"]) == 0
    finally:
        os.close(reading)
        os.close(writing)
    assert served[0].keys == key


_read = os.read
