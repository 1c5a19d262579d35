"""What is there: which Pythons a machine has, with which torch and which distruntime, and how many GPUs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigurationError
from .ssh_address import SshAddress
from .wheel import VERSION

# What the other side says to this program begins with it: a shell's start files may print as well.
MARK = "distruntime> "
LEAST_PYTHON = (3, 10)
# These are torch's versions in pyproject.toml: from the first one on, and below the second one.
LEAST_TORCH, FIRST_UNKNOWN_TORCH = (2, 11), (2, 16)
# An environment that was made for `setup=auto` is here, in the user's home.
ENVIRONMENT = ".local/share/distruntime/env"

# It runs in any Python since 2.7, and imports nothing of what it looks for: to import torch takes seconds.
# It must have no single quotes, as the shell puts it between some.
_LOOK = r"""
import json, os, re, sys
found = {"executable": sys.argv[1], "version": list(sys.version_info[:3])}
def text_of(path):
    with open(path) as file:
        return file.read()
for name in ("torch", "distruntime", "distruntime_worker"):
    try:
        from importlib.util import find_spec
        spec = find_spec(name)
        folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
        path = os.path.join(folder, "version.py")
        if folder and os.path.exists(path):
            said = re.search(r"__version__.*=\s*[\"](.+?)[\"]|__version__.*=\s*\x27(.+?)\x27", text_of(path))
            found[name] = (said.group(1) or said.group(2)) if said else "?"
        elif folder:
            found[name] = "?"
        if folder and name == "torch":
            found["site"] = os.path.dirname(folder)
    except Exception:
        # An old Python has no find_spec. What is not found here is told to the user as missing.
        pass
print("MARK" + json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python on the other machine, and the versions of what it finds; "" for what it does not find."""

    executable: str
    version: tuple[int, ...]
    torch: str
    distruntime: str
    worker: bool
    # Its torch is in this folder.
    site: str = ""

    @property
    def is_new_enough(self) -> bool:
        """Whether it is a Python that distruntime runs in."""
        return self.version >= LEAST_PYTHON

    @property
    def has_torch(self) -> bool:
        """Whether it has a torch that distruntime works with."""
        return self.torch != "" and LEAST_TORCH <= _numbers(self.torch) < FIRST_UNKNOWN_TORCH

    @property
    def is_complete(self) -> bool:
        """Whether a worker of this version can run in it."""
        return self.is_new_enough and self.has_torch and self.distruntime == VERSION and self.worker

    @property
    def steps(self) -> int:
        """How much of what is needed it has."""
        have = (self.is_new_enough, bool(self.torch), self.has_torch, bool(self.distruntime) and self.worker)
        return next((k for k, found in enumerate(have) if not found), len(have)) + self.is_complete

    @property
    def shown(self) -> str:
        """Its versions, for people."""
        python = ".".join(map(str, self.version))
        return f"Python {python}, " + (f"torch {self.torch}" if self.torch else "no torch")


def script(address: SshAddress) -> str:
    """Return the lines for a shell there that say what it has."""
    named = address.options.get("python")
    # A tilde is for the shell there.
    candidates = (
        [named.replace("~", "$HOME", 1) if named.startswith("~/") else named]
        if named
        else [f"$HOME/{ENVIRONMENT}/bin/python", "python3", "python"]
    )
    look = _LOOK.replace("MARK", MARK)
    words = " ".join(f'"{word}"' if word.startswith("$HOME") else shlex.quote(word) for word in candidates)
    return (
        f'for p in {words}; do command -v "$p" >/dev/null 2>&1 && '
        f'"$p" -c \'{look}\' "$p" </dev/null 2>/dev/null; done\n'
        f"echo '{MARK}'\"gpus $(nvidia-smi -L 2>/dev/null | grep -c '^GPU')\"\n"
        f"echo '{MARK}done'\n"
    )


def interpreters(lines: Iterable[str]) -> tuple[list[Interpreter], int]:
    """Return the Pythons that the answer names, and the number of NVIDIA's GPUs."""
    found: list[Interpreter] = []
    gpus = 0
    for line in lines:
        if line.startswith("gpus "):
            gpus = int(line[5:]) if line[5:].strip().isdecimal() else 0
        elif line.startswith("{"):
            one = _interpreter(line)
            if one is not None and one.executable not in [other.executable for other in found]:
                found.append(one)
    return found, gpus


def _interpreter(line: str) -> Interpreter | None:
    try:
        fields: object = json.JSONDecoder().decode(line)
    except ValueError:
        return None
    match fields:
        case {"executable": str(executable), "version": [int(major), int(minor), int(micro)], **rest}:
            versions = {name: str(rest.get(name, "")) for name in ("torch", "distruntime")}
            worker, site = "distruntime_worker" in rest, str(rest.get("site", ""))
            return Interpreter(
                executable, (major, minor, micro), versions["torch"], versions["distruntime"], worker, site
            )
    return None


def best(found: Iterable[Interpreter]) -> Interpreter | None:
    """Return the Python that has the most of what is needed; of equal ones the first."""
    return max(found, key=lambda one: one.steps, default=None)


def lacking(address: SshAddress, found: Interpreter | None) -> ConfigurationError:
    """Return the error that says what is missing there, and what to do."""
    named = address.options.get("python")
    auto, another = address.changed("setup", "auto"), address.changed("python", "/path/to/python")
    if found is None:
        what = f"there is no Python at {named}" if named else "it has no python3"
        return ConfigurationError(
            f"{address.shown}: {what}. Install Python 3.10 or newer there, or name one: {another}"
        )
    here = f"{address.shown}: Python {'.'.join(map(str, found.version))} at {found.executable}"
    if not found.is_new_enough:
        return ConfigurationError(f"{here} is too old, expected 3.10 or newer. Name another one: {another}")
    make = f"or let distruntime make an environment there: {auto}"
    other = f"name another Python, {another}, {make}"
    wanted = f"expected {LEAST_TORCH[0]}.{LEAST_TORCH[1]} to 2.{FIRST_UNKNOWN_TORCH[1] - 1}"
    if not found.torch:
        return ConfigurationError(f"{here} has no torch, {wanted}. Install it there, {other}")
    if not found.has_torch:
        return ConfigurationError(f"{here} has torch {found.torch}, {wanted}. Install that there, {other}")
    if not found.distruntime or not found.worker:
        return ConfigurationError(f"{here} has torch and no distruntime. Install it there, {other}")
    return ConfigurationError(
        f"{here} has distruntime {found.distruntime}, expected {VERSION}, which runs here. Install that "
        f"there, {make}"
    )


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
