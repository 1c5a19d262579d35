"""The end of a session has a bound, whatever waits, whoever is away and whenever Ctrl-C strikes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.checkpoint.save import under_way
from distruntime.log.node import Node
from distruntime.session.session import active_session
from distruntime.wire.messages import Message
from fewer import fewer
from network import Network
from processes import Child, ListeningWorker, pause, stop, until

LIMIT = 1.0  # seconds, of an ending; then 5 more for last words, threads and workers
BOUND = 30.0  # that, on a machine that is busy


class Strike:
    """A context in which Ctrl-C is pressed when so many instructions of Python's have run in a file.

    `struck` says whether it was.
    """

    def __init__(self, file: str, after: int) -> None:
        self._file, self._left, self.struck = file, after, False

    def __enter__(self) -> Strike:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._file):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # Python 3.12 looks at what a frame asks for only when tracing is set.
        sys.settrace(self._call)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                self.struck = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._step


def test_a_worker_that_exits_since_the_session_ends_is_no_loss(
    fresh_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_session(world_size=2)
    session = active_session()
    node, part = session.nodes[1], session.ending._part

    def parted(word: Message, deadline: float | None) -> list[Node]:
        late = part(word, deadline)
        # The session is not closed yet, and its own thread may find the worker gone.
        session.lose(node, "(pid 1) exited with code 0")
        return late

    monkeypatch.setattr(session.ending, "_part", parted)
    dr.shutdown()
    assert node.failed is not None and "node 1" not in caplog.text


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("end", ["shutdown", "detach"])
def test_a_save_does_not_hold_the_end_up_while_its_worker_is_away(
    fresh_session: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        with Network(worker.address) as network:
            fresh_session(workers=[network.address], session="ends", unreachable=0.5, grace=120)
            x = torch.ones(1000, device=REMOTE)
            dr.save({"x": x}, tmp_path / "c")
            with network.broken():
                saving = dr.save({"x": x + 1}, tmp_path / "c", async_op=True)
                assert saving is not None
                began = time.monotonic()
                try:
                    getattr(dr, end)(LIMIT)
                except dr.errors.WaitTimeout:
                    assert end == "detach"
                assert time.monotonic() - began < BOUND
                assert "the session ends before the checkpoint" in caplog.text and not under_way
                assert saving.done()
                with pytest.raises(
                    dr.errors.SessionClosed, match=r"before the checkpoint in .* was complete"
                ):
                    saving.wait()
    finally:
        worker.stop()


def test_a_save_whose_workers_are_there_is_waited_for(
    fresh_session: Callable[..., Any], tmp_path: Path
) -> None:
    """It is waited for beyond the limit, or a checkpoint of many gigabytes would be lost with its program."""
    fresh_session(world_size=1)
    x = torch.ones(1000, device=REMOTE)
    pid = dr.nodes()[0].pid
    stop(pid)
    going = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
    going.start()
    saving = dr.save({"x": x}, tmp_path / "c", async_op=True)
    assert saving is not None
    dr.shutdown(timeout=0.1)
    going.join()
    saving.wait()
    fresh_session(world_size=1)
    assert dr.load(tmp_path / "c")["x"].sum().item() == 1000


def test_no_stroke_of_ctrl_c_leaves_a_save_that_never_ends(session: object, tmp_path: Path) -> None:
    x = torch.ones(5, device=REMOTE)
    dr.save({"x": x}, tmp_path)
    after, strike = 1, None
    while strike is None or strike.struck:
        strike = Strike("phases.py", after)
        try:
            with strike:
                dr.save({"x": x}, tmp_path)
        except KeyboardInterrupt:
            pass
        until(lambda: not under_way, 20)
        after += 9
    assert after > 200, "phases.py runs fewer instructions than that"
    assert dr.load(tmp_path)["x"].sum().item() == 5


def test_ctrl_c_does_not_cut_short_what_follows_from_a_loss(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests to a lost worker leave a table before they are answered: between the two they are nobody's."""
    finished: list[bool] = []
    look = active_session().connector.poll

    def struck() -> None:
        if threading.current_thread() is threading.main_thread() and not finished:
            signal.raise_signal(signal.SIGINT)
            finished.append(True)
        look()

    monkeypatch.setattr(active_session().connector, "poll", struck)
    open_session = active_session()
    with pytest.raises(KeyboardInterrupt):
        open_session.requests.wait(lambda: False, open_session.receiver.read, time.monotonic() + 30)
    assert finished


def test_the_pump_is_woken_without_a_line_of_python(session: object) -> None:
    """Ctrl-C in `threading.Event.set` leaves its lock taken, and the end of the process waits for that."""
    ran: list[str] = []
    stir = active_session().stir
    sys.setprofile(
        lambda frame, event, argument: ran.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        stir()
    finally:
        sys.setprofile(None)
    assert ran == []


def held_still(address: str, folder: str) -> None:
    """Train and save in the background, until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dr.init_master_worker(
        workers=[address], session="storm", force=True, unreachable=0.5, grace=600, quiet=True
    )
    x = torch.ones(1000, device=REMOTE)
    dr.save({"x": x}, folder)
    dr.save({"x": x}, folder, async_op=True)
    print("ready")
    while True:
        x = x + 1
        x.sum().item()


@pytest.mark.parametrize(
    "strokes",
    fewer([[0.0], [0.0, 0.3], [0.0, 0.0, 0.5, 0.5]], 3, "more strokes, 1 s"),
    ids=lambda strokes: f"{len(strokes)} times",
)
def test_a_process_ends_after_ctrl_c_while_its_worker_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strokes: list[float]
) -> None:
    monkeypatch.setenv("DISTRUNTIME_DETACH_TIMEOUT", str(LIMIT))
    monkeypatch.setenv("DISTRUNTIME_STATE", str(tmp_path / "state"))
    worker = ListeningWorker(tmp_path, "--listen", "tcp://127.0.0.1:0")
    try:
        with (
            Network(worker.address) as network,
            Child(held_still, network.address, str(tmp_path / "c")) as child,
        ):
            child.expect("ready", 120)
            network.cut()
            for seconds in strokes:
                pause(seconds)
                child.interrupt()
            assert child.gone(BOUND), f"still there {BOUND} s after Ctrl-C:\n" + "\n".join(child.printed)
    finally:
        worker.stop()


def test_an_end_says_how_many_operations_it_drops(
    fresh_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    fresh_session(world_size=1)
    x = torch.ones(1500, 1500, device=REMOTE)
    y = [x @ x for _ in range(300)]
    with caplog.at_level("WARNING", "distruntime"):
        dr.shutdown(timeout=0.2)
    dropped = r"node 0 \(.+\) has not run \d+ operations in time; the end of the session drops them"
    assert len(y) == 300 and re.search(dropped, caplog.text)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("", "IndexError: index 9 is out of bounds for dimension 0 with size 3"),
        ("1 / 0", ""),
        ("try:\n    bad.tolist()\nexcept IndexError:\n    pass", ""),
    ],
    ids=["quietly", "by an error", "read"],
)
def test_the_end_of_a_program_tells_of_a_failure_that_nobody_has_read(end: str, told: str) -> None:
    program = f"""
import torch, distruntime as dr
dr.init_master_worker(world_size=1, quiet=True)
bad = torch.ones(3, device="remote")[torch.tensor([9], device="remote")]
{end}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == (1 if end == "1 / 0" else 0), ended.stderr
    assert ("nobody has read this failure" in ended.stderr) == bool(told), ended.stderr
    assert told in ended.stderr and ("aten::index" in ended.stderr) == bool(told)
