"""Build the simulated accelerator. As a program it prints the folder for PYTHONPATH.

Whoever has that folder on PYTHONPATH gets the device with `import torch`, as torch loads every package that
has an entry point `torch.backends`. The only needs are a C++ compiler and the headers that torch's wheel has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "simulated"
BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
# The least optimisation: the device's kernels are torch's own, and it is compiled in half the time.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")


class NoCompiler(Exception):
    pass


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise NoCompiler(
        "the simulated accelerator needs a C++ compiler, and there is no g++, clang++ or c++: install one, "
        "or name it with CXX"
    )


def torch_folder() -> tuple[Path, str]:
    """Return where torch is and its version, without the half second of its import."""
    from importlib.metadata import distribution

    found = distribution("torch")
    return Path(str(found.locate_file("torch"))), found.version


def build() -> Path:
    """Return the folder of the built package.

    It is built again if a source, torch or a flag has changed.
    """
    torch, version = torch_folder()
    said = hashlib.sha256(repr((version, str(torch), FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            said.update(path.read_bytes())
    built = BUILDS / version
    stamp = built / "stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == said.hexdigest():
        return built
    package = built / "simulated"
    package.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    objects = [_compiled(source, built / "objects", torch) for source in sorted(SOURCES.glob("*.cpp"))]
    libraries = torch / "lib"
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-lpthread"]
    _run([compiler(), "-shared", *map(str, objects), *linked, "-o", str(package / "libsimulated.so")])
    shutil.copy(SOURCES / "__init__.py", package / "__init__.py")
    (package / "py.typed").touch()
    about = built / "simulated-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: simulated\nVersion: 1.0\n", encoding="utf-8"
    )
    (about / "entry_points.txt").write_text(
        "[torch.backends]\nsimulated = simulated:autoload\n", encoding="utf-8"
    )
    stamp.write_text(said.hexdigest(), encoding="utf-8")
    return built


def _compiled(source: Path, objects: Path, torch: Path) -> Path:
    """Compile one file, unless it and the headers beside it are as they were."""
    objects.mkdir(parents=True, exist_ok=True)
    said = hashlib.sha256(repr((str(torch), FLAGS)).encode())
    for path in [source, *sorted(SOURCES.glob("*.h"))]:
        said.update(path.read_bytes())
    made, stamp = objects / f"{source.stem}.o", objects / f"{source.stem}.stamp"
    if not (made.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == said.hexdigest()):
        includes = [f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}"]
        print(f"compiling {source.name}", file=sys.stderr, flush=True)
        _run([compiler(), *FLAGS, *includes, "-c", str(source), "-o", str(made)])
        stamp.write_text(said.hexdigest(), encoding="utf-8")
    return made


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    try:
        print(build())
    except NoCompiler as error:
        sys.exit(f"skipped: {error}")
