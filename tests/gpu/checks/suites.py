"""Checks 5, 6 and 13: the files of tests/gpu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from box import ROOT, Box, Failed, LeftOut
from listing import check

_INI = ROOT / "tests" / "gpu" / "checks" / "pytest.ini"


class TooSlow(Failed):
    """Tests have not ended in their time."""


def pytest(
    box: Box,
    *files: str,
    seconds: float,
    before: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> None:
    """Run test files in a process of their own, and show its last line."""
    command = [*before, sys.executable, "-m", "pytest", "-q", "-c", str(_INI), "--rootdir", str(ROOT)]
    command += ["--confcutdir", str(ROOT), "-p", "no:cacheprovider", "-rs", "--keep-duplicates", *files]
    small = {"DISTRUNTIME_TEST_SIDE": "64"} if box.quick else {}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **small, **(environment or {})},
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise TooSlow(f"{' '.join(files)}: not ended within {seconds:.0f} s\n{output[-3000:]}") from None
    lines = output.strip().splitlines() or ["pytest printed nothing"]
    # A sanitizer prints its own line behind pytest's.
    told = next((line for line in reversed(lines) if " passed" in line), lines[-1])
    box.saw(
        "\n".join(dict.fromkeys([*(line for line in lines if line.startswith("SKIPPED")), told, lines[-1]]))
    )
    if process.returncode:
        raise Failed(f"pytest ended with {process.returncode}: {lines[-1]}\n{output[-3500:]}")
    if " passed" not in told:
        raise LeftOut(next((line.partition(": ")[2] for line in lines if "SKIPPED" in line), lines[-1]))


@check(
    5,
    "pinned staging of uploads",
    does="runs tests/gpu/test_staging.py: right bytes, no waiting, a bound on what is pinned",
    failure=(
        "uploads go through pinned buffers that are used again too early, too late or without a bound. It "
        "needs nothing else of the worker: look at worker/distruntime_worker/values/staging.py."
    ),
    seconds=60,
    needs=("cuda", "pytest"),
)
def staging(box: Box) -> None:
    pytest(box, "tests/gpu/test_staging.py", seconds=55)


@check(
    6,
    "what a worker says of its GPU, and copies",
    does="runs tests/gpu/test_worker.py: its description, uploads of all sizes, out of memory, TF32, seeds",
    failure=(
        "the name of the test that fails says which: descriptions are machine/, out of memory is "
        "values/objects.py and distruntime/session/failures.py, settings are machine/settings.py, seeds are "
        "values/draws.py."
    ),
    seconds=90,
    needs=("pytest",),
)
def the_worker(box: Box) -> None:
    pytest(box, "tests/gpu/test_worker.py", "tests/gpu/test_gpu_figures.py", seconds=85)


@check(
    13,
    "streams and checkpoints",
    does=(
        "runs tests/gpu/test_gpu_streams.py and test_gpu_checkpoint.py up to ten times, then once under a "
        "sanitizer"
    ),
    failure=(
        "streams of the GPU race, or memory is used again while somebody reads it: look at "
        "worker/distruntime_worker/values/streams.py and log/waits.py, and distruntime/log/order.py. If only "
        "the run under compute-sanitizer fails, a kernel reads memory that has been given back."
    ),
    seconds=150,
    needs=("pytest",),
)
def streams(box: Box) -> None:
    files = ("tests/gpu/test_gpu_streams.py", "tests/gpu/test_gpu_checkpoint.py")
    began = time.monotonic()
    pytest(box, *files, seconds=60)
    one = time.monotonic() - began
    more = 0 if box.quick else min(9, int(35 / one))
    box.saw(f"one run took {one:.0f} s, and {more} more follow")
    for _ in range(more):
        pytest(box, *files, seconds=60)
    sanitizer = shutil.which("compute-sanitizer")
    if not box.cuda or sanitizer is None:
        return box.leave_out("the run under compute-sanitizer", "needs that program on the PATH, and CUDA")
    test = f"{files[0]}::test_freed_memory_is_not_used_while_another_stream_reads_it"
    memcheck = (sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9")
    try:
        pytest(box, test, seconds=45, before=memcheck, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    except TooSlow:
        box.leave_out("the run under compute-sanitizer", "takes more than 45 s here")
