"""The lane of unlike machines, and what keeps the suite apart from the user's settings: `tests/machines`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lane_modules import modules_of
from user_settings import take_out

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ROOT / "tests" / "machines"


with modules_of(MACHINES) as module:
    lane = module("run")
Condition, CONDITIONS = lane.Condition, lane.CONDITIONS


def test_every_file_that_a_condition_names_is_there() -> None:
    named = {word for one in CONDITIONS for word in one.tests.split()}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    assert len({one.name for one in CONDITIONS}) == len(CONDITIONS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flags": ("no-such-flag",)}, "has none of no-such-flag"),
        ({"prefix": "no-such-program -c 0"}, "there is no no-such-program"),
    ],
)
def test_a_condition_that_cannot_be_made_says_so_and_fails_nothing(
    changes: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("every condition takes Linux")
    assert lane.run(Condition("tried", "nothing", "", **changes), False, ())
    told = capsys.readouterr().out
    assert told.startswith("tried: cannot run here: ") and reason in told


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("12 passed, 3 skipped, 1 warning in 4.01s", "12 passed, 0 failed, 3 skipped"),
        ("1 failed, 2 passed, 1 error in 400.01s (0:06:40)", "2 passed, 1 failed, 0 skipped, 1 error"),
        ("nothing that pytest says", "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_the_last_line_of_pytest_is_counted(last: str, told: str) -> None:
    assert lane.counts(["= 1 passed =", last]) == told


def test_a_condition_has_its_environment_and_is_gone_afterwards() -> None:
    asked = Condition(
        "tried", "nothing", "", {"SEEN": "{folder}"}, ("HOME",), prepare=("touch {folder}/prepared",)
    )
    if reason := lane.missing(asked):
        pytest.skip(f"cannot run here: {reason}")
    program = (
        "import os; print(os.environ['SEEN'], 'HOME' in os.environ, os.listdir(os.environ['SEEN']), sep='|')"
    )
    with lane.made(asked) as (before, environment, tree):
        done = subprocess.run(
            [*before, "-c", program], cwd=tree, env=environment, capture_output=True, text=True
        )
    folder, _, rest = done.stdout.partition("|")
    assert rest == "False|['prepared']\n", done.stderr
    assert folder and not Path(folder).exists()


def test_a_clone_is_this_tree_as_it_is_with_a_python_that_imports_it(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no clone")
    there = tmp_path / "ein Pfad mit ä"
    try:
        os.fsencode(there)
    except UnicodeEncodeError as error:
        pytest.skip(f"no folder has such a name here: {error}")
    python = lane.clone(there)
    program = (
        "import distruntime as d, distruntime_worker as w, pytest; print(d.__file__, w.__file__, sep=chr(10))"
    )
    done = subprocess.run(
        [python, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.stdout.splitlines() == [
        str(there / "distruntime" / "__init__.py"),
        str(there / "worker" / "distruntime_worker" / "__init__.py"),
    ], done.stderr
    mine = Path(__file__).relative_to(ROOT)
    assert (there / mine).read_bytes() == (ROOT / mine).read_bytes()


def test_the_suite_runs_without_the_users_settings() -> None:
    mine = {"DISTRUNTIME_PROGRAMS": "5", "DISTRUNTIME_TEST_SIDE": "64", "PATH": "/bin"}
    users = {"DISTRUNTIME_QUIET": "1", "DISTRUNTIME_KEY": "/k", "DISTRUNTIME_WORKER_LOG_FORMAT": "json"}
    environment = {**mine, **users}
    assert take_out(environment) == sorted(users)
    assert environment == mine
    # A GPU's worker elsewhere may ask for the cluster's key.
    environment = {**users, "DISTRUNTIME_TEST_GPUS": "tcp://gpubox:29400"}
    assert "DISTRUNTIME_KEY" not in take_out(environment)
