"""Runs scripts of other people's repositories here and on a worker, and compares what they print.

    python tests/scripts/run.py FOLDER [part of a name ...] [--page docs/tables/ecosystem.md]

list.toml names the scripts, and FOLDER has the clones of their repositories, as OWNER/NAME. What is missing
there is cloned. Each script runs in a fresh copy of its repository's commit, with small data that data.py
writes: on this machine's CPU, by `python -m distruntime run --as-cuda`, and, where its user names a device,
by `python -m distruntime run` with "remote". Nothing of it is changed. The exit status is 1 if a result is
worse than the list says. `build/scripts.json` keeps the rows: a page can be written from several runs.
`build/scripts/` has what each script has said.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ECOSYSTEM = HERE.parent / "ecosystem"
sys.path += [str(HERE), str(ECOSYSTEM)]

import compare  # noqa: E402
import programs  # noqa: E402

KEPT = ROOT / "build" / "scripts.json"
MARK = "table of scripts of others"
# Seconds of one run.
PATIENCE = 240.0
SETTINGS = {
    "HF_DATASETS_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "MPLBACKEND": "agg",
    # Processes of Inductor's would hold the output open behind a script that was interrupted.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
Numbers = dict[str, list[float | str]]
# What depends on the clock is no result.
CLOCK = re.compile(r"time|sec|fps|sps|speed|throughput", re.IGNORECASE)


@dataclass(frozen=True)
class Script:
    """An entry of list.toml, which says what each of these is."""

    repository: str
    run: str
    result: str
    folder: str = "."
    without: Sequence[str] = ()
    data: dict[str, str] = field(default_factory=dict)
    preamble: str = ""
    path: str = ""
    files: Sequence[str] = ()
    close: float = 1e-4
    why_close: str = ""
    until: str = ""
    few: int = programs.FEW
    fails: str = ""
    label: str = ""
    cuda: str = ""

    @property
    def name(self) -> str:
        """The script's path in its repository, with what tells an entry from others of one script."""
        path = self.run.split()[0]
        path = path if self.folder == "." else f"{self.folder}/{path}"
        return f"{path} {self.label}" if self.label else path

    @property
    def key(self) -> str:
        return f"{self.repository} {self.name}"


@dataclass
class Run:
    """What one run has come to."""

    numbers: Numbers
    seconds: float
    error: str = ""
    values: int = 0
    waits: int = 0
    pretended: str = ""
    output: str = ""


@dataclass
class Row:
    """What became of a script."""

    repository: str
    name: str
    result: str
    why: str
    values: int = 0
    waits: int = 0
    here: float = 0.0
    there: float = 0.0
    own: str = ""
    preamble: str = ""
    pretended: str = ""
    expected: bool = False

    @property
    def settled(self) -> bool:
        return self.result == compare.WORKS or self.expected

    @property
    def worse(self) -> bool:
        return self.result not in (compare.WORKS, compare.NOT_RUN) and not self.expected

    def cells(self) -> list[str]:
        result = f"{self.result}: {self.why}" if self.why else self.result
        time = f"{self.here:.0f} s, {self.there:.0f} s" if self.there else ""
        counts = [str(self.values), str(self.waits), time] if self.there else ["", "", ""]
        return [self.repository, self.name, result, self.own, *counts, self.preamble, self.pretended]


HEADING = [
    *("repository", "script", "result", "with its own device"),
    *("values there", "waits", "here, there", "preamble", "only pretended"),
]
ALIKE = ("repository", "result", "with its own device", "preamble")


# -- clones -----------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)


def clone(repository: str, commit: str, clones: Path) -> str:
    """Bring a repository's commit into the folder of clones. Return why it cannot be had, or nothing."""
    folder = clones / repository
    address = f"https://github.com/{repository}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"cloning {address}", flush=True)
        done = git(clones, "clone", "--quiet", "--no-checkout", address, str(folder))
        if done.returncode:
            return f"it cannot be cloned: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}"
    if git(folder, "cat-file", "-e", commit).returncode and git(folder, "fetch", "origin", commit).returncode:
        return f"{folder} has no commit {commit[:8]}, and it cannot be fetched"
    return ""


def unpack(script: Script, commit: str, clones: Path, folder: Path) -> None:
    """Write the part of a commit that a script needs into a folder."""
    parts = [script.folder, *(f":(exclude){script.folder}/{part}" for part in script.without)]
    packed = subprocess.run(
        ["git", "-C", str(clones / script.repository), "archive", commit, *parts],
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)


# -- one run ----------------------------------------------------------------------------------------------


def command(script: Script, mode: str) -> list[str]:
    """Return how a script is run: "here", by "--as-cuda", or with its "own" word for a device."""
    device = {"here": "cpu", "as_cuda": "cuda", "own": "remote"}[mode]
    ours = {
        "here": (),
        "as_cuda": ("-m", "distruntime", "run", "--as-cuda"),
        "own": ("-m", "distruntime", "run"),
    }
    before = (str(HERE / "preamble.py"), script.preamble) if script.preamble else ()
    words = script.run if mode == "here" else f"{script.run} {script.cuda}"
    return [sys.executable, *ours[mode], *before, *shlex.split(words.replace("{device}", device))]


def environment(script: Script, copy: Path) -> dict[str, str]:
    paths = [str(copy / script.path)] if script.path else []
    paths += [str(ECOSYSTEM / "site"), str(ROOT), str(ROOT / "worker"), os.environ.get("PYTHONPATH", "")]
    # The line at the end of a run says how much was remote.
    ours = {name: value for name, value in compare.ENVIRONMENT.items() if name != "DISTRUNTIME_QUIET"}
    others = {name: value for name, value in os.environ.items() if name != "DISTRUNTIME_QUIET"}
    return {**others, **ours, **SETTINGS, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def output(process: subprocess.Popen[str], until: str) -> Iterator[str]:
    """Yield the lines of a process, and interrupt it at the first one that matches."""
    assert process.stdout is not None
    going = bool(until)
    for line in process.stdout:
        yield line
        if going and re.search(until, line):
            going = False
            os.killpg(process.pid, signal.SIGINT)


def make(script: Script, made: Path) -> str:
    """Make a script's data, each kind in a folder. Return why it cannot be made, or nothing."""
    if not script.data:
        return ""
    # Some come from libraries, which a process of their own imports as the script does.
    words = [word for name in script.data for word in (name, str(made / name))]
    done = subprocess.run(
        [sys.executable, str(HERE / "data.py"), *words],
        env=environment(script, made),
        capture_output=True,
        text=True,
        check=False,
    )
    return f"its data cannot be made: {last_words(done.stderr)}" if done.returncode else ""


def run(script: Script, mode: str, commit: str, clones: Path, made: Path) -> Run:
    """Run a script in a fresh copy, with data that were made, as its user would."""
    with ExitStack() as away, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        copy = Path(temporary) / "copy"
        copy.mkdir()
        unpack(script, commit, clones, copy)
        folder = copy / script.folder
        for name, where in script.data.items():
            shutil.copytree(made / name, folder / where, dirs_exist_ok=True)
            if Path(where).is_absolute():
                away.callback(shutil.rmtree, where)
        began = time.monotonic()
        process = subprocess.Popen(
            command(script, mode),
            cwd=folder,
            # What a script leaves goes with the folder, also what its libraries keep at home.
            env={
                **environment(script, copy),
                "TMPDIR": temporary,
                "XDG_CACHE_HOME": temporary,
                "HF_HOME": temporary,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        clock = threading.Timer(PATIENCE, end)
        clock.start()
        with process:
            try:
                said = "".join(output(process, script.until))
            except BaseException:
                # Whoever ends the lane ends the script, which is the first of a session of its own.
                end()
                raise
        clock.cancel()
        seconds = time.monotonic() - began
        found = numbers(script, before(script.until, said), folder)
    if os.environ.get("ECOSYSTEM_VERBOSE"):
        print(mode, said[-6000:], sep="\n", file=sys.stderr)
    error = f"it ran longer than {PATIENCE:g} s" if late.is_set() else ""
    stopped = bool(script.until and re.search(script.until, said, re.MULTILINE))
    if not error and process.returncode and not stopped:
        error = last_words(said) or f"the process ended with status {process.returncode}"
    summary = programs.SUMMARY.search(said)
    values, waits, pretended = summary.groups() if summary else ("0", "0", "")
    names = pretended.removeprefix("Only pretended: ") if pretended.startswith("Only") else ""
    return Run(found, seconds, error, int(values), int(waits), names, said)


def before(until: str, said: str) -> str:
    """Leave out what a script says behind the line that interrupts it: how much that is, chance decides."""
    found = re.search(until, said, re.MULTILINE) if until else None
    return said if found is None else said[: found.end()] + said[found.end() :].partition("\n")[0]


def last_words(said: str) -> str:
    """Return the error that a script has ended with."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not programs.SUMMARY.search(line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (errors or lines or [""])[-1][:300]


def numbers(script: Script, said: str, folder: Path) -> Numbers:
    """Return the results in what a script has printed and written, by their kinds."""
    found: Numbers = {}
    texts = [said]
    for pattern in script.files:
        for file in sorted(folder.glob(pattern)):
            if ".tfevents." in file.name:
                found.update(scalars(file))
            elif file.suffix == ".json":
                leaves(json.loads(file.read_text(encoding="utf-8")), file.name, found)
            elif file.suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors"):
                leaves(weights(file), file.name, found)
            else:
                texts.append(file.read_text(encoding="utf-8"))
    for match in (m for text in texts for m in re.finditer(script.result, text, re.MULTILINE)):
        for k, word in enumerate(match.groups() or (match.group(),)):
            if word is not None:
                found.setdefault(str(k), []).append(number(word))
    return found


def number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def scalars(file: Path) -> Numbers:
    """Read what a script has told TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not CLOCK.search(name)]
    return {name: [event.value for event in events.Scalars(name)] for name in names}


def weights(file: Path) -> object:
    import torch

    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=False)


def leaves(value: object, name: str, found: Numbers) -> None:
    """Note the numbers in nested lists and dicts; of a tensor, its sum and its norm."""
    import torch

    if isinstance(value, dict):
        for key, item in value.items():
            if not CLOCK.search(str(key)):
                leaves(item, f"{name} {key}", found)
    elif isinstance(value, list | tuple):
        for item in value:
            leaves(item, name, found)
    elif isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        found.setdefault(name, []).extend([value.double().sum().item(), value.double().norm().item()])
    elif isinstance(value, int | float):
        found.setdefault(name, []).append(float(value))


# -- the comparison ---------------------------------------------------------------------------------------


def judge(script: Script, here: Run, there: Run) -> tuple[str, str, bool]:
    """Return the result of a run on a worker, why, and whether the list says so."""
    if "ModuleNotFoundError" in here.error:
        return compare.NOT_RUN, here.error, False
    if here.error:
        return compare.FAILS, f"here too: {here.error}", False
    if not any(here.numbers.values()):
        return compare.FAILS, "here it has printed no result", False
    if there.error:
        expected = bool(script.fails and re.search(script.fails, there.output))
        return compare.FAILS, there.error, expected
    if there.values < script.few:
        return compare.HERE, f"{there.values} values were made on the worker", False
    worst = compare.difference(here.numbers, there.numbers)
    if worst > script.close or math.isnan(worst):
        return compare.DIFFERS, f"by {worst:.1e} of the largest number", False
    same = "the same numbers" if worst == 0 else f"the same to {worst:.0e}"
    return compare.WORKS, f"{same}; {script.why_close}" if script.why_close else same, False


def own(script: Script, here: Run, commit: str, clones: Path, made: Path) -> str:
    """Return what a script's own word for a device comes to; nothing if it takes none."""
    if "{device}" not in script.run or here.error:
        return ""
    there = run(script, "own", commit, clones, made)
    worst = compare.difference(here.numbers, there.numbers)
    if there.error or worst > script.close:
        return there.error or f"differs by {worst:.1e}"
    return "the same numbers" if worst == 0 else f"the same to {worst:.0e}"


def tried(script: Script, commit: str, clones: Path, only: bool) -> Row:
    """Run a script in each way."""
    if reason := clone(script.repository, commit, clones):
        return Row(script.repository, script.name, compare.NOT_RUN, reason)
    # A script that names a folder outside its own gets data there if nobody has it. They go again.
    for where in script.data.values():
        if Path(where).is_absolute() and Path(where).exists():
            return Row(script.repository, script.name, compare.NOT_RUN, f"{where} is there already")
    with tempfile.TemporaryDirectory() as temporary:
        made, copy = Path(temporary) / "made", Path(temporary) / "copy"
        made.mkdir()
        copy.mkdir()
        try:
            unpack(script, commit, clones, copy)
        except subprocess.CalledProcessError:
            reason = f"{clones / script.repository} has not all files of commit {commit[:8]}"
            return Row(script.repository, script.name, compare.NOT_RUN, reason)
        if reason := make(script, made):
            return Row(script.repository, script.name, compare.FAILS, reason)
        here = run(script, "here", commit, clones, made)
        there = run(script, "as_cuda", commit, clones, made)
        other = "" if only else own(script, here, commit, clones, made)
    result, why, expected = judge(script, here, there)
    log(script, here, there)
    counts = (there.values, there.waits, here.seconds, there.seconds)
    return Row(
        *(
            script.repository,
            script.name,
            result,
            why,
            *counts,
            other,
            script.preamble,
            there.pretended,
            expected,
        )
    )


def log(script: Script, *runs: Run) -> None:
    """Keep what a script has said, for who looks for the cause of a failure."""
    file = KEPT.parent / "scripts" / f"{re.sub(r'[^a-zA-Z0-9.-]+', '_', script.key)}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"{run.output}\n{json.dumps(run.numbers)}\n" for run in runs]
    file.write_text(f"{'-' * 80}\n".join(texts), encoding="utf-8")


def summary(rows: Sequence[Row], missing: int) -> str:
    works = sum(row.result == compare.WORKS for row in rows)
    silent = sum(row.result == compare.HERE for row in rows)
    repositories = len({row.repository for row in rows})
    words = (
        f"{len(rows)} scripts of {repositories} repositories: {works} work as written, {silent} stay here, "
    )
    return f"{words}{len(rows) - works - silent} do not." + (f" {missing} have not run." if missing else "")


def read(path: Path) -> tuple[list[Script], dict[str, str]]:
    """Return the scripts of a list, and the commit of each repository."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Script(**entry) for entry in listed["scripts"]], listed["repositories"]


def kept() -> dict[str, Row]:
    if not KEPT.exists():
        return {}
    return {
        f"{line['repository']} {line['name']}": Row(**line)
        for line in json.loads(KEPT.read_text(encoding="utf-8"))
    }


def keep(rows: dict[str, Row]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the clones are, as OWNER/NAME")
    parser.add_argument("wanted", nargs="*", help="repositories, or parts of scripts' names; all without")
    parser.add_argument("--list", type=Path, default=HERE / "list.toml", help="another list")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew, from all kept rows")
    parser.add_argument(
        "--only-as-cuda", action="store_true", help="leave out the runs with a device's own word"
    )
    parser.add_argument("--kept", action="store_true", help="run only what has no row yet")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell that starts the lane in the background has it ignore what interrupts a script. So would the
    # script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scripts, commits = read(options.list)
    old, new = kept(), {}
    clones = options.folder.resolve()
    for script in scripts:
        wanted = not options.wanted or any(word in script.key for word in options.wanted)
        if not wanted or (options.kept and script.key in old and old[script.key].settled):
            continue
        row = tried(script, commits[script.repository], clones, options.only_as_cuda)
        new[script.key] = row
        keep({**kept(), script.key: row})
        print(f"{script.key}: {row.result}: {row.why} ({row.here:.0f} s, {row.there:.0f} s)", flush=True)
    old = kept()
    shown = [old[script.key] for script in scripts if script.key in (old if options.page else new)]
    words = summary(shown, len(scripts) - len(shown) if options.page else 0)
    lines = list(compare.table(shown, HEADING, ALIKE))
    print("", *lines, "", sep="\n")
    if options.page:
        compare.rewrite(options.page, lines, words, MARK)
    worse = [row for row in shown if row.worse]
    for row in worse:
        print(f"worse than expected: {row.repository} {row.name}: {row.result}: {row.why}")
    print(f"scripts: {words}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
