"""After Ctrl-C in a cell of IPython or Jupyter, and at a prompt of `code`, it is said what is queued."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.interrupts import queued_text
from distruntime.session.session import active_session
from processes import blocked

ROOT = Path(__file__).resolve().parents[2]
# A cell that Ctrl-C ends, as the kernel of Jupyter and the shell of IPython run it.
CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import torch, distruntime as dr; session = dr.init_master_worker(world_size=1, quiet=True)",
    "x = torch.ones(1500, 1500, device='remote')\\nfor _ in range(400): x @ x",
    "raise KeyboardInterrupt",
    "dr.cancel(); dr.synchronize()",
    "raise KeyboardInterrupt",
):
    shell.run_cell(cell, store_history=True)
"""


def test_a_cell_says_what_is_queued_as_long_as_something_is() -> None:
    if importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    ran = subprocess.run(
        [sys.executable, "-c", CELLS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IPYTHONDIR": os.devnull},
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = re.findall(r"node 0 \(.+\): (\d+) operations queued(?:, .+ runs)?\n", ran.stderr)
    assert len(said) == 1, ran.stderr
    assert int(said[0]) <= 400 and ran.stderr.count("dr.cancel() drops those that have not begun") == 1


def test_each_busy_node_has_a_line(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    dr.synchronize()
    assert queued_text(active_session()) == ""
    with blocked(dr.default_stream(0)):
        y = [x + k for k in range(20)]
        first, last = queued_text(active_session()).splitlines()
    assert re.fullmatch(r"node 0 \(.+\): [12]\d operations queued(, .+ runs)?", first), first
    assert last == "They run on. dr.cancel() drops those that have not begun."
    assert y[-1].tolist() == [20, 20, 20]
