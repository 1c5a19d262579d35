"""Pages that can be typed: their blocks, what these print, and what of that differs from run to run."""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from processes import ROOT

# It types the blocks of a page from one of them on, and says which one comes before what it prints. It types
# the examples of a prompt one by one, and compares what each of them prints.
TYPE = """
import json, sys
names = {"__name__": "__main__"}
for number, source, mode in json.loads(sys.argv[1]):
    print(f"\\x1e{number}")
    exec(compile(source, f"block {number}", mode), names)
"""


def typed(page: str) -> list[tuple[str, str, str]]:
    """Return what a page has one type: the code, how Python compiles it, and what the page says it prints."""
    found = []
    for block in re.finditer(r"^```(python|pycon)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", page, re.M | re.S):
        language, text, shows = block.groups()
        if language == "python":
            found.append((text, "exec", shows or ""))
        else:
            examples = doctest.DocTestParser().get_examples(text)
            found += [(example.source, "single", example.want) for example in examples]
    return found


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of who types a page: all that a session keeps is in the folder."""
    found = {
        **os.environ,
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
        **variables,
    }
    found.pop("DISTRUNTIME_QUIET", None)
    return found


def _run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; errors go where its output goes."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )


def type_all(blocks: list[tuple[str, str, str]], folder: Path, **variables: str) -> list[str]:
    """Return what each block prints.

    A process that ends or kills itself is followed by another one, which goes on.
    """
    printed: list[str] = []
    while len(printed) < len(blocks):
        rest = [(k, code, mode) for k, (code, mode, _) in enumerate(blocks)][len(printed) :]
        done = _run([sys.executable, "-u", "-c", TYPE, json.dumps(rest)], folder, **variables)
        parts = re.split(r"\x1e(\d+)\n", done.stdout)
        assert parts[0] == "" and [int(number) for number in parts[1::2]] == [
            k for k, *_ in rest[: len(parts) // 2]
        ]
        printed += parts[2::2]
        killed = done.returncode == -signal.SIGKILL and "os.kill(" in blocks[len(printed) - 1][0]
        assert killed or done.returncode == 0, f"{blocks[len(printed) - 1][0]}\n{parts[-1]}"
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
    figure = r"-?\d+\.\d*(e[-+]?\d+)?|(?<=, up )[^,]+"
    return [re.sub(r"\s+", " ", re.sub(figure, "#", line)).strip() for line in lines]


@dataclass(frozen=True)
class Step:
    """What a page has one do: type lines at a prompt, write a file, or give a command to a shell.

    `shows` is what the page says that it prints.
    """

    kind: str
    text: str
    shows: str


def steps(page: str) -> list[Step]:
    """Return what a page has one do, in its order.

    A block of Python whose first line is `# NAME.py` is the file of this name. A line of a console that
    begins with `$` is a command, and the lines below it are what it prints.
    """
    found: list[Step] = []
    for block in re.finditer(r"^```(python|pycon|console)\n(.*?)^```\n", page, re.M | re.S):
        language, text = block.groups()
        if language == "python":
            found.append(Step("file", text, ""))
        elif language == "pycon":
            examples = doctest.DocTestParser().get_examples(text)
            found += [Step("prompt", example.source, example.want) for example in examples]
        else:
            for command in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
                found.append(Step("command", *command.groups()))
    return found


def follow(page: list[Step], folder: Path, **variables: str) -> list[str]:
    """Do what a page has one do, in this folder. Return what each step prints.

    A failure of a command fails the test, with all that it has printed.
    """
    printed: list[str] = []
    while len(printed) < len(page):
        step = page[len(printed)]
        if step.kind == "prompt":
            rest = takewhile(lambda one: one.kind == "prompt", page[len(printed) :])
            printed += type_all([(one.text, "single", one.shows) for one in rest], folder, **variables)
        elif step.kind == "file":
            (folder / step.text.splitlines()[0].removeprefix("# ")).write_text(step.text, encoding="utf-8")
            printed.append("")
        else:
            done = _run(["sh", "-c", step.text], folder, **variables)
            assert done.returncode == 0, f"{step.text}\n{done.stdout}"
            printed.append(done.stdout)
    return printed
