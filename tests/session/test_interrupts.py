"""After Ctrl-C in a cell of IPython or Jupyter, and at a prompt of `code`, it is said what is queued."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.interrupts import queued_text
from distruntime.session.session import active_session
from processes import blocked, pause

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


def _press(z: torch.Tensor, after: float) -> bool:
    """Send this process Ctrl-C in a loop of operations, after so many seconds; return whether it came."""
    pressed: list[bool] = []

    def press() -> None:
        pause(after)
        pressed.append(True)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    q, more = z, 0
    try:
        presser.start()
        while more < 20_000:
            q = q @ z
            more += len(pressed)
    except KeyboardInterrupt:
        return True
    finally:
        presser.join()
    return False


def test_no_press_in_a_loop_of_operations_is_lost(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    # Python calls it for what it drops.
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: said.append(repr(dropped.object)))
    z = torch.eye(3, device=REMOTE)
    came = [_press(z, k / 10_000) for k in range(80)]
    dr.synchronize()
    assert (came.count(False), said) == (0, [])


def test_no_python_code_runs_when_a_value_dies(session: object) -> None:
    z = torch.eye(3, device=REMOTE)
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        del z
    finally:
        sys.setprofile(None)
    assert called == []
