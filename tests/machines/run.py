"""Run the suite on machines that are unlike this one, each made of it. `make test-machines`.

    python tests/machines/run.py             under each condition, the tests that it can touch
    python tests/machines/run.py NAME ...    under these conditions
    python tests/machines/run.py --all       under each, everything that `make test` runs: hours
    python tests/machines/run.py --list      print them
    python tests/machines/run.py NAME -- -k keys -x       what stands behind `--` goes to pytest

A condition that cannot be made here says so, and fails nothing. Some take root, `unshare` and Linux. What the
tests have printed is in `build/machines/`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conditions import CONDITIONS, Condition

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "machines"
CANNOT = "cannot run here: "
PROCESSES = 2
# So many seconds has a test that names no others: the conditions and the neighbours of this machine slow it.
LIMIT = 600
# A user and a group that own nothing, and have no name.
NOBODY = 54321
# A process that computes, and ends with the one that has started it.
_LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(1_000_000))"


def missing(condition: Condition) -> str:
    """Return why a condition cannot be made here; nothing if it can."""
    if not sys.platform.startswith("linux"):
        return "it takes Linux"
    flags = set(re.findall(r"\w+", _line_of_cpuinfo()))
    if condition.flags and not flags & set(condition.flags):
        return f"this processor has none of {', '.join(condition.flags)}, so it would change nothing"
    inside = condition.namespaces or condition.nobody
    if inside and os.geteuid() != 0:
        return "it takes root"
    needed = shlex.split(condition.prefix)[:1]
    needed += ["unshare"] if inside else []
    needed += ["setpriv"] if condition.nobody else []
    needed += ["git"] if condition.clone else []
    needed += ["ip"] if "n" in condition.namespaces else []
    without = [name for name in needed if shutil.which(name) is None]
    if without:
        return f"there is no {', '.join(without)}"
    if inside:
        words = ["unshare", f"-{_letters(condition)}", "true"]
        tried = subprocess.run(words, capture_output=True, text=True)
        if tried.returncode:
            return tried.stderr.strip()
    return ""


def _line_of_cpuinfo() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _letters(condition: Condition) -> str:
    # Python may stand in a folder that only root may enter. Mounts show it to the other user.
    return condition.namespaces or ("m" if condition.nobody else "")


def clone(target: Path) -> str:
    """Copy this tree, as git knows it and as it is, with a venv. Return that venv's Python."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(target)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        here, there = ROOT / name, target / name
        if here.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, there)
        else:
            there.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target / ".venv")], check=True)
    # The libraries are this venv's. A line of a `.pth` file is a path from there, and such files at
    # that path do not count. So distruntime is the clone's.
    (packages,) = (target / ".venv" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    here = os.path.relpath(target, packages)
    lines = [here, os.path.join(here, "worker"), *ours]
    (packages / "clone.pth").write_text("\n".join(lines) + "\n", encoding=sys.getfilesystemencoding())
    return str(target / ".venv" / "bin" / "python")


def revealed(folder: Path, paths: Sequence[str]) -> list[str]:
    """Return lines that show these folders to every user, where one above them is closed to others."""
    lines, closed = [], {}
    for path in paths:
        above = [one for one in reversed(Path(path).parents) if not one.stat().st_mode & 0o001]
        if above:
            closed.setdefault(above[0], []).append(path)
    for k, (top, hidden) in enumerate(closed.items()):
        kept = [(f"{folder}/kept-{k}-{j}", shlex.quote(path)) for j, path in enumerate(hidden)]
        lines += [f"mkdir {there} && mount --bind {path} {there}" for there, path in kept]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}"]
        lines += [f"mkdir -p {path} && mount --bind {there} {path}" for there, path in kept]
    return lines


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Let so many processes compute meanwhile."""
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", _LOOP])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextmanager
def made(condition: Condition) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Make a condition. Yield the words that stand before those of pytest, the environment, and the tree."""
    # Addresses of sockets have at most 107 letters, so the name is short.
    folder = Path(tempfile.mkdtemp(prefix="drm-"))
    try:
        folder.chmod(0o755)
        fill = {"folder": str(folder), "core": str(min(os.sched_getaffinity(0)))}
        environment = {name: value for name, value in os.environ.items() if name not in condition.without}
        environment |= {name: value.format(**fill) for name, value in condition.environment.items()}
        python, tree = sys.executable, ROOT
        if condition.clone:
            tree = Path(condition.clone.format(**fill))
            python = clone(tree)
        lines = [line.replace("{folder}", str(folder)) for line in condition.prepare]
        before = [word.format(**fill) for word in shlex.split(condition.prefix)]
        if condition.nobody:
            home = folder / "home"
            home.mkdir()
            named = ("LOGNAME", "USER", "LNAME", "USERNAME")
            environment = {name: value for name, value in environment.items() if name not in named}
            environment["HOME"] = str(home)
            for path in (tree, home):
                subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(path)], check=True)
            shown = dict.fromkeys([sys.base_prefix, sys.prefix])
            lines += revealed(folder, list(shown))
            before += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        if lines:
            before = ["sh", "-c", " &&\n".join([*lines, 'exec "$@"']), "sh", *before]
        if letters := _letters(condition):
            before = ["unshare", f"-{letters}", *before]
        yield [*before, python], environment, tree
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(condition: Condition, everything: bool, words: Sequence[str]) -> bool:
    """Run the tests under a condition; print what became of them. Return whether none failed."""
    if reason := missing(condition):
        print(f"{condition.name}: {CANNOT}{reason}", flush=True)
        return True
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{condition.name}.txt"
    chosen = [] if everything else condition.tests.split()
    pytest = ["-m", "pytest", "-q", "-rs", f"--timeout={LIMIT}", "-m", "not slow", "-n", str(PROCESSES)]
    pytest += ["--dist", "worksteal", *dict.fromkeys(chosen), *words]
    began = time.monotonic()
    with made(condition) as (before, environment, tree), neighbours(condition.busy), log.open("wb") as output:
        status = subprocess.run(
            [*before, *pytest],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    seconds = time.monotonic() - began
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if status:
        print(
            *(line for line in lines if line.startswith(("FAILED ", "ERROR ", "the suite has left"))),
            sep="\n",
        )
    told = f"{'FAILED' if status else 'ok'}: {counts(lines)}"
    print(
        f"{condition.name} ({condition.what}): {told}, {seconds:.0f} s, see {log.relative_to(ROOT)}",
        flush=True,
    )
    return not status


def counts(lines: Sequence[str]) -> str:
    """Return what pytest's last line says: how many have passed, failed and been skipped."""
    last = next((line for line in reversed(lines) if re.search(r"\d+ \w+ in [\d.]+s", line)), "")
    found = {name: number for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    names = ("passed", "failed", "skipped", *(["error"] if "error" in found else []))
    return ", ".join(f"{found.get(name, 0)} {name}" for name in names)


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(one.name for one in CONDITIONS))
    parser.add_argument("--all", action="store_true", help="everything that `make test` runs")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    options = parser.parse_args(arguments[:at])
    if unknown := set(options.names) - {one.name for one in CONDITIONS}:
        parser.error(f"there is no condition {', '.join(sorted(unknown))}")
    chosen = [one for one in CONDITIONS if not options.names or one.name in options.names]
    if options.list:
        for one in chosen:
            print(f"{one.name}: {one.what}" + (f" ({CANNOT}{why})" if (why := missing(one)) else ""))
        return 0
    # Who ends this must not leave the tests behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return 0 if all([run(one, options.all, arguments[at + 1 :]) for one in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
