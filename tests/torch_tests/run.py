"""Runs PyTorch's own tests on remote tensors, says why what fails fails, and prints a table.

    python tests/torch_tests/run.py [part of a test's name ...] [--page docs/torch_tests.md]
    python tests/torch_tests/run.py --all [file ...] [--slice 3/20] [--page docs/torch_tests.md]

Without names it runs a sample, which is another one each day. With --all it runs whole files, or a slice of
each. The files run in child processes, each with a session of one worker. If a child dies, its last test has
failed, and a new child goes on with the next. The exit status is 1 if a test fails for no reason that
`expected.txt` knows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import alone
import record
import sources
from expected import NOT_RUN, Cause, cause_of, read
from rows import DEFAULT, DEVICE, LOCAL, MESH, SPMD, Plan, Row, twin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# It comes last, as some modules there may have names of torch's test files.
sys.path.append(str(ROOT / "tests" / "help"))
from revision import revision  # noqa: E402

# A test that has needed all its time gets so many times as much: beside other work a loop of reads is slow.
MORE = 5
# Seconds. A child that says nothing for so much longer than a test may take, hangs where no signal is seen.
SILENCE = 180.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DISTRUNTIME_QUIET": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "worker", HERE))),
}
MODES = {
    DEVICE: "device-generic tests, for remote tensors",
    DEFAULT: 'tests that name no device, under `torch.device("remote")`',
    LOCAL: "tests of local tensors, beside an open session",
    MESH: "multi-rank tests, on a mesh",
    SPMD: "multi-process tests, in members of `dr.spmd`",
}


def groups(path: Path) -> list[tuple[str, dict[str, int]]]:
    """Read what runs: for each group its mode, and its files with the most tests of each in a sample."""
    found: list[tuple[str, dict[str, int]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        if len(words) == 1:
            found.append((words[0], {}))
        elif words:
            found[-1][1][words[0]] = int(words[1])
    return found


# -- the children ---------------------------------------------------------------------------------------


@dataclass
class Found:
    """What the children of one group of files have said."""

    mode: str
    rows: list[Row] = field(default_factory=list)
    # How many tests each file has.
    of: dict[str, int] = field(default_factory=dict)
    # The last words of each child that died.
    deaths: list[str] = field(default_factory=list)

    def take(self, path: Path, ending: str) -> str:
        """Read a child's rows, and return how it ended. A test that it began and did not end has ended it."""
        begun = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            begun = said.get("begun", begun)
            self.of.update(said.get("of", {}))
            if "outcome" in said:
                self.rows.append(Row(**{**said, "mode": self.mode}))
                begun = ""
        if begun:
            # pytest may end with a common status by a mistake of its own.
            ending = ending or "ended early"
            self.rows.append(Row(begun, "failed", error=f"the process {ending}", mode=self.mode))
        return ending


def run_group(plan: Plan, folder: Path) -> Found:
    """Run files in as many children as it takes."""
    found = Found(plan.mode)
    while True:
        before = len(found.rows)
        with tempfile.TemporaryDirectory() as scratch:
            rows, log = Path(scratch) / "rows", Path(scratch) / "log"
            rows.touch()
            here = replace(plan, rows=str(rows), done=[row.test for row in found.rows])
            ending = found.take(rows, _child(here, folder, log))
            if not ending:
                return found
            found.deaths.append(f"{ending}: {log.read_text(encoding='utf-8', errors='replace')[-1500:]}")
        if len(found.rows) == before:
            # It could not even begin a test, and the next child could not either.
            return found


def _child(plan: Plan, folder: Path, log: Path) -> str:
    """Run one child. Return how it ended, or nothing if it has run all its tests."""
    scratch = log.parent
    plan.write(scratch / "plan")
    settings = scratch / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    arguments = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(folder), "-q", "-s"]
    arguments += ["-p", "torch_tests_plugin", "-p", "no:cacheprovider", "--noconftest", "--disable-warnings"]
    arguments += [f"--timeout={plan.patience}", "--timeout-method=signal", "--continue-on-collection-errors"]
    # In Python 3.11, pytest's own tracebacks of deep calls fail: "AST constructor recursion depth mismatch".
    arguments += ["--tb=native"]
    # pytest would format what torch's LoggingTensor logs, which is no text for it.
    arguments += ["-p", "no:logging"]
    environment = {**os.environ, **ENVIRONMENT}
    # torch runs a test file in its own folder, and those of pipelines import from there.
    own = dict.fromkeys(str((folder / file).parent) for file in plan.most if "/pipelining/" in file)
    environment["PYTHONPATH"] += os.pathsep + os.pathsep.join([str(folder), *own])
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*arguments, "--plan", str(scratch / "plan"), *plan.most],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        rows = Path(plan.rows)
        while True:
            try:
                status = child.wait(5)
                break
            except subprocess.TimeoutExpired:
                if time.time() - rows.stat().st_mtime > plan.patience + SILENCE:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    return f"said nothing for {plan.patience + SILENCE:.0f} s"
    # pytest ends with 1 if a file could not be imported, and with 5 if no test was left.
    return "" if status in (0, 1, 5) else f"ended with status {status}"


def look_again(found: Found, folder: Path) -> None:
    """Say of a test that fails here too, beside the session, whether it does so in a process of its own."""
    if found.mode not in (DEVICE, DEFAULT):
        return
    rows = [row for row in found.rows if row.outcome == "failed" and row.here == "failed"]
    names = [twin(row.test) if found.mode == DEVICE else row.test for row in rows]
    outcomes = alone.outcomes(names, folder)
    for row, name in zip(rows, names):
        row.here = outcomes.get(name, row.here)


def run_slow_ones_again(found: Found, plan: Plan, folder: Path, causes: list[Cause]) -> None:
    """Run with more time what has failed for no known reason and has needed all its time."""
    slow = [row for row in found.rows if row.seconds >= plan.patience and unexplained(row, causes)]
    if not slow:
        return
    most = {row.file: plan.most[row.file] for row in slow}
    names = [row.test for row in slow]
    again = run_group(replace(plan, most=most, exactly=names, patience=MORE * plan.patience), folder)
    look_again(again, folder)
    rows = {row.test: row for row in again.rows}
    found.rows = [rows.get(row.test, row) for row in found.rows]
    found.deaths += again.deaths


# -- what was found -------------------------------------------------------------------------------------


def now_passing(found: Sequence[Found], causes: list[Cause]) -> Iterator[str]:
    """Yield the tests that the list names in full, and that pass."""
    named = {test: cause for cause in causes for test in cause.tests if "*" not in test}
    for group in found:
        for row in group.rows:
            if row.outcome == "passed" and row.test in named:
                yield f"now passes: {row.test} ({named[row.test].why})"


def unexplained(row: Row, causes: list[Cause]) -> bool:
    return row.outcome == "failed" and cause_of(row, causes) is None


def tell(group: Found, causes: list[Cause]) -> None:
    """Print the tests that fail for no known reason, and the children that have died."""
    for row in group.rows:
        if unexplained(row, causes):
            error, where = " ".join(row.error.split())[:500], " ".join(row.where)
            print(f"unexplained [{group.mode}]: {row.test}\n    {error}\n    {where}", flush=True)
    for death in group.deaths:
        print(f"a child [{group.mode}] {death}", flush=True)


@dataclass
class Run:
    """What one call of this program ran, as `--keep` keeps it."""

    found: list[Found]
    seconds: float
    # It says which tests of each file ran.
    part: str
    date: str


def keep(path: Path, run: Run) -> None:
    path.write_text(json.dumps(asdict(run)), encoding="utf-8")


def kept(path: Path) -> Run:
    """Return what `keep` has written."""
    said = json.loads(path.read_text(encoding="utf-8"))
    found = [Found(**{**group, "rows": [Row(**row) for row in group["rows"]]}) for group in said.pop("found")]
    return Run(found, **said)


def chosen(options: argparse.Namespace, most: dict[str, int]) -> dict[str, int]:
    """Return the files of a group that run, with the most tests of each. 0 takes all."""
    files = {file: 0 if options.all else number for file, number in most.items()}
    if options.part:
        # Each part has files of each group, as two groups run at a time.
        k, of = options.part
        files = {file: files[file] for file in list(files)[k - 1 :: of]}
    if options.all and options.only:
        return {file: number for file, number in files.items() if is_named(file, options.only)}
    if options.only and all("::" in part for part in options.only):
        return {file: number for file, number in files.items() if is_named(file, options.only)}
    return files


def is_named(file: str, names: Sequence[str]) -> bool:
    """Say if a file is named: by its path, by its bare name, or by a test of it."""
    asked = {name.partition("::")[0] for name in names}
    return not asked.isdisjoint((file, file.removesuffix(".py"), Path(file).stem))


def run_groups(options: argparse.Namespace, folder: Path, causes: list[Cause]) -> list[Found]:
    without = [test for cause in causes if cause.kind == NOT_RUN for test in cause.tests]
    only: list[str] = [] if options.all else options.only
    if only:
        # Who names a test wants it.
        without = []

    def run(group: tuple[str, dict[str, int]]) -> Found:
        mode, most = group
        files = chosen(options, most)
        plan = Plan(mode, files, "", [], without, only, options.seed, options.slice)
        found = run_group(plan, folder) if files else Found(mode)
        look_again(found, folder)
        run_slow_ones_again(found, plan, folder, causes)
        tell(found, causes)
        return found

    wanted = [group for group in groups(HERE / "files.txt") if options.mode in (None, group[0])]
    if options.all and not any(is_named(file, options.only or [file]) for _, most in wanted for file in most):
        raise SystemExit(f"no file of files.txt is named {' or '.join(options.only)}; --all takes files")
    with ThreadPoolExecutor(options.processes) as pool:
        return list(pool.map(run, wanted))


def part(words: str) -> tuple[int, int]:
    """Read K/N."""
    k, of = map(int, words.split("/"))
    if not 1 <= k <= of:
        raise ValueError(words)
    return k, of


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "only", nargs="*", help="parts of names of tests, or files with --all; a sample without"
    )
    parser.add_argument("--all", action="store_true", help="all tests of the files, in all dtypes: hours")
    parser.add_argument("--slice", type=part, metavar="K/N", help="the Kth of N slices of each file's tests")
    parser.add_argument("--mode", choices=MODES, help="one mode only")
    parser.add_argument("--part", type=part, metavar="K/N", help="the Kth of N parts of the files")
    parser.add_argument("--seed", type=int, help="draws the sample; the date, as 20261127, without")
    parser.add_argument("--processes", type=int, default=2, help="children at a time (2)")
    parser.add_argument("--keep", type=Path, help="keep what became of each test in this file")
    parser.add_argument("--judge", type=Path, help="run nothing, but judge what is kept in this file")
    parser.add_argument("--page", type=Path, help="the page whose tables get what ran")
    options = parser.parse_args()
    if options.slice and not options.all:
        parser.error("--slice takes a slice of whole files: say --all, too")
    if options.page and options.only and not (options.all or options.judge):
        parser.error("the page's rows are samples or whole files: say --all and the files' names, too")
    if options.seed is None:
        options.seed = int(time.strftime("%Y%m%d"))
    return options


def main() -> int:
    options = asked()
    try:
        folder = sources.test_folder()
    except sources.NoSources as reason:
        # A piece of the lanes is skipped where a line begins so.
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    causes = read(HERE / "expected.txt")
    begun = time.monotonic()
    if options.judge:
        run = kept(options.judge)
        for group in run.found:
            tell(group, causes)
    else:
        which = record.SAMPLE
        if options.all:
            which = "{}/{}".format(*options.slice) if options.slice else record.WHOLE
        elif not options.only:
            print(f"the seed {options.seed} draws the sample: --seed {options.seed} repeats it", flush=True)
        date = time.strftime("%Y-%m-%d")
        found = run_groups(options, folder, causes)
        run = Run(found, time.monotonic() - begun, which, date)
    if options.keep:
        keep(options.keep, run)
    new = list(record.entries(run.found, causes, run.part, run.date))
    versions = (
        f"torch {importlib.metadata.version('torch')}, the tests of PyTorch {sources.version(folder)}, "
        f"Python {platform.python_version()}"
    )
    number = sum(entry.run for entry in new)
    minutes = f"{number} tests in {run.seconds / 60:.0f} minutes"
    print(f"{run.date}, {revision()}, {versions}, {os.cpu_count()} cores: {minutes}.")
    print("", *record.shown(new), *now_passing(run.found, causes), sep="\n")
    if options.page:
        everything = record.with_new(record.read(record.PATH), new)
        record.write(record.PATH, everything)
        record.on_page(options.page, everything, f"with {versions}")
    unknown = any(entry.counts.get("unexplained") for entry in new)
    return 1 if unknown or any(group.deaths for group in run.found) else 0


if __name__ == "__main__":
    sys.exit(main())
