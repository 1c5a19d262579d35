"""The first ten minutes on a machine with a GPU: 29 checks in their order, and then the figures.

    make gpu                            the Python that has torch with a GPU: PYTHON=/path/to/python3
    make gpu ARGS="--only 7 14"         some of the checks, without the figures
    make gpu ARGS="--simulate-cuda 2"   without a GPU: the script itself, on GPUs that are CPU tensors
    make gpu ARGS="--device FOLDER"     on the device of a torch backend that FOLDER brings by an entry point

Each check runs in a child process that is ended if it hangs. This process imports no torch, so nothing that
a GPU does can end it. It ends with status 0 if no check has failed and no figure is on the wrong side of its
bar, with 1 if not, and with 2 if nothing could be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import wheels
from listing import FIRST, Described

ROOT = wheels.ROOT
HERE = Path(__file__).resolve().parent
# So many checks there are; the children know which.
NUMBERS = range(1, 30)
# A child imports torch, which may lie on a slow disk.
STARTING = 120
# So many seconds of the run are kept for the figures.
KEPT_FOR_FIGURES = 120
# Each figure, what it needs, and the seconds after which it is ended.
FIGURES = (
    ("training", "GPT-2 124M in bfloat16, a step here and on a worker, three sizes", 100),
    ("copies", "256 MiB up and down", 60),
    ("streams", "two streams", 60),
    ("processes", "two processes on one GPU", 60),
    ("nccl", "NCCL between two GPUs", 60),
    ("compiled", "torch.compile of GPT-2, small and tiny, here and on a worker", 600),
)


class Row(NamedTuple):
    """How one check or figure ended."""

    number: str
    what: str
    result: str
    seconds: float


class Child:
    """The process that runs the checks. Another one takes its place when it had to be ended."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = os.pipe()
        command = [sys.executable, "-u", str(HERE / "child.py"), str(theirs), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            pass_fds=[theirs],
            text=True,
            start_new_session=True,
        )
        os.close(theirs)
        self._results = os.fdopen(ours)
        listed = self._line(STARTING)
        if not listed:
            self.end()
            raise SystemExit(f"the process of the checks did not start within {STARTING} s: see above")
        self.checks = [Described(*row) for row in json.loads(listed)]

    def run(self, number: int, seconds: float) -> tuple[str, str, float]:
        """Let it run a check; return how that ended."""
        began = time.monotonic()
        assert self.process.stdin is not None
        try:
            print(number, file=self.process.stdin, flush=True)
            line = self._line(seconds)
        except BrokenPipeError:
            # It has ended, and its code says how.
            line = ""
        if line:
            outcome, why, took = json.loads(line)
            return outcome, why, took
        took = time.monotonic() - began
        if line is None:
            self._show_stacks()
            return "failed", f"hangs: it has not ended within {seconds:.0f} s", took
        return "failed", f"the process of the checks ended with code {self.process.wait(30)}", took

    def _line(self, seconds: float) -> str | None:
        """Return the next line of its results, "" if it has ended, None if it takes longer."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._results, selectors.EVENT_READ)
            return self._results.readline() if selector.select(seconds) else None

    def _show_stacks(self) -> None:
        print("    its threads:", flush=True)
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)

    def end(self) -> None:
        """End it. Its workers end with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        for file in (self.process.stdin, self._results):
            try:
                file.close()
            except BrokenPipeError:
                # A number that it has not read was still to be sent.
                pass


class Run:
    """One run of the checks and figures."""

    def __init__(self, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self.options, self.environment = options, environment
        self.simulated = bool(options.simulate_cuda or options.device)
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self._child: Child | None = None
        self._narrow = False

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.options.minutes * 60 - (time.monotonic() - self.began)

    def for_checks(self) -> float:
        """Return the seconds that are left for checks."""
        return self.left() - (0 if self.options.only else KEPT_FOR_FIGURES)

    def child(self, one_card: bool) -> Child:
        """Return the process that runs checks, with one GPU in its sight or with all."""
        if self._child is None or self._narrow != one_card:
            self.end()
            arguments = ["--simulate-cuda", str(self.options.simulate_cuda)] * bool(
                self.options.simulate_cuda
            )
            arguments += ["--quick"] * (self.simulated or self.options.quick)
            environment = dict(self.environment)
            if one_card:
                for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
                    environment[variable] = environment.get(variable, "0").split(",")[0] or "0"
            self._child, self._narrow = Child(arguments, environment), one_card
        return self._child

    def end(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def checks(self, chosen: Sequence[int]) -> None:
        """Run the checks."""
        for check in self.child(False).checks:
            if check.number not in chosen:
                continue
            print(f"\n{check.number}. {check.name}: {check.does}", flush=True)
            failed = [
                row for row in self.rows if row.number in map(str, FIRST) and row.result.startswith("failed")
            ]
            if failed:
                outcome, why, took = "left out", f"because check {failed[0].number} failed", 0.0
            elif self.for_checks() < 15:
                outcome, why, took = "left out", "because the time is over", 0.0
            else:
                # To start it takes some seconds, which count for no check.
                child = self.child(check.one_card)
                outcome, why, took = child.run(check.number, min(check.seconds + 15, self.for_checks()))
                if outcome == "failed" and (why.startswith("hangs") or child.process.poll() is not None):
                    self.end()
            if outcome == "failed":
                print(f"    FAILED: {why}\n    What it means: {check.failure}", flush=True)
            else:
                print(f"    {outcome}{f': {why}' if why and outcome != 'ok' else ''}", flush=True)
            between = "; left out: " if outcome == "ok" else ": "
            self.rows.append(Row(str(check.number), check.name, f"{outcome}{between * bool(why)}{why}", took))
        self.end()

    def figures(self) -> None:
        """Run the figures, each in a process of its own."""
        print("\nFigures", flush=True)
        for name, what, seconds in FIGURES:
            print(f"\n{what}:", flush=True)
            began = time.monotonic()
            limit = min(seconds, self.left())
            if any(row.result.startswith("failed") and row.number in map(str, FIRST) for row in self.rows):
                result = "left out: because nothing works yet"
            elif limit < 10:
                result = "left out: because the time is over"
            else:
                result = self._figure(name, limit)
            print(f"    {result}", flush=True)
            self.rows.append(Row("", what, result, time.monotonic() - began))

    def _figure(self, name: str, seconds: float) -> str:
        arguments = ["--tiny"] if self.simulated else ["--quick"] if self.options.quick else []
        if self.options.simulate_cuda:
            arguments += ["--simulate-cuda", str(self.options.simulate_cuda)]
        command = [sys.executable, "-m", "benchmarks.gpu", name, *arguments]
        process = subprocess.Popen(command, env=self.environment, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"failed: not ended within {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return {0: "ok", 3: "failed: on the wrong side of its bar", 4: "left out: see above"}.get(
            code, f"failed: ended with code {code}, see above"
        )


def environment_for(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the children."""
    paths = [ROOT, ROOT / "worker", ROOT / "tests" / "help", *([wheels.SITE] if wheels.SITE.exists() else [])]
    environment = {**os.environ, "DISTRUNTIME_TEST_GPUS": "1", "DISTRUNTIME_QUIET": "1"}
    # A run without a network tries none.
    environment.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
    # The operator database draws some samples from sets of strings, and two processes compare what they drew.
    environment.setdefault("PYTHONHASHSEED", "0")
    if options.device:
        paths.append(Path(options.device).resolve())
        # The workers load the backend, and this process's own torch has none but "remote".
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    given = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *([given] if given else [])])
    return environment


def prepare() -> str:
    """Install wheels that were brought; return what stops the run, or ""."""
    problem = wheels.torch_problem(wheels.installed("torch"))
    if problem:
        return problem
    if wheels.SITE.exists():
        sys.path.append(str(wheels.SITE))
    brought = wheels.bring()
    if brought:
        print(f"installed {len(brought)} wheels of {wheels.FOLDER} into {wheels.SITE}")
        if str(wheels.SITE) not in sys.path:
            sys.path.append(str(wheels.SITE))
    lacking = wheels.missing(wheels.REQUIRED)
    return wheels.advice(lacking + wheels.missing(wheels.OPTIONAL)) if lacking else ""


def report(rows: Sequence[Row]) -> str:
    """Return the table, and a line that counts."""
    sys.path[:0] = [str(ROOT)]
    # It comes with a package that has been found by now.
    from distruntime.session.tables import table_text

    head = ["", "what", "result", "seconds"]
    body = [[row.number, row.what, _short(row.result), f"{row.seconds:.1f}"] for row in rows]
    counts = {word: sum(row.result.startswith(word) for row in rows) for word in ("ok", "failed", "left out")}
    return f"{table_text([head, *body])}\n\n" + ", ".join(f"{count} {word}" for word, count in counts.items())


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", choices=NUMBERS, help="run these checks only"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--minutes", type=float, default=10, metavar="M", help="leave out what comes later")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--simulate-cuda", type=int, default=0, metavar="N", help="simulate N GPUs with CPU tensors"
    )
    where.add_argument("--device", metavar="FOLDER", help="a folder that brings a torch backend")
    options = parser.parse_args()
    problem = prepare()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    for package in wheels.missing(wheels.OPTIONAL):
        print(f"there is no {package.name}: {package.needed_for} are left out")
    run = Run(options, environment_for(options))
    try:
        run.checks(options.only or NUMBERS)
        if not options.only:
            run.figures()
    finally:
        run.end()
    print(f"\n{report(run.rows)}, in {(time.monotonic() - run.began) / 60:.1f} minutes", flush=True)
    return int(any(row.result.startswith("failed") for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
