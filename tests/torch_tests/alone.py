"""Which tests fail also in a process of their own, on local tensors and without this project.

A test that has failed runs again beside the session, without remote tensors. But torch's tests keep operands,
classes and operators from one run to the next, so that run may fail for what the first one has left. Here the
tests are in a process in which nothing has failed before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from rows import append

HERE = Path(__file__).resolve().parent
# Seconds of one test, and of a process that says nothing any more.
PATIENCE, SILENCE = 120, 600.0
# The variables that tell such a process where it writes its rows, and which tests it runs.
_ROWS, _NAMES = "TORCH_TESTS_ALONE_ROWS", "TORCH_TESTS_ALONE_NAMES"


def outcomes(tests: Sequence[str], folder: Path) -> dict[str, str]:
    """Run tests, and return "passed", "skipped" or "failed" for each that could be found."""
    found: dict[str, str] = {}
    for file in dict.fromkeys(test.partition("::")[0] for test in tests):
        left = [test for test in tests if test.startswith(f"{file}::")]
        while left:
            told = _process(left, folder)
            found.update(told)
            left = [test for test in left if test not in told]
            if not told:
                break
    return {test: outcome for test, outcome in found.items() if outcome}


def _process(tests: Sequence[str], folder: Path) -> dict[str, str]:
    """Run tests of one file in one process. One in which it dies has failed."""
    with tempfile.TemporaryDirectory() as scratch:
        rows, settings = Path(scratch) / "rows", Path(scratch) / "pytest.ini"
        rows.touch()
        names = Path(scratch) / "names"
        names.write_text(json.dumps(list(tests)), encoding="utf-8")
        settings.write_text("[pytest]\n", encoding="utf-8")
        arguments = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(folder), "-q"]
        arguments += ["-p", "alone", "-p", "no:cacheprovider", "--noconftest", "--disable-warnings"]
        arguments += [f"--timeout={PATIENCE}", "--timeout-method=signal", "--tb=no", "-p", "no:logging"]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(folder)]),
            _ROWS: str(rows),
            _NAMES: str(names),
        }
        subprocess.run(
            [*arguments, tests[0].partition("::")[0]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SILENCE + PATIENCE * len(tests),
            check=False,
        )
        lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    return {line["test"]: line["outcome"] for line in lines}


# -- the plugin of such a process ----------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    import old_names

    old_names.give()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A name on the command line that is not there would end the process before its first test.
    wanted = set(json.loads(Path(os.environ[_NAMES]).read_text(encoding="utf-8")))
    items[:] = [item for item in items if item.nodeid in wanted]
    for name in wanted.difference(item.nodeid for item in items):
        # Nobody looks for it again.
        append(os.environ[_ROWS], {"test": name, "outcome": ""})


def pytest_runtest_logstart(nodeid: str) -> None:
    # If the process dies now, this row stays.
    append(os.environ[_ROWS], {"test": nodeid, "outcome": "failed"})


_seen: dict[str, list[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seen.setdefault(report.nodeid, []).append(report.outcome)


def pytest_runtest_logfinish(nodeid: str) -> None:
    said = _seen.pop(nodeid, [])
    outcome = next((one for one in ("failed", "skipped") if one in said), "passed")
    append(os.environ[_ROWS], {"test": nodeid, "outcome": outcome})
