"""A short chaos: a worker killed, one held still, the disk full, a cut, and the master killed. tests/long/chaos.py has the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import PATH


@pytest.mark.timeout(300)
def test_a_training_through_five_faults_ends_as_an_undisturbed_one() -> None:
    program = Path(__file__).parent / "chaos.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), "--seed", "121", "--faults", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 faults" in done.stdout and "bit-equal" in done.stdout
    for fault in ("worker 0 killed", "held still", "disk", "cut off", "master killed"):
        assert fault in done.stdout.replace("worker 1", "worker 0"), done.stdout
