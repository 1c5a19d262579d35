"""Run the lane: build the simulated accelerator, try it, and then the worker on it. `make accelerator`.

--only-build    build it, and print the folder that loads it from PYTHONPATH
--mutants       only the mutants: the worker with a line left out, which a test must notice
--programs N    so many random programs instead of 200
anything else   goes to pytest, for the device's own tests and the workers'; without it the mutants run too
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mutants
from building import NoCompiler, build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def with_device(built: Path) -> dict[str, str]:
    """Return an environment in which `import torch` loads the device."""
    paths = [str(built), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    found.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return found


def for_a_master(built: Path) -> dict[str, str]:
    """Return an environment for a master: it takes such a device's place, and only its workers find it."""
    return {**os.environ, "DISTRUNTIME_SIMULATED": str(built), "OMP_NUM_THREADS": "1"}


def main(arguments: list[str]) -> int:
    try:
        built = build()
    except NoCompiler as missing:
        print(f"skipped: {missing}")
        return 0
    if "--only-build" in arguments:
        print(built)
        return 0
    if "--programs" in arguments:
        at = arguments.index("--programs")
        os.environ["DISTRUNTIME_PROGRAMS"] = arguments[at + 1]
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    if "--mutants" in arguments:
        return min(1, mutants.run(for_a_master(built), only=[a for a in arguments if a != "--mutants"]))
    pytest = [sys.executable, "-m", "pytest"]
    # The suite's conftest would start sessions, and a master cannot have this device.
    own = ["--confcutdir", str(HERE), str(HERE / "test_device.py")]
    codes = [
        subprocess.run([*pytest, *own, *arguments], env=with_device(built)).returncode,
        subprocess.run(
            [*pytest, str(HERE / "test_device_path.py"), str(HERE / "workers"), *arguments],
            env=for_a_master(built),
            cwd=ROOT,
        ).returncode,
    ]
    if not arguments:
        codes.append(mutants.run(for_a_master(built)))
    # Pytest says 5 where `-k` has left nothing of a part.
    return max((code for code in codes if code != 5), default=5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
