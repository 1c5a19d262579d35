"""The worker as a service: its unit for systemd, and its log as JSON."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distruntime_worker import cli
from distruntime_worker.service import JsonLines, unit


def test_the_unit_runs_the_worker_with_the_same_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    listen = ("--listen", "tcp://0.0.0.0:29400")
    assert cli.main([*listen, "--key", "key", "--print-systemd", "--max-memory", "50%"]) == 0
    printed = capsys.readouterr().out
    (command,) = [line for line in printed.splitlines() if line.startswith("ExecStart=")]
    # systemd quotes words as a shell does, and gives a percent sign a meaning of its own.
    assert shlex.split(command.removeprefix("ExecStart=")) == [
        *(sys.executable, "-m", "distruntime_worker"),
        *(*listen, "--key", f"{tmp_path}/key", "--max-memory", "50%%"),
    ]
    assert "RestartPreventExitStatus=2" in printed
    assert 'x "a b$$"' in unit(["x", "a b$"]) and f"--key={tmp_path}/k" in unit(["--key=k"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    path = tmp_path / "distruntime-worker.service"
    path.write_text(unit(["--listen", "tcp://0.0.0.0:29400"]), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    # It names other units of the machine, too.
    assert [line for line in done.stderr.splitlines() if "distruntime-worker" in line] == []


def test_each_line_of_the_log_is_an_object() -> None:
    try:
        raise ValueError("no ä")
    except ValueError:
        found = sys.exc_info()
    record = logging.LogRecord("distruntime.worker", logging.ERROR, "file", 1, "it %s", ("failed",), found)
    record.created, record.msecs = 0.25, 250.0
    line = JsonLines().format(record)
    fields = json.loads(line)
    assert "\n" not in line and fields.pop("pid") and fields.pop("host")
    assert fields.pop("exception").endswith("ValueError: no ä")
    assert fields == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "error",
        "logger": "distruntime.worker",
        "message": "it failed",
    }
