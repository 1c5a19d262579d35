"""A build of Python that is refused is refused at import, in one line, on both sides."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# It says what the free-threaded build says of itself.
FREE_THREADED = "import sys; sys.abiflags = 't'\n"


@pytest.mark.parametrize("module", ["distruntime", "distruntime_worker.cli"])
def test_a_free_threaded_build_is_refused(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{FREE_THREADED}import {module}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: distruntime relies on exact reference counts, and got a free-threaded Python "
        f"({platform.python_version()}t): start the ordinary build, "
        f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )


def test_nothing_heavy_is_imported_before() -> None:
    code = (
        f"{FREE_THREADED}try:\n    import distruntime\nexcept ImportError:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "False\n"
