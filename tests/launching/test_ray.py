"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from launches import environment

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = pytest.mark.skipif(not HAS_RAY, reason="pip install ray")

SCRIPT = """
import ray
from distruntime.launching.ray_actors import RayLauncher
from distruntime.testing import check_launcher
from processes import free_port

ray.init(num_cpus=6, num_gpus=0, include_dashboard=False, logging_level="error", log_to_driver=False)
check_launcher(RayLauncher(cpus=1), listen=f"tcp://127.0.0.1:{free_port()}", timeout=60)
print("checked")
"""


@pytest.mark.timeout(400)
@pytest.mark.slow(reason="starts a Ray cluster, and workers as its actors")
def test_the_launcher_passes_the_suite(tmp_path: Path) -> None:
    variables = environment(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", DISTRUNTIME_STATE=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, timeout=240
    )
    # Ray writes there, too, whatever it is told.
    assert "checked" in done.stdout.splitlines(), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
