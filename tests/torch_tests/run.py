"""Runs PyTorch's own tests on remote tensors, says why what fails fails, and prints a table.

    python tests/torch_tests/run.py [part of a test's name ...] [--all] [--page docs/torch_tests.md]

Without names it runs a sample that is the same each time. The files run in child processes, each with a
session of one worker. If a child dies, its last test has failed, and a new child goes on with the next.
The exit status is 1 if a test fails for no reason that `expected.txt` knows.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sources
from expected import KINDS, NOT_RUN, Cause, cause_of, read
from rows import DEFAULT, DEVICE, LOCAL, MESH, SPMD, Plan, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# It comes last, as some modules there may have names of torch's test files.
sys.path.append(str(ROOT / "tests" / "help"))
from revision import revision  # noqa: E402

# Seconds of one test. A child that says nothing for longer than SILENCE hangs where no signal is seen.
PATIENCE, SILENCE = 120, 300.0
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

    def take(self, path: Path, ending: str) -> None:
        """Read a child's rows. A test that it began and did not end has ended it."""
        begun = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            begun = said.get("begun", begun)
            self.of.update(said.get("of", {}))
            if "outcome" in said:
                self.rows.append(Row(**{**said, "mode": self.mode}))
                begun = ""
        if begun:
            self.rows.append(Row(begun, "failed", error=f"the process {ending}", mode=self.mode))


def run_group(mode: str, most: dict[str, int], folder: Path, only: list[str], without: list[str]) -> Found:
    """Run files in as many children as it takes."""
    found = Found(mode)
    while True:
        before = len(found.rows)
        with tempfile.TemporaryDirectory() as scratch:
            rows, log = Path(scratch) / "rows", Path(scratch) / "log"
            rows.touch()
            plan = Plan(mode, most, str(rows), [row.test for row in found.rows], without, only)
            ending = _child(plan, folder, log)
            found.take(rows, ending)
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
    arguments += [f"--timeout={PATIENCE}", "--timeout-method=signal", "--continue-on-collection-errors"]
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
                if time.time() - rows.stat().st_mtime > SILENCE:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    return f"said nothing for {SILENCE:.0f} s"
    # pytest ends with 1 if a file could not be imported, and with 5 if no test was left.
    return "" if status in (0, 1, 5) else f"ended with status {status}"


# -- the table ------------------------------------------------------------------------------------------


SHOWN = [kind for kind in KINDS if kind != NOT_RUN]


@dataclass
class Line:
    """A line of the table: one file in one mode."""

    mode: str
    file: str
    of: int
    counts: Counter[str] = field(default_factory=Counter)

    def cells(self) -> list[str]:
        counts = self.counts
        kinds = [str(counts[kind] or "") for kind in SHOWN]
        run = str(sum(counts.values()))
        fine = [str(counts["passed"]), str(counts["skipped"] or "")]
        return [self.file, self.mode, str(self.of), run, *fine, *kinds, str(counts["unexplained"] or "")]


HEADING = ["file", "mode", "tests", "run", "passed", "skipped", *SHOWN, "unexplained"]


def lines(found: Sequence[Found], causes: list[Cause]) -> Iterator[Line]:
    for group in found:
        for file, of in group.of.items():
            line = Line(group.mode, file, of)
            for row in group.rows:
                if row.file == file:
                    cause = cause_of(row, causes) if row.outcome == "failed" else None
                    unexplained = "unexplained" if row.outcome == "failed" else row.outcome
                    line.counts[cause.kind if cause else unexplained] += 1
            yield line


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, which reads well on a terminal too."""
    cells = [HEADING, *rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(HEADING))]
    for line in [HEADING, ["-" * width for width in widths], *rows]:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"


def total(all_lines: Sequence[Line]) -> Line:
    line = Line("", "all", sum(line.of for line in all_lines))
    for one in all_lines:
        line.counts.update(one.counts)
    return line


def by_mode(all_lines: Sequence[Line]) -> Iterator[Line]:
    """Yield a line for each mode, with what its files have together."""
    for mode in dict.fromkeys(line.mode for line in all_lines):
        those = [line for line in all_lines if line.mode == mode]
        whole = total(those)
        yield Line(mode, f"{len(those)} files", whole.of, whole.counts)


def reasons(found: Sequence[Found], causes: list[Cause], least: int = 1) -> Iterator[str]:
    """Yield each cause that explains so many tests, and how many tests the others explain."""
    explained: Counter[tuple[str, str]] = Counter()
    for group in found:
        for row in group.rows:
            if row.outcome == "failed" and (cause := cause_of(row, causes)):
                explained[cause.kind, cause.why] += 1
    order = list(KINDS)
    for (kind, why), number in sorted(explained.items(), key=lambda one: (order.index(one[0][0]), -one[1])):
        if number >= least:
            yield f"- {kind}, {number}: {why}"
    if rest := [number for number in explained.values() if number < least]:
        yield f"- {len(rest)} other reasons, {sum(rest)}: `tests/torch_tests/expected.txt`"


def rewrite(page: Path, words: Sequence[str], mode: str | None) -> None:
    """Put the table into the page between its two marks: the table of one mode, or that of all."""
    of = f" of {mode}" if mode else ""
    start, end = f"<!-- table{of} -->\n", f"<!-- end of the table{of} -->\n"
    before, mark, rest = page.read_text(encoding="utf-8").partition(start)
    _, second, after = rest.partition(end)
    if not (mark and second):
        raise ValueError(f"{page} has no lines {start!r} and {end!r}")
    page.write_text("".join([before, mark, "\n".join(words), "\n", second, after]), encoding="utf-8")


def now_passing(found: Sequence[Found], causes: list[Cause]) -> Iterator[str]:
    """Yield the tests that the list names in full, and that pass."""
    named = {test: cause for cause in causes for test in cause.tests if "*" not in test}
    for group in found:
        for row in group.rows:
            if row.outcome == "passed" and row.test in named:
                yield f"now passes: {row.test} ({named[row.test].why})"


def tell(group: Found, causes: list[Cause]) -> None:
    """Print the tests that fail for no known reason, and the children that have died."""
    for row in group.rows:
        if row.outcome == "failed" and cause_of(row, causes) is None:
            error, where = " ".join(row.error.split())[:500], " ".join(row.where)
            print(f"unexplained [{group.mode}]: {row.test}\n    {error}\n    {where}", flush=True)
    for death in group.deaths:
        print(f"a child [{group.mode}] {death}", flush=True)


def keep(path: Path, found: Sequence[Found], seconds: float) -> None:
    text = json.dumps({"seconds": seconds, "found": [asdict(group) for group in found]})
    path.write_text(text, encoding="utf-8")


def kept(path: Path) -> tuple[list[Found], float]:
    """Return what `keep` has written."""
    said = json.loads(path.read_text(encoding="utf-8"))
    groups = [Found(**{**group, "rows": [Row(**row) for row in group["rows"]]}) for group in said["found"]]
    return groups, said["seconds"]


def run_groups(options: argparse.Namespace, folder: Path, causes: list[Cause]) -> list[Found]:
    without = [test for cause in causes if cause.kind == NOT_RUN for test in cause.tests]
    if options.all or options.only:
        without = []

    def run(group: tuple[str, dict[str, int]]) -> Found:
        mode, most = group
        files = {file: 0 if options.all else number for file, number in most.items()}
        if options.part:
            # Each part has files of each group, as two groups run at a time.
            k, of = options.part
            files = {file: files[file] for file in list(files)[k - 1 :: of]}
        if options.only and all("::" in part for part in options.only):
            named = {part.partition("::")[0] for part in options.only}
            files = {file: number for file, number in files.items() if file in named}
        found = run_group(mode, files, folder, options.only, without) if files else Found(mode)
        tell(found, causes)
        return found

    wanted = [group for group in groups(HERE / "files.txt") if options.mode in (None, group[0])]
    with ThreadPoolExecutor(options.processes) as pool:
        return list(pool.map(run, wanted))


def part(words: str) -> tuple[int, int]:
    """Read K/N."""
    k, of = map(int, words.split("/"))
    if not 1 <= k <= of:
        raise ValueError(words)
    return k, of


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("only", nargs="*", help="parts of names of tests; a sample without")
    parser.add_argument("--all", action="store_true", help="all tests of the files, in all dtypes: hours")
    parser.add_argument("--mode", choices=MODES, help="one mode only")
    parser.add_argument("--part", type=part, metavar="K/N", help="the Kth of N parts of the files")
    parser.add_argument("--processes", type=int, default=2, help="children at a time (2)")
    parser.add_argument("--keep", type=Path, help="keep what became of each test in this file")
    parser.add_argument("--judge", type=Path, help="run nothing, but judge what is kept in this file")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    options = parser.parse_args()
    try:
        folder = sources.test_folder()
    except sources.NoSources as reason:
        # A piece of the lanes is skipped where a line begins so.
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    causes = read(HERE / "expected.txt")
    begun = time.monotonic()
    if options.judge:
        found, seconds = kept(options.judge)
        for group in found:
            tell(group, causes)
    else:
        found = run_groups(options, folder, causes)
        seconds = time.monotonic() - begun
    if options.keep:
        keep(options.keep, found, seconds)
    each = list(lines(found, causes))
    whole = total(each)
    begin = (
        f"{time.strftime('%Y-%m-%d')}, {revision()}, torch {importlib.metadata.version('torch')}, the "
        f"tests of PyTorch {sources.version(folder)}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}: "
        f"{sum(whole.counts.values())} tests in {seconds / 60:.0f} minutes."
    )
    files = table([line.cells() for line in [*each, whole]])
    print(begin, "", *files, "", *reasons(found, causes), *now_passing(found, causes), sep="\n")
    if options.page:
        # The page has a line for each mode, and the reasons of which there are several tests.
        modes = [line.cells() for line in by_mode(each)]
        shown = table([*modes, whole.cells()] if len(modes) > 1 else modes)
        rewrite(options.page, [begin, "", *shown, "", *reasons(found, causes, least=5)], options.mode)
    return 1 if whole.counts["unexplained"] or any(group.deaths for group in found) else 0


if __name__ == "__main__":
    sys.exit(main())
