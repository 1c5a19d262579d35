"""The worker as a service: its unit for systemd, and its log as JSON."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distruntime_worker.cli import JsonLines


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = Path(__file__).parents[2] / "deploy/distruntime-worker.service"
    program = "/usr/local/bin/distruntime-worker"
    text = unit.read_text(encoding="utf-8")
    assert f"ExecStart={program}\n" in text
    path = tmp_path / unit.name
    # systemd looks whether there is such a program.
    path.write_text(text.replace(program, "/bin/true"), encoding="utf-8")
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
