"""After Ctrl-C in a cell of IPython or Jupyter, and at a prompt of `code`, it is said what is queued."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import cast

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.errors import is_of_caller
from distruntime.session.interrupts import _cut, queued_text
from distruntime.session.output import Output
from distruntime.session.requests import Requests
from distruntime.session.session import active_session
from distruntime.wire.messages import Printed
from processes import blocked, until
from strikes import Struck, strikes

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


@pytest.mark.slow(reason="starts a prompt, 10 s")
def test_a_cell_says_what_is_queued_as_long_as_something_is(tmp_path: Path) -> None:
    if importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    path = os.pathsep.join([str(ROOT), str(ROOT / "worker")])
    ran = subprocess.run(
        [sys.executable, "-c", CELLS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)},
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
        # A worker that answers in time says what it runs.
        until(lambda: re.search(r" queued, .+ runs\n", queued_text(active_session())))
    assert re.fullmatch(r"node 0 \(.+\): [12]\d operations queued(, .+ runs)?", first), first
    assert last == "They run on. dr.cancel() drops those that have not begun."
    assert y[-1].tolist() == [20, 20, 20]


def test_one_operation_is_spoken_of_as_one(session: object) -> None:
    dr.synchronize()
    with blocked(dr.default_stream(0)):
        first, last = queued_text(active_session()).splitlines()
    assert ": 1 operation queued" in first
    assert last == "It runs on. dr.cancel() drops it if it has not begun."


def test_a_full_window_that_control_c_leaves_shows_the_users_line_alone(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distruntime.log.log.WINDOW", 300)
    x = torch.ones(3, device=REMOTE)
    dr.synchronize()
    presser = threading.Thread(target=lambda: (until(_waiting), os.kill(os.getpid(), signal.SIGINT)))
    with blocked(dr.default_stream(0)):
        presser.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            while True:
                x.add(1)
    presser.join()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert set(files) == {__file__}


def _waiting() -> bool:
    return active_session().requests.announcer.waiting


def test_a_prompt_ends_the_traceback_of_control_c_at_the_users_line() -> None:
    try:
        # It leads from this file into the package, as Ctrl-C in the midst of an operator does.
        is_of_caller(cast(BaseException, _Interrupts()))
    except KeyboardInterrupt as error:
        assert len(traceback.extract_tb(error.__traceback__)) == 3
        _cut(error.__traceback__)
        assert len(traceback.extract_tb(error.__traceback__)) == 3
        last = error.__traceback__
        assert last is not None and last.tb_next is not None
        last.tb_next.tb_next = None
        _cut(last)
        assert [frame.filename for frame in traceback.extract_tb(last)] == [__file__]


class _Interrupts:
    def __getattribute__(self, name: str) -> object:
        raise KeyboardInterrupt


def _press(z: torch.Tensor, after: float) -> bool:
    """Press Ctrl-C in a loop of operations, after so many seconds; return whether it came."""
    # A thread that presses would not do: Python's own finalizer of a thread may be struck.
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    q, more = z, 0
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        while more < 5_000:
            q = q @ z
            more += signal.getitimer(signal.ITIMER_REAL)[0] == 0
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def test_no_press_in_a_loop_of_operations_is_lost(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    # Python calls it for what it drops.
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: said.append(repr(dropped.object)))
    z = torch.eye(3, device=REMOTE)
    # The collector may run Python code of whoever left cycles, and Python drops a press in that.
    gc.collect()
    gc.disable()
    try:
        came = [_press(z, k / 10_000) for k in range(1, 81)]
    finally:
        gc.enable()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_what_strikes_in_a_wait_for_another_reader_comes_out(number: int) -> None:
    """A Condition whose wait is torn lets go of a lock that it does not have."""
    requests, came = Requests(), 0
    # Another thread reads.
    requests._reader["reader"] = -1
    for strike in strikes(number=number):
        left = iter([False, False])
        raised = False
        try:
            with strike:
                requests.wait(lambda: next(left, True), lambda _: None, None)  # noqa: B023
        except Struck:
            raised = True
        assert raised == bool(strike.struck)
        assert requests._followers == 0 and not requests._lock._is_owned()  # type: ignore[attr-defined]
        came += strike.came
    assert came > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_wait_that_is_struck_at_its_end_is_over(session: object, number: int) -> None:
    """Otherwise the line would say for ever that it waits."""
    node, requests, came = active_session().nodes[0], Requests(), 0
    for strike in strikes(number=number):
        left = iter([False] * 6)
        with suppress(Struck), strike:
            requests.wait(lambda: next(left, True), lambda _: None, None, node)  # noqa: B023
        assert not requests.announcer.waiting and not requests.attended, strike.struck
        came += strike.came
    assert came > 20


def test_what_is_shown_is_shown_by_nobody_once_it_was_struck(
    session: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mark of who shows would keep the pump from it."""
    node, output, came = active_session().nodes[0], Output(lambda: None), 0
    for strike in strikes():
        # What was struck before it was shown is shown with the next one.
        output.show()
        output.note(node, Printed(1, 1, "stdout", "said\n"), None)
        with suppress(Struck), strike:
            output.show()
        assert not output._shower, strike.struck
        came += strike.came
    assert came > 20
