"""The worker's settings: from a file, from the environment and from the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distruntime.errors import ConfigurationError
from distruntime_worker import cli
from distruntime_worker.options import parser
from distruntime_worker.settings import complete

FILE = """
listen = "tcp://127.0.0.1:29400"
max-memory = "50%"
devices = ["cpu", "cuda:0"]
no-functions = true
insecure = false
threads = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_a_file_stands_for_options(file: Path) -> None:
    options = parser().parse_args(complete(parser(), ["--config", str(file)], {}))
    assert options.listen == "tcp://127.0.0.1:29400" and options.max_memory == 0.5
    assert options.devices == ("cpu", "cuda:0") and options.threads == 2
    assert options.no_functions and not options.insecure


def test_the_command_line_wins_over_a_variable_and_that_over_the_file(file: Path) -> None:
    variables = {"DISTRUNTIME_WORKER_THREADS": "3", "DISTRUNTIME_WORKER_MAX_MEMORY": "1GB"}
    variables |= {"DISTRUNTIME_WORKER_CONFIG": str(file), "DISTRUNTIME_WORKER_INSECURE": "yes"}
    options = parser().parse_args(complete(parser(), ["--threads", "4"], variables))
    assert (options.threads, options.max_memory, options.no_functions) == (4, 10**9, True)
    assert options.insecure
    # A worker listens or dials: what is said last counts.
    options = parser().parse_args(complete(parser(), ["--master", "tcp://a:1"], variables))
    assert options.master == "tcp://a:1" and options.listen is None


def test_a_worker_of_a_master_takes_no_settings(file: Path) -> None:
    variables = {"DISTRUNTIME_WORKER_METRICS": "1", "DISTRUNTIME_WORKER_CONFIG": str(file)}
    for own in (["--listen", "ipc://a", "--once"], ["--master", "ipc://a", "--local", "1"]):
        assert complete(parser(), own, variables) == own


@pytest.mark.parametrize(
    "line, said",
    [
        (
            "lisen = 'tcp://a:1'",
            "which a worker does not have. Did you mean 'listen'?",
        ),
        ("zzz = 1", "There are data-address, devices,"),
        ("once = true", "got the setting 'once', which a worker does not have"),
        ("no-functions = 'maybe'", "no-functions is true or false, got 'maybe'"),
        ("threads = true", "threads is a text or a number, got True"),
        ("listen = ", "is no TOML"),
    ],
)
def test_what_is_no_setting_is_said(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(line, encoding="utf-8")
    assert cli.main(["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and str(path) in error and error.count("\n") == 1


def test_a_file_that_is_not_there_or_that_others_may_write_is_refused(file: Path) -> None:
    with pytest.raises(ConfigurationError, match="which cannot be read: No such file"):
        complete(parser(), ["--config", str(file.parent / "nothing")], {})
    os.chmod(file, 0o666)
    with pytest.raises(ConfigurationError, match="others may write"):
        complete(parser(), ["--config", str(file)], {})
