"""The commands answer for themselves at once: help and version need no torch, whose import takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distruntime.cluster.arguments import said
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run -m nope.mod", "got -m nope.mod, and there is no such module here"),
        ("launch -n x a.py", "argument -n/--workers: got x, expected 1 or more"),
        ("launch --threads -1 a.py", "got -1, expected 0 or more"),
        ("launch --requeue a.py", "got --requeue without --slurm, where it would do nothing: leave it out"),
        ("launch --gpus 1 a.py", "got --gpus without --ray, where"),
        ("launch --hosts a --meet /x a.py", "got --meet without --mpi, where"),
        ("run --world-size 0 {file}", "world_size is a number of workers, at least 1, got 0"),
        ("stacks 0 --session nope", "there is no session 'nope' noted here: "),
    ],
)
def test_what_cannot_be_is_said_in_the_words_of_the_line(arguments: str, said: str) -> None:
    done = _run("distruntime", *arguments.format(file=__file__).split())
    assert done.returncode in (1, 2) and said in done.stderr


@pytest.mark.parametrize("begin", ["dr.init_master_worker()", 'dr.init_master_worker(backend="zmq")'])
def test_a_script_that_begins_a_session_gets_that_of_the_command(tmp_path: Path, begin: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os
import torch
import distruntime as dr
{begin}
os.chdir("/")
print(torch.ones(2, device="remote").sum().item(), len(dr.nodes()), os.path.exists(__file__))
try:
    dr.init_master_worker(world_size=2)
except dr.errors.UsageError as error:
    print(error)
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "distruntime", "run", "script.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result, refused = done.stdout.splitlines()[-2:]
    assert result == "2.0 1 True" and "world_size: got 2, expected 1" in refused


def test_what_a_script_says_of_the_session_that_a_command_has_begun() -> None:
    usual = {"backend": "zmq", "world_size": None, "simulate_cuda": 0, "timeout": None, "as_cuda": False}
    assert said({**usual, "timeout": 60, "as_cuda": True}, {"as_cuda": "force"}) == set()
    assert said({**usual, "as_cuda": "all"}, {"as_cuda": "force all"}) == set()
    assert said({**usual, "as_cuda": "all", "world_size": 3}, {"as_cuda": "force"}) == {
        "as_cuda",
        "world_size",
    }
    assert said({**usual, "as_cuda": True}, {"as_cuda": False}) == {"as_cuda"}


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
