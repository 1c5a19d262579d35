"""The packages that the checks need, and how a machine without a registry gets those that it lacks.

Nothing here imports them: it runs before torch, on a Python that has torch with a GPU and perhaps little
else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
# Who runs the checks puts wheels there.
FOLDER = ROOT / "wheels"
# They are installed there, and this Python stays as it is. Another Python has another folder.
SITE = ROOT / "build" / f"gpu-site-{sys.implementation.cache_tag}"
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)


class Package(NamedTuple):
    """A package as it is imported, its name in a registry, and what needs it."""

    module: str
    name: str
    needed_for: str


REQUIRED = (
    Package("zmq", "pyzmq", "everything"),
    Package("msgpack", "msgpack", "everything"),
    Package("cloudpickle", "cloudpickle", "everything"),
    Package("numpy", "numpy", "everything"),
    Package("nacl", "pynacl", "everything"),
    Package("safetensors", "safetensors", "everything"),
    Package("tqdm", "tqdm", "everything"),
    Package("pytest", "pytest", "checks 5, 6, 13 and 15"),
)
OPTIONAL = (
    Package("expecttest", "expecttest", "check 10"),
    Package("transformers", "transformers", "checks 20 and 21, and the figures of GPT-2"),
    Package("sklearn", "scikit-learn", "the examples of check 24"),
)


def has(module: str) -> bool:
    """Whether this Python finds a module."""
    return importlib.util.find_spec(module) is not None


def missing(packages: Iterable[Package], find: Callable[[str], bool] = has) -> list[Package]:
    """Return the packages that this Python lacks."""
    return [package for package in packages if not find(package.module)]


def pinned(name: str, python: tuple[int, int] = sys.version_info[:2]) -> str:
    """Return "pyzmq==27.3.0", as constraints.txt says it for a Python."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        requirement, _, marker = line.partition(";")
        if requirement.partition("==")[0].strip() == name and _holds(marker.strip(), python):
            return requirement.strip()
    return name


def _holds(marker: str, python: tuple[int, int]) -> bool:
    if not marker:
        return True
    found = re.fullmatch(r'python_version (>=|<) "(\d+)\.(\d+)"', marker)
    if found is None:
        raise ValueError(f"constraints.txt has a condition that this script does not know: {marker}")
    bound = int(found[2]), int(found[3])
    return python >= bound if found[1] == ">=" else python < bound


def torch_problem(version: str | None) -> str:
    """Return what is wrong with the torch of this Python, or "" if it will do."""
    if version is None:
        what = "this Python has no torch"
    else:
        number = re.match(r"(\d+)\.(\d+)", version)
        if number is not None and OLDEST_TORCH <= (int(number[1]), int(number[2])) <= NEWEST_TORCH:
            return ""
        what = f"this Python has torch {version}"
    return "\n".join(
        [
            f"{what}, and the checks need torch 2.11 to 2.15, built for the GPUs of this machine.",
            "They do not install it: it has 3 GB, and the machine's own goes with its driver.",
            "Name the Python that has it: make gpu PYTHON=/path/to/python3",
        ]
    )


def installed(name: str) -> str | None:
    """Return the version of a distribution that this Python has, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def advice(lacking: list[Package]) -> str:
    """Return which wheels to bring, from where, and where to put them."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(pinned(package.name) for package in lacking)
    lines = [f"  {pinned(package.name)}   for {package.needed_for}" for package in lacking]
    machine = platform.machine()
    tags = " ".join(
        f"--platform {tag}_{machine}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    )
    return "\n".join(
        [
            f"{sys.executable} lacks {len(lacking)} package{'s' if len(lacking) > 1 else ''}:",
            *lines,
            f"Nothing is taken from the network here. Put their wheels into {FOLDER}/",
            f"and run `make gpu` again. It installs them into {SITE}, with --no-index,",
            "and leaves this Python as it is. A machine with a network fetches them, and their needs, with",
            f"  python3 -m pip download --only-binary=:all: --python-version {version} \\",
            f"    {tags} \\",
            f"    -d wheels {names}",
        ]
    )


def bring(find: Callable[[str], bool] = has) -> list[Path]:
    """Install the wheels of the folder that this Python lacks; return their files.

    pip is asked for these files alone: with their requirements it would look for a torch.
    """
    files = [file for file in sorted(FOLDER.glob("*.whl")) if installed(file.name.split("-")[0]) is None]
    if files:
        SITE.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        command += ["--disable-pip-version-check", "--upgrade", "--target", str(SITE), *map(str, files)]
        subprocess.run(command, check=True)
        importlib.invalidate_caches()
    return files
