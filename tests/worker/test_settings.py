"""The worker's settings: from the environment and from the command line."""

from __future__ import annotations

import pytest

from distruntime_worker import cli
from distruntime_worker.cli import complete
from distruntime_worker.options import parser

VARIABLES = {
    "DISTRUNTIME_WORKER_LISTEN": "tcp://127.0.0.1:29400",
    "DISTRUNTIME_WORKER_MAX_MEMORY": "50%",
    "DISTRUNTIME_WORKER_DEVICES": "cpu,cuda:0",
    "DISTRUNTIME_WORKER_NO_FUNCTIONS": "yes",
    "DISTRUNTIME_WORKER_INSECURE": "false",
    "DISTRUNTIME_WORKER_THREADS": "2",
}


def test_variables_stand_for_options() -> None:
    options = parser().parse_args(complete(parser(), [], VARIABLES))
    assert options.listen == "tcp://127.0.0.1:29400" and options.max_memory == 0.5
    assert options.devices == ("cpu", "cuda:0") and options.threads == 2
    assert options.no_functions and not options.insecure


def test_the_command_line_wins_over_a_variable() -> None:
    options = parser().parse_args(complete(parser(), ["--threads", "4"], VARIABLES))
    assert (options.threads, options.max_memory, options.no_functions) == (4, 0.5, True)
    # A worker listens or dials.
    options = parser().parse_args(complete(parser(), ["--master", "tcp://a:1"], VARIABLES))
    assert options.master == "tcp://a:1" and options.listen is None


def test_a_worker_of_a_master_takes_no_settings() -> None:
    for own in (["--listen", "ipc://a", "--once"], ["--master", "ipc://a", "--local", "1"]):
        assert complete(parser(), own, VARIABLES) == own


def test_a_switch_is_on_or_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_WORKER_NO_FUNCTIONS", "maybe")
    assert cli.main([]) == 2
    error = capsys.readouterr().err
    assert "$DISTRUNTIME_WORKER_NO_FUNCTIONS: --no-functions is true or false, got 'maybe'" in error
