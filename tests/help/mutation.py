"""Small mistakes in a copy of the tree, and which tests notice them."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Nothing but these lines tells of a test: pytest's exit code also says that a run has left a process behind.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
# A mistake may let a test wait for ever, so a test has so many seconds, and so have all of a mutant's tests.
_TEST_LIMIT, _LIMIT = 90, 600


class Mutant(NamedTuple):
    """In `file` the text `old`, which stands there once, becomes `new`; then one of `tests` must fail.

    `tests` are test files, folders of tests, or single tests. `by` is the test that has noticed it once;
    where it is empty, none has.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    by: str = ""


class Outcome(NamedTuple):
    """What became of a mutant: the first test that failed, or an empty text, and what pytest has said."""

    mutant: Mutant
    test: str
    said: str


class Tree:
    """A copy of the tree, in which one mutant after the other is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            # One that is deleted and not committed is listed, too.
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._changes = 0

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Let the mutant's file have its mistake until the block ends."""
        file = self._folder / mutant.file
        text, before = file.read_text(encoding="utf-8"), file.stat()
        self._changes += 1
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        # Python takes compiled code for current if size and second agree. So no two texts share a second.
        os.utime(file, (before.st_atime, before.st_mtime + self._changes))
        try:
            yield
        finally:
            file.write_text(text, encoding="utf-8")
            os.utime(file, (before.st_atime, before.st_mtime))

    def failing(
        self, tests: Sequence[str], environment: Mapping[str, str], options: Sequence[str], limit: float
    ) -> tuple[list[str], str]:
        """Run tests here. Return those that fail, and what pytest has said."""
        paths = [str(self._folder), str(self._folder / "worker"), str(self._folder / "tests" / "help")]
        # Whoever tidies the folder for temporary files leaves this one, which is in use.
        temporary = self._folder.with_name(f"{self._folder.name}t")
        temporary.mkdir(exist_ok=True)
        own = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(temporary)}
        own |= {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "200"}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-m", "not slow"),
                *("-p", "no:cacheprovider", f"--timeout={_TEST_LIMIT}", *options, *tests),
            ],
            env={**environment, **own},
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Pytest's own children end with it.
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            said += f"\nthe tests did not end within {limit:g} s"
        return _FAILED.findall(said), said


def stale(mutants: Iterable[Mutant]) -> list[str]:
    """Return a line for each mutant that does not fit: its text does not stand once in its file, or it names
    tests that are not there.
    """
    found = []
    for mutant in mutants:
        file = ROOT / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else 0
        if count != 1:
            found.append(f"{mutant.name}: {mutant.file} has {count} times: {mutant.old}")
        missing = [test for test in mutant.tests if not (ROOT / test.partition("::")[0]).exists()]
        found += [f"{mutant.name}: there is no {test}" for test in missing]
    return found


def tried(
    mutants: Sequence[Mutant],
    environment: Mapping[str, str] | None = None,
    jobs: int = 2,
    options: Sequence[str] = (),
    limit: float = _LIMIT,
) -> Iterator[Outcome]:
    """Yield what becomes of each mutant, in order. Raise `ValueError` for mutants that do not fit the tree.

    A test that fails without the mutant, too, is none that has noticed it. So those that have failed run
    again at the end, in a tree without mistakes. What one of them has noticed that fails there is yielded
    once more, without a test.
    """
    if wrong := stale(mutants):
        raise ValueError("\n".join(wrong))
    around = os.environ if environment is None else environment
    with tempfile.TemporaryDirectory(prefix="mut", ignore_cleanup_errors=True) as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for k in range(jobs):
            trees.put(Tree(Path(folder) / str(k)))

        def attempt(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                with tree.changed(mutant):
                    failing, said = tree.failing(mutant.tests, around, ["-x", *options], limit)
                return Outcome(mutant, failing[0] if failing else "", said)
            finally:
                trees.put(tree)

        outcomes = []
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(attempt, mutants):
                outcomes.append(outcome)
                yield outcome
        tree, suspects = (
            trees.get(),
            list(dict.fromkeys(outcome.test for outcome in outcomes if outcome.test)),
        )
        # One may fail beside tests of other rooms only, in whose session it finds itself.
        together, _ = tree.failing(suspects, around, options, 4 * limit) if suspects else ([], "")
        for test in together:
            alone, said = tree.failing([test], around, options, limit)
            if alone:
                yield from (o._replace(test="", said=said) for o in outcomes if o.test == test)
