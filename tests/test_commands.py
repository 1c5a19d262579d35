"""The commands answer for themselves at once: help and version need no torch, whose import takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distruntime.version import __version__

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")])},
    )


def _imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize(
    "arguments",
    [
        "distruntime_worker --help",
        "distruntime_worker --version",
        "distruntime_worker keygen --help",
        "distruntime",
        "distruntime --help",
        "distruntime --version",
        "distruntime repl --help",
    ],
)
def test_help_and_version_do_not_import_torch(arguments: str) -> None:
    done = _run(*arguments.split())
    assert done.returncode == 0, done.stderr[-2000:]
    assert not _imported(done) & {"torch", "numpy"}
    assert done.stdout.startswith(f"distruntime {__version__}\n" if "version" in arguments else "usage: ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_a_command_quietly(unbuffered: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "distruntime", "key"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=60,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": unbuffered,
                "DISTRUNTIME_SIGNING_KEY": str(tmp_path / "key"),
            },
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_without_a_command_the_help_is_shown() -> None:
    assert _run("distruntime").stdout == _run("distruntime", "--help").stdout


def test_a_script_that_is_not_there_starts_no_worker() -> None:
    done = _run("distruntime", "run", "--as-cuda", "missing.py")
    assert done.returncode == 2 and "got the script 'missing.py', and there is no such file" in done.stderr
    assert "torch" not in _imported(done)
    assert "arguments are required: SCRIPT\n" in _run("distruntime", "run").stderr


def test_a_script_of_torchrun_has_no_simulated_devices() -> None:
    done = _run("distruntime", "run", "--simulate-cuda", "2", "--nproc-per-node=2", __file__)
    assert done.returncode == 2 and "got --simulate-cuda and --nproc-per-node: " in done.stderr


def test_a_public_module_is_one_module_under_both_names() -> None:
    code = """
import sys
import distruntime
assert "torch" not in sys.modules
import distruntime.functional as public
import distruntime.collectives.functional as inner
assert public is inner is distruntime.functional
assert public.__spec__.name == public.__name__ == "distruntime.collectives.functional"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
