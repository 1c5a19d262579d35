"""The pieces of the long lanes, which take turns from commit to commit: `.ci/pieces.py`."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.__main__ import BENCHMARKS
from lane_modules import modules_of

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ROOT / "tests" / "machines" / "conditions.py"


def _pieces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pieces", ROOT / ".ci" / "pieces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A named tuple looks its module up.
    sys.modules["pieces"] = module
    spec.loader.exec_module(module)
    return module


pieces = _pieces()
LOTS = {piece.name: piece.lots for piece in pieces.PIECES}


def test_every_file_and_folder_that_a_piece_names_is_there() -> None:
    commands = [piece.command.format(lot=lot) for piece in pieces.PIECES for lot in piece.lots]
    named = {path for command in commands for path in re.findall(r"tests/[\w/.]+", command)}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_file_with_a_slow_test_has_a_turn() -> None:
    folders = [ROOT / path for lot in LOTS["slow-tests"] for path in lot.split()]
    slow = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.slow|\bfewer\(", path.read_text(encoding="utf-8"))
    ]
    # The examples are a piece of their own, and so is the accelerator's lane.
    elsewhere = [
        ROOT / "tests" / "test_examples.py",
        ROOT / "tests" / "accelerator",
        Path(__file__).resolve(),
    ]
    without = [p for p in slow if not any(p.is_relative_to(other) for other in [*folders, *elsewhere])]
    assert without == []


def test_every_benchmark_machine_and_library_has_a_turn() -> None:
    measured = {name for lot in LOTS["benchmarks"] for name in lot.split()}
    assert measured == set(BENCHMARKS) - {"gpu"}
    checks = [int(number) for lot in LOTS["gpu"] for number in lot.split()]
    assert checks == list(range(1, len(checks) + 1))
    cases = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "ecosystem").glob("*.py"))
    here = {name for lot in LOTS["machines"] for name in lot.split()}
    machines = set(re.findall(r'Condition\(\s*"([^"]+)"', MACHINES.read_text(encoding="utf-8")))
    # `.ci/run` has the two of oneDNN at each commit.
    assert machines - here == {"onednn-avx2", "onednn-sse41"} and here < machines
    scenarios = (ROOT / "tests" / "box" / "scenarios.py").read_text(encoding="utf-8")
    # Two take their turn with none: what nothing befalls is run for the others, and 300 s are long.
    befall = set(re.findall(r'Scenario\(\s*"([^"]+)"', scenarios)) - {"calm", "drop-300"}
    assert {name for lot in LOTS["cluster"] for name in lot.split()} == befall | {"figures"}
    libraries = set(re.findall(r'@case\(\s*"([^"]+)"', cases))
    assert libraries - {name for lot in LOTS["ecosystem"] for name in lot.split()} == set()


def test_each_commit_has_another_piece_and_each_lap_another_lot() -> None:
    number = len(pieces.PIECES)
    lap = [pieces.chosen((), False, turn)[0][0].name for turn in range(number)]
    assert lap == [piece.name for piece in pieces.PIECES]
    lots = [pieces.chosen(["torch-tests"], False, k * number)[0][1] for k in range(12)]
    assert lots == list(LOTS["torch-tests"])
    assert len(pieces.chosen((), True, 0)) == sum(map(len, LOTS.values()))


@pytest.mark.parametrize(
    ("command", "limit", "good", "told"),
    [
        ("true", 60, True, "piece tried: ok"),
        ("echo what went wrong; exit 3", 60, False, "what went wrong\npiece tried: FAILED with status 3"),
        ("sleep 600", 0.5, False, "piece tried: FAILED: it was not over after 0.5 s"),
        ("echo 'cannot run here: no net'; exit 2", 60, True, "piece tried: skipped, cannot run here: no net"),
    ],
)
def test_how_a_piece_ended_is_told(
    command: str, limit: float, good: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    piece = pieces.Piece("tried", command, limit=limit)
    assert pieces.run(piece, "") is good
    assert told in capsys.readouterr().out


def test_what_takes_too_long_is_ended_with_what_it_has_started() -> None:
    begun = (sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(600)")
    program = f"import subprocess; subprocess.run({begun!r}, start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        pieces.end_with_its_own(process.pid)
        # The pipe ends when nobody has it any more.
        assert process.stdout.read() == "" and process.wait() == -signal.SIGKILL


def test_every_mutant_has_its_line_and_its_tests() -> None:
    """A list that is not run for a while loses them to changes of the code, without a word."""
    with modules_of(ROOT / "tests" / "long") as module:
        mutants = module("mutants").MUTANTS
    assert len({one.name for one in mutants}) == len(mutants) >= 60
    for one in mutants:
        assert (ROOT / one.file).read_text(encoding="utf-8").count(one.old) == 1, one.name
        for test in (*one.tests, one.by):
            file, _, name = test.partition("::")
            path = ROOT / file
            assert path.exists(), f"{one.name}: {test}"
            assert not name or f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8"), test
