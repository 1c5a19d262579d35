"""A short chaos, with one fault of each kind that differs most. tests/long/chaos.py has the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import PATH

KINDS = {
    "kill_worker": "worker 1 killed",
    "kill_master": "master killed",
    "storm": "Ctrl-C",
    "full_disk": "disk",
    "cut": "cut off",
    "swallow_down": "is not heard",
    "close": "nobody listens",
    "flip": "flipped",
    "truncate": "cut short",
    "stop_worker": "held still",
    "descriptors": "without descriptors",
    "strangers": "strangers",
}


@pytest.mark.timeout(600)
def test_a_training_through_faults_of_all_kinds_ends_as_an_undisturbed_one() -> None:
    program = Path(__file__).parent / "chaos.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(program),
        "--seed",
        "121",
        "--faults",
        str(len(KINDS)),
        "--kinds",
        ",".join(KINDS),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(KINDS)} faults" in done.stdout and "bit-equal" in done.stdout
    for fault in KINDS.values():
        assert fault in done.stdout.replace("worker 0", "worker 1"), done.stdout
