"""Runs one script for each library here and on a worker, compares the numbers, and prints a table.

Then it runs whole scripts that say "cuda" (programs.py), and prints another table.

    python tests/ecosystem/run.py [case, script or library ...] [--page docs/tables/ecosystem.md]

`make ecosystem` installs the libraries first. Nothing is downloaded but packages: models are built from
configs, and data are drawn. Each file of cases runs in a child process for each device. A child that dies
costs its own case, and a new child goes on with the next. The exit status is 1 if a result is worse than the
case says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import programs
import torchvision_operators
from cases import CASES, Case, NotRun
from compare import (
    CHANGED,
    DIFFERS,
    ENVIRONMENT,
    FAILS,
    HERE,
    NOT_RUN,
    WORKS,
    difference,
    rewrite,
    table,
    version,
)

KINDS = ("trainers", "ranks", "models", "vision", "interpretability", "science", "rl", "tools")
# One case takes seconds. A child takes its libraries' imports on top, which are long on a cold disk.
PATIENCE = 900.0


@dataclass
class Outcome:
    """What a child says of a case on a device."""

    case: str
    numbers: dict[str, list[float | str]] = field(default_factory=dict)
    remote: bool = False
    waits: int = 0
    error: str = ""
    not_run: str = ""


@dataclass(frozen=True)
class Row:
    case: Case
    version: str
    result: str
    why: str
    waits: int

    @property
    def worse(self) -> bool:
        if self.result in (WORKS, CHANGED):
            return False
        return self.result != NOT_RUN and not self.case.fails

    def cells(self) -> list[str]:
        result = f"{self.result}: {self.why}" if self.why else self.result
        return [self.case.library, self.version, self.case.tried, result, str(self.waits)]


# -- the child --------------------------------------------------------------------------------------------


def numbers(value: object) -> list[float | str]:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.layout is not torch.strided else value
        return value.to(torch.float64).flatten().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value, dtype=np.float64).flatten().tolist()
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    if isinstance(value, bool | int | float):
        return [float(value)]
    return [str(value)]


def any_remote(value: object) -> bool:
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return any(tensor.device.type == "remote" for tensor in tensors)


def run_case(case: Case, device: str) -> Outcome:
    import numpy as np
    import torch

    import distruntime as dr

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    outcome = Outcome(case.name)
    if device == "remote":
        dr.profiler.stalls(reset=True)
    try:
        found = case.script(device)
        if device == "remote":
            # What the comparison itself fetches is not the library's.
            outcome.waits = sum(stall.count for stall in dr.profiler.stalls())
            dr.synchronize()
        outcome.remote = any_remote(found)
        outcome.numbers = {name: numbers(value) for name, value in found.items()}
    except NotRun as reason:
        outcome.not_run = str(reason)
    except Exception as error:
        traceback.print_exc()
        # fastai puts a line of its own before the error's text.
        words = " ".join(str(error).split())
        outcome.error = f"{type(error).__name__}: {words[:160]}"
    if "accelerate" in sys.modules:
        # accelerate keeps the precision of a process's first script for the next ones.
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)
    return outcome


def child(kind: str, device: str, names: Sequence[str], file: Path) -> None:
    warnings.simplefilter("ignore")
    import torch

    import distruntime as dr

    torch.set_num_threads(1)
    torchvision_operators.load()
    if device == "remote":
        dr.init_master_worker(world_size=2 if kind == "ranks" else 1)
        dr.config(num_threads=1)
    importlib.import_module(kind)
    for name in names:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"begun": name}) + "\n")
        outcome = run_case(CASES[name], device)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")
    if device == "remote":
        dr.shutdown()


# -- the parent -------------------------------------------------------------------------------------------


def outcomes(kind: str, device: str, names: Sequence[str]) -> Iterator[Outcome]:
    """Run the cases of a file on a device, in as many children as it takes."""
    names = list(names)
    while names:
        with tempfile.TemporaryDirectory() as folder:
            file, log = Path(folder) / "outcomes", Path(folder) / "log"
            file.touch()
            arguments = [sys.executable, __file__, "--child", kind, device, str(file), *names]
            with log.open("wb") as output:
                try:
                    status = subprocess.run(
                        arguments,
                        # Workers import this folder's modules by name.
                        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent)},
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        timeout=PATIENCE,
                    ).returncode
                except subprocess.TimeoutExpired:
                    status = -1
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            words = log.read_text(encoding="utf-8", errors="replace")
        found = [Outcome(**line) for line in lines if "case" in line]
        yield from found
        done = {outcome.case for outcome in found}
        if os.environ.get("ECOSYSTEM_VERBOSE") or (status and not found):
            print(words[-4000:], file=sys.stderr)
        names = [name for name in names if name not in done]
        if names:
            yield Outcome(names[0], error=f"the process ended with status {status}: {words[-200:].strip()!r}")
            names = names[1:]


def judge(case: Case, here: Outcome, there: Outcome) -> tuple[str, str]:
    if reason := here.not_run or there.not_run:
        return NOT_RUN, reason
    if here.error:
        return FAILS, f"here too: {here.error}"
    if there.error:
        return FAILS, case.fails or there.error
    if not there.remote:
        return HERE, case.fails
    if (worst := difference(here.numbers, there.numbers)) > case.tolerance:
        return DIFFERS, case.fails or f"by {worst:.1e} of the largest number"
    if case.change:
        return CHANGED, case.change
    return WORKS, ""


HEADING = ["library", "version", "what was tried", "result", "waits"]
ALIKE = ("library", "version", "result")


def summary(rows: Sequence[Row]) -> str:
    counts = {result: sum(row.result == result for row in rows) for result in (WORKS, CHANGED)}
    rest = len(rows) - sum(counts.values())
    libraries = len({row.case.library for row in rows})
    return (
        f"{len(rows)} scripts of {libraries} libraries: {counts[WORKS]} work as written, "
        f"{counts[CHANGED]} with a change, {rest} do not."
    )


# -- scripts that say "cuda" ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """A row of the second table."""

    program: programs.Program
    there: programs.Run
    worst: float
    wrong: str

    def cells(self) -> list[str]:
        same = "the same numbers" if self.worst == 0 else f"the same to {self.worst:.0e}"
        script = f"`{self.program.name}`"
        known = [self.program.library, version(self.program.library), script, self.program.tried]
        found = [str(self.there.values), str(self.there.waits), self.there.pretended]
        return [*known, self.wrong or same, *found]


TAKEN_HEADING = [
    *("library", "version", "script", "what it does", "result"),
    *("values there", "waits", "only pretended"),
]


def taken(program: programs.Program) -> Taken:
    """Run a script here and on a worker."""
    here, there = (programs.run(program, ENVIRONMENT, PATIENCE, as_cuda=as_cuda) for as_cuda in (False, True))
    worst = difference(here.numbers, there.numbers)
    return Taken(program, there, worst, programs.judge(here, there, worst, program.tolerance))


def taken_summary(rows: Sequence[Taken]) -> str:
    right = sum(not row.wrong for row in rows)
    wrong = len(rows) - right
    return f"{len(rows)} scripts that say cuda: {right} give the same numbers on a worker, {wrong} do not."


def chosen(kind: str, wanted: Sequence[str]) -> list[str]:
    """Return the names of a file's cases."""
    before = set(CASES)
    importlib.import_module(kind)
    new = [name for name in CASES if name not in before]
    return [name for name in new if not wanted or name in wanted or CASES[name].library in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("wanted", nargs="*", help="cases, scripts or libraries; all without")
    parser.add_argument("--page", type=Path, help="the page whose tables are written anew")
    parser.add_argument("--only", choices=["cases", "scripts"], help="one of the two tables")
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in KINDS if options.only != "scripts" else ():
        names = chosen(kind, options.wanted)
        here = {outcome.case: outcome for outcome in outcomes(kind, "cpu", names)}
        for there in outcomes(kind, "remote", names):
            case = CASES[there.case]
            result, why = judge(case, here[case.name], there)
            row = Row(case, version(case.library), result, why, there.waits)
            rows.append(row)
            print(f"{case.name} ({case.library}): {result}{': ' if why else ''}{why}", flush=True)
    rows.sort(key=lambda row: (KINDS.index(row.case.script.__module__), row.case.library.lower()))
    scripts: list[Taken] = []
    for program in programs.PROGRAMS if options.only != "cases" else ():
        if not options.wanted or {program.library, program.name, program.file} & set(options.wanted):
            scripts.append(taken(program))
            print(f"{program.name} ({program.library}): {scripts[-1].wrong or 'the same'}", flush=True)
    if rows:
        lines = list(table(rows, HEADING, ALIKE))
        print("", *lines, "", summary(rows), sep="\n")
        if options.page:
            rewrite(options.page, lines, summary(rows))
    if scripts:
        lines = list(table(scripts, TAKEN_HEADING, ALIKE))
        print("", *lines, "", taken_summary(scripts), sep="\n")
        if options.page:
            rewrite(options.page, lines, taken_summary(scripts), "table of scripts")
    worse = [row for row in rows if row.worse]
    for row in worse:
        print(f"worse than expected: {row.case.name} ({row.case.library}) {row.result}: {row.why}")
    for row in rows:
        if row.case.fails and row.result in (WORKS, CHANGED):
            print(f"better than expected: {row.case.name} ({row.case.library}) {row.result}")
    wrong = [row for row in scripts if row.wrong]
    for row_of_script in wrong:
        print(f"worse than expected: {row_of_script.program.name}: {row_of_script.wrong}")
    return 1 if worse or wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        kind, device, file, *names = sys.argv[2:]
        child(kind, device, names, Path(file))
    else:
        sys.exit(main())
