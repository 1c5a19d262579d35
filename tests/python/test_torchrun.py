"""`distruntime run` with torchrun's flags: torchrun's agent on each worker of a session.

These scripts do not import torch, which would take each rank two seconds. `test_torchrun_scripts.py` runs
those that do.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from distruntime import command_options
from distruntime.errors import UsageError
from distruntime.python import torchrun
from processes import state, until

SCRIPT = """
import json, os, signal, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = "LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
assert all(os.environ[name] for name in names.split())
print("rank", rank, "of", os.environ["WORLD_SIZE"], "restart", restart, "args", *sys.argv[1:])
if "killed" in sys.argv and not os.path.exists(sys.argv[2] + rank):
    open(sys.argv[2] + rank, "w").close()
    if rank == "0":
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
if "fails" in sys.argv and rank == "1":
    print("it fails", file=sys.stderr)
    sys.exit(7)
if "waits" in sys.argv:
    with open(sys.argv[2] + rank, "w") as file:
        file.write(f"{os.getpid()}.")
    time.sleep(1000)
import beside
print("beside", beside.NAME)
print("logs", os.environ["TORCHELASTIC_ERROR_FILE"])
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("NAME = 'the script'", encoding="utf-8")
    return str(tmp_path / "train.py")


def flags(line: str) -> list[tuple[str, str]]:
    """Return torchrun's flags as the command line has them."""
    found: list[tuple[str, str]] = (
        command_options.command_parser().parse_args(["run", *shlex.split(line), "x.py"]).torchrun
    )
    return found


def test_the_command_knows_torchruns_flags() -> None:
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = command_options.command_parser()._subparsers._group_actions[0].choices["run"]  # type: ignore
    assert theirs - {name for action in ours._actions for name in action.option_strings} == set()
    for action in get_args_parser()._actions:
        for name in {*action.option_strings} & {*command_options._TORCHRUN}:
            assert command_options._TORCHRUN[name] == (action.nargs != 0), name


def test_flags_of_the_script_are_the_scripts() -> None:
    options = command_options.command_parser().parse_args(["run", "train.py", "--nnodes", "2", "-t", "3"])
    assert options.torchrun == []
    assert options.arguments == ["--nnodes", "2", "-t", "3"]
    assert flags("--nproc_per_node=2 -t 3 --standalone") == [
        ("--nproc-per-node", "2"),
        ("--tee", "3"),
        ("--standalone", ""),
    ]
    assert torchrun.nodes_of(flags("--nnodes 1:3")) == (1, 3)
    with pytest.raises(UsageError, match="expected a number of nodes"):
        torchrun.nodes_of(flags("--nnodes two"))


def test_ranks_on_two_workers(session: Any, nurseries: None, script: str, capfd: Any) -> None:
    status = torchrun.run_script(flags("--nnodes 2 --nproc-per-node 2"), script, ["a", "--b"], False)
    lines = capfd.readouterr().out.splitlines()
    assert status == 0, lines
    said = sorted(line for line in lines if " args " in line)
    assert len(said) == 4
    for rank in range(4):
        node = next(line for line in said if f"rank {rank} of 4" in line)[6]
        assert f"[node {node} rank {rank}] rank {rank} of 4 restart 0 args a --b" in said
    assert {line[:7] for line in said} == {"[node 0", "[node 1"}
    assert sum("beside the script" in line for line in lines) == 4
    # torchrun's own folder would stay, one for each run.
    logs = [Path(line.partition(" logs ")[2]) for line in lines if " logs " in line]
    assert len(logs) == 4 and all("distruntime-run-" in str(path) for path in logs)
    until(lambda: not any(path.parent.exists() for path in logs))


def test_logs_that_the_user_wants_stay(session: Any, nurseries: None, script: str, tmp_path: Path) -> None:
    given = flags(f"--nnodes 2 --log-dir {shlex.quote(str(tmp_path))}/logs")
    assert torchrun.run_script(given, script, [], False) == 0
    assert len([*(tmp_path / "logs").rglob("stdout.log")]) == 2


@pytest.mark.slow(reason="starts torchrun's agents and ranks twice, 4 s")
def test_a_rank_that_is_killed_runs_again(
    session: Any, nurseries: None, script: str, capfd: Any, tmp_path: Path
) -> None:
    given = flags("--nnodes 2 --max-restarts 1 --monitor-interval 0.05")
    assert torchrun.run_script(given, script, ["killed", str(tmp_path / "killed")], False) == 0
    out = capfd.readouterr().out
    assert "rank 1 of 2 restart 0" in out
    assert "rank 1 of 2 restart 1" in out
    # To the other agent it is no failure of its own, and torchrun counts those.
    assert out.count("rank 0 of 2 restart 0") == 2


def test_the_exit_code_is_torchruns(
    session: Any, nurseries: None, script: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent whose rank has returned waits for the other one, until it is told to end.
    monkeypatch.setattr(torchrun, "_GRACE", 0.1)
    given = flags("--nnodes 2 --monitor-interval 0.05")
    assert torchrun.run_script(given, script, ["fails"], False) == 1
    out = capfd.readouterr().out
    assert "rank 1] it fails" in out
    assert "exitcode  : 7" in out


def test_a_script_travels_with_its_folder(
    session: Any, nurseries: None, script: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = torchrun._Agent.ask
    monkeypatch.setattr(
        torchrun._Agent, "ask", lambda self, name, *args: name != "has" and asked(self, name, *args)
    )
    # Nothing is left where it was.
    packed = torchrun._packed

    def moved(folder: Path) -> bytes:
        data = packed(folder)
        for file in folder.iterdir():
            file.unlink()
        return data

    monkeypatch.setattr(torchrun, "_packed", moved)
    assert torchrun.run_script(flags("--nnodes 2"), script, [], False) == 0
    assert capfd.readouterr().out.count("beside the script") == 2


def test_bad_input_is_told(session: Any, script: str) -> None:
    with pytest.raises(UsageError, match="3 and 2 workers"):
        torchrun.run_script(flags("--nnodes 3"), script, [], False)
    with pytest.raises(UsageError, match="--standalone and 2 workers"):
        torchrun.run_script(flags("--standalone"), script, [], False)
    with pytest.raises(UsageError, match="no such file"):
        torchrun.run_script(flags("--nnodes 2"), script + "x", [], False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks(
    session: Any, nurseries: None, script: str, tmp_path: Path, number: int
) -> None:
    marks = [tmp_path / f"pid{rank}" for rank in range(2)]

    def strike() -> None:
        until(lambda: all(mark.exists() and mark.read_text(encoding="utf-8").endswith(".") for mark in marks))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=strike)
    own = signal.getsignal(number)
    # A suite that `nohup` has started ignores it, and so would the agents.
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)
    try:
        thread.start()
        status = torchrun.run_script(flags("--nnodes 2"), script, ["waits", str(tmp_path / "pid")], False)
        thread.join()
        assert status == 128 + number
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, own)
    pids = [int(mark.read_text(encoding="utf-8").rstrip(".")) for mark in marks]
    until(lambda: not any(map(state, pids)))
