"""What the parent and a child tell each other: which tests to run, and what became of each."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

# How the tests of a file are run.
DEVICE, DEFAULT, LOCAL, MESH, SPMD = "device", "default", "local", "mesh", "spmd"
# What became of a test that failed, and that failed with an error of the same class in processes of its own.
ALIKE = "failed alike"
# Seconds of one test.
PATIENCE = 120


@dataclass
class Row:
    """A test's outcome. A failed test has two more: in step, and without remote tensors."""

    test: str
    # "passed", "skipped" or "failed".
    outcome: str
    # The error's class and its words; of a test that was skipped, why.
    error: str = ""
    # The last lines of the traceback, as "file:line".
    where: list[str] = field(default_factory=list)
    in_step: str = ""
    here: str = ""
    seconds: float = 0.0
    # It is set by who reads what the children wrote.
    mode: str = ""

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


@dataclass
class Plan:
    mode: str
    # The most tests of each file; 0 takes all.
    most: dict[str, int]
    # Where the child writes its rows.
    rows: str
    # The tests that earlier children have run.
    done: list[str]
    # Patterns of tests that are not run.
    without: list[str]
    # Parts of names; a test must have one of them. An empty list takes all tests.
    only: list[str]
    # It draws the sample.
    seed: int = 0
    # The Kth of N slices of each file's tests.
    slice: tuple[int, int] | None = None
    # Whole names of tests; then no sample is drawn.
    exactly: list[str] = field(default_factory=list)
    # Seconds of one test.
    patience: int = PATIENCE

    @classmethod
    def read(cls, path: str) -> Plan:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def append(path: str | Path, line: dict[str, object]) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def twin(name: str) -> str:
    """Return the name of the test for CPUs beside one for remote tensors."""
    return re.sub(r"_remote(?=_|$)", "_cpu", name.replace("REMOTE::", "CPU::"))
