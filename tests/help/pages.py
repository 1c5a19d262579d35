"""Pages that can be typed: their steps, what these print, and what of that differs from run to run."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forked_masters import start_master
from processes import ROOT

# It does the steps of a page from one of them on, in one namespace, and says which one comes before what it
# prints. A step that is no code is a file to write, or a command of a shell. A command that serves runs on
# beside the next steps, and ends with this process.
DO = """
import atexit, json, os, subprocess, sys
steps, folder, variables = json.loads({todo!r})
os.chdir(folder)
os.environ.update(variables)
if not variables["DISTRUNTIME_QUIET"]:
    del os.environ["DISTRUNTIME_QUIET"]
sys.stdout.reconfigure(write_through=True)
names = {{"__name__": "__main__"}}

def end(served):
    served.terminate()
    served.wait()

for number, kind, text in steps:
    print(f"\\x1e{{number}}")
    command = dict(args=["sh", "-c", "exec " + text if kind == "serve" else text], stdin=subprocess.DEVNULL)
    if kind == "file":
        open(text.splitlines()[0][2:], "w").write(text)
    elif kind == "command":
        subprocess.run(**command, stderr=subprocess.STDOUT, check=True)
    elif kind == "serve":
        served = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        atexit.register(end, served)
        for line in served.stdout:
            print(line, end="")
            if "listening on" in line:
                break
    else:
        exec(compile(text, f"block {{number}}", kind), names)
"""


@dataclass(frozen=True)
class Step:
    """What a page has one do.

    The kinds are code of a block ("exec") or of a prompt ("single"), a file to write, a command of a shell,
    and one that serves until it is ended. `shows` is what the page says that it prints.
    """

    kind: str
    text: str
    shows: str


def _block(language: str, text: str, shows: str) -> list[Step]:
    if language == "python":
        return [Step("file" if re.match(r"# \S+\.py\n", text) else "exec", text, shows)]
    if language == "pycon":
        return [Step("single", one.source, one.want) for one in doctest.DocTestParser().get_examples(text)]
    found = []
    for prompt, command, printed in re.findall(
        r"^(\$|#|>>>) ((?:.*\\\n)*.*)\n((?:(?!(?:\$|#|>>>) ).*\n)*)", text, re.M
    ):
        kind = "single" if prompt == ">>>" else "command"
        if re.match(r"distruntime-worker --(listen|master|config)\b(?!.*--print)", command):
            kind = "serve"
        found.append(Step(kind, command, printed))
    return [*found[:-1], Step(found[-1].kind, found[-1].text, found[-1].shows or shows)]


def steps(page: str) -> list[Step]:
    """Return what a page has one do, in its order.

    A block of Python whose first line is `# NAME.py` is the file of this name. A line of a console that
    begins with `$` is a command, and the lines below it are what it prints. A block of text right below a
    block is what that one prints.
    """
    blocks = re.findall(
        r"^```(python|pycon|console)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", page, re.M | re.S
    )
    return [step for language, text, shows in blocks for step in _block(language, text, shows)]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of who types a page: all that a session keeps is in the folder."""
    return {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "worker")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # The workers of a session end soon if the test fails before it ends the session.
        "DISTRUNTIME_KEEP": "120",
        # A value that is shown is waited for, however busy the machine is.
        "DISTRUNTIME_REPR_TIMEOUT": "60",
        "DISTRUNTIME_STATE": str(folder / "state"),
        "DISTRUNTIME_SIGNING_KEY": str(folder / "signing-key"),
        "DISTRUNTIME_TRUSTED_KEYS": str(folder / "trusted-keys"),
        "DISTRUNTIME_QUIET": "",
        **variables,
    }


def programs(folder: Path) -> str:
    """Return a PATH that begins with the programs that an installation has."""
    folder.mkdir()
    for name, words in {
        "python": [],
        "distruntime": ["-m", "distruntime"],
        "distruntime-worker": ["-m", "distruntime_worker"],
    }.items():
        (folder / name).write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n', encoding="utf-8"
        )
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def _do(todo: list[tuple[int, str, str]], folder: Path, **variables: str) -> tuple[int, str]:
    """Do steps in a process of their own. Return its exit code, and what it has printed."""
    ours = environment(folder, **variables)
    with (folder / "printed").open("w+b") as output:
        # The process that forks this one has a home and programs of its own.
        same = {
            name: os.environ[name] for name in ("HOME", "PATH", "CUDA_VISIBLE_DEVICES") if name in os.environ
        }
        master = start_master(
            DO.format(todo=json.dumps([todo, str(folder), ours])), {**os.environ, **ours, **same}, output
        )
        try:
            code = master.wait(280)
        except subprocess.TimeoutExpired:
            master.kill()
            raise
        output.seek(0)
        return code, output.read().decode()


def follow(page: list[Step], folder: Path, **variables: str) -> list[str]:
    """Do what a page has one do, in this folder. Return what each step prints.

    A process that ends or kills itself is followed by another one, which goes on. A failure fails the test,
    with all that the step has printed.
    """
    printed: list[str] = []
    while len(printed) < len(page):
        rest = [(k, step.kind, step.text) for k, step in enumerate(page)][len(printed) :]
        code, text = _do(rest, folder, **variables)
        parts = re.split(r"\x1e(\d+)\n", text)
        assert parts[0] == "" and [int(number) for number in parts[1::2]] == [
            k for k, *_ in rest[: len(parts) // 2]
        ], text
        printed += parts[2::2]
        last = page[len(printed) - 1].text
        killed = code == -signal.SIGKILL and "os.kill(" in last
        ended = code == 0 and (len(printed) == len(page) or last.startswith("exit()"))
        assert killed or ended, f"{last}\n{parts[-1]}"
    return printed


def of_any_machine(text: str) -> list[str]:
    """Leave out what differs from run to run: the machine's name, the rows of its workers, and decimals.

    A worker may be at work on what the blocks before have left to do, such as freeing memory.
    """
    text = re.sub(r"\bbusy\b", "ready", text)
    lines = [line for line in text.splitlines() if not re.match(r" \d+ +\S+ +\d+ +ready ", line)]
    lines = [line.replace(socket.gethostname(), "vm") for line in lines]
    # A dot is shown for each moment of a wait.
    lines = [re.sub(r"(?<=worker)(s?) [. ]*", r"\1 ", line) for line in lines]
    lines = [re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+", "NOW", line) for line in lines]
    figure = r"-?\d+\.\d*(e[-+]?\d+)?|(?<=, up )[^,]+|(?<=\(pid )\d+ on \w+"
    return [re.sub(r"\s+", " ", re.sub(figure, "#", line)).strip() for line in lines]
