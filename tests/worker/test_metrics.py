"""Health and figures of a worker over HTTP: for holders of the key, and without a word to the work."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.__main__ import main
from distruntime.errors import ConfigurationError
from distruntime.wire.keys import KeyPair
from distruntime_worker import cli
from distruntime_worker.session.metrics import Metrics
from processes import STARTING, ListeningWorker, until

pytest.importorskip("prometheus_client", reason="pip install prometheus_client")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    KeyPair.generate().save(path)
    return path


@pytest.fixture
def worker(tmp_path: Path, key: Path) -> Iterator[ListeningWorker]:
    dr.shutdown()
    words = "--listen tcp://127.0.0.1:0 --metrics 0 --log-format json --key".split()
    found = ListeningWorker(tmp_path, *words, str(key))
    yield found
    dr.shutdown()
    found.stop()


def ask(port: int, path: str, token: str = "") -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def port_of(worker: ListeningWorker) -> int:
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/", worker.text())
    assert found is not None, worker.text()
    return int(found[1])


def test_the_figures_are_for_holders_of_the_key(
    worker: ListeningWorker, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = port_of(worker)
    assert ask(port, "/healthz") == (200, "ok\n")
    for token in ("", "x", KeyPair.generate().token()):
        status, text = ask(port, "/metrics", token)
        assert status == 401 and "distruntime-worker token" in text
    assert ask(port, "/")[0] == 404
    assert cli.main(["token", "--key", str(key)]) == 0
    token = capsys.readouterr().out.strip()
    assert token == KeyPair.load(key).token() and token not in key.read_text(encoding="utf-8")
    with dr.init_master_worker(workers=[worker.address], key=key, session="day", quiet=True):
        x = torch.ones(3, device=REMOTE)
        assert x.sum().item() == 3
        status, text = ask(port, "/metrics", token)
        dr.shutdown()
    assert status == 200
    assert 'distruntime_worker_session_values{session="day"} ' in text
    assert re.search(r'distruntime_worker_device_memory_total_bytes\{device="cpu"\} [1-9]', text)
    assert "distruntime_worker_sessions 1.0" in text and "# TYPE distruntime_worker_info gauge" in text
    # Nobody's line of the log is more than an object.
    assert all(json.loads(line)["logger"] == "distruntime.worker" for line in worker.text().splitlines())


def test_silent_strangers_hold_no_figures_for_long(worker: ListeningWorker, key: Path) -> None:
    port, token = port_of(worker), KeyPair.load(key).token()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]

    def answered() -> bool:
        try:
            return ask(port, "/metrics", token)[0] == 200
        except (OSError, http.client.HTTPException):
            # All places are taken for some seconds.
            return False

    until(answered, STARTING)
    for connection in silent:
        connection.close()


def test_without_a_key_the_figures_stay_on_this_machine() -> None:
    with pytest.raises(ConfigurationError, match="without a key, so that whoever reaches it could read"):
        Metrics("0.0.0.0", 0, None)
    metrics = Metrics("127.0.0.1", 0, None)
    try:
        # Nobody reads from masters here, so nobody makes a report.
        metrics._looked_at -= 100
        assert ask(metrics.port, "/healthz")[0] == 503
        with pytest.raises(ConfigurationError, match="where nothing can listen: Address already in use"):
            Metrics("127.0.0.1", metrics.port, None)
    finally:
        metrics.close()


def test_a_worker_ends_when_a_holder_of_the_key_asks_it_to(
    worker: ListeningWorker, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    KeyPair.generate().save(other)
    assert main(["stop", worker.address, "--key", str(other), "--timeout", "20"]) == 1
    assert worker.process.poll() is None
    dr.init_master_worker(workers=[worker.address], key=key, quiet=True)
    assert main(["stop", worker.address, "--key", str(key)]) == 0
    assert f"{worker.address}: the worker ends (pid {worker.process.pid} on" in capsys.readouterr().out
    until(lambda: worker.process.poll() is not None)
    assert worker.process.poll() == 0 and "stopped: `distruntime stop` by" in worker.text()
    until(lambda: dr.nodes()[0].state == "left")


def test_the_option_takes_a_port_and_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    parse: Callable[[list[str]], Any] = cli.parser().parse_args
    words = ["--listen", "tcp://127.0.0.1:0", "--metrics"]
    assert parse([*words, "29480"]).metrics == ("127.0.0.1", 29480)
    assert parse([*words, "0.0.0.0:29480"]).metrics == ("0.0.0.0", 29480)
    assert parse([*words, "[::1]:29480"]).metrics == ("::1", 29480)
