"""The way of `z = x + y`, from the user's line to the kernel, is the one that `docs/design.md` shows, and no
longer.
"""

from __future__ import annotations

import re
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
import distruntime_worker
from distruntime.session.session import Session
from distruntime_worker.session.config import WorkerConfig
from distruntime_worker.session.daemon import serve

ROOT = Path(__file__).parent.parent
MOST_FUNCTIONS, MOST_FILES = 9, 7
FOLDERS = (str(ROOT / "distruntime"), str(Path(distruntime_worker.__file__).parent))
# Called meanwhile, but the instruction does not pass through them.
BESIDE = {
    "Handle.__init__": "builds what is returned",
    "Storage.__init__": "builds what is returned",
    "Channel._check_open": "a look at the socket's state",
    "_enough": "how much gathers before it is sent",
    "Session._stir": "tells the pump that something is in flight",
    "Wake.signal": "the same",
    "Delivery.__init__": "keeps the message until it has arrived",
    "Link.keep": "the same",
    "Shield.__enter__": "keeps Ctrl-C out of the socket's lock",
    "Shield.__exit__": "the same",
    "Shield._look_at_others": "does so for the handler of a timeout, which the tests have",
    "Shield._uncover": "the same",
}
BESIDE_ON_THE_WORKER = {
    "Channel": "the socket's own loop, which waits when the message comes",
    "Connections": "the socket's own loop",
    "Inbox": "the socket's own loop",
    "Wake": "the socket's own loop: whether the acknowledgement finds it waiting is chance",
    "Shield": "keeps Ctrl-C out of it",
    "PerThread": "a look, once a segment, at whether `dr.config` said anything",
    "Turn": "a look, once a segment, at whether there are other sessions",
    "Daemon._watch": "looks for peers that left, between messages",
    "Daemon._hear": "the same",
    "Tally": "a look at whether strangers were counted",
    "Link": "counts messages, and keeps the acknowledgement until it has arrived",
    "Delivery": "the same",
    "Session.send": "the acknowledgement, after the kernel",
    "encode": "the acknowledgement",
    "Executor._finish": "the acknowledgement",
    "Answers.executed": "the same: who waits for all that has run",
    "Stream": "lets other streams and fetches know, after the kernel",
}


def the_way() -> list[tuple[str, str]]:
    """Return (file, function) of each step in the table of docs/design.md; what a template is compiled to has
    no file.
    """
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `(?:([\w/]+\.py): )?([\w.]+)`[^|]*\|", page, re.M)


def name_of(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_name  # co_qualname came with Python 3.11
    first = code.co_varnames[:1]
    if first == ("self",) and "self" in frame.f_locals:
        return f"{type(frame.f_locals['self']).__name__}.{name}"
    return name


class Trace:
    """Notes calls of our own functions, by thread, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<"):
                self.calls.append((threading.current_thread().name, name_of(frame)))
            elif code.co_filename.startswith("<aten::"):  # what a template was compiled to
                self.calls.append((threading.current_thread().name, "Template.run"))


@pytest.fixture
def traced(tmp_path: Path, fresh_session: Callable[..., Any]) -> Any:
    """A session whose one worker runs in threads of this process, so that both halves can be traced."""
    trace, stop, interval = Trace(), threading.Event(), sys.getswitchinterval()
    address = f"ipc://{tmp_path}/worker"
    threading.setprofile(trace)
    worker = threading.Thread(target=serve, args=(WorkerConfig(listen=address), stop), name="worker")
    worker.start()
    try:
        session = fresh_session(workers=[address])
        threading.setprofile(None)
        yield trace, session
    finally:
        threading.setprofile(None)
        dr.shutdown()
        stop.set()
        worker.join(20)
        sys.setswitchinterval(interval)
    assert not worker.is_alive()


def until_idle(session: Session) -> None:
    """Wait until the worker has acknowledged everything; then an operation starts at once."""
    (node,), deadline, pause = session.nodes, time.monotonic() + 60, threading.Event()
    while node.flights or node.words or node.freed:
        assert time.monotonic() < deadline
        pause.wait(0.001)


def test_an_addition_goes_the_way_that_the_design_shows(traced: tuple[Trace, Session]) -> None:
    trace, session = traced
    x, y = torch.ones(2, 3, device="remote"), torch.ones(2, 3, device="remote")
    for _ in range(3):
        z = x + y
        until_idle(session)
    sys.setprofile(trace)
    trace.on = True
    z = x + y
    sys.setprofile(None)
    until_idle(session)
    trace.on = False
    issued = [name for thread, name in trace.calls if thread == "MainThread" and name not in BESIDE]
    carried = [name for thread, name in trace.calls if thread in ("worker", "executor")]
    carried = [name for name in carried if not {name, name.split(".")[0]} & set(BESIDE_ON_THE_WORKER)]
    assert issued + list(dict.fromkeys(carried)) == [function for _, function in the_way()]
    assert torch.equal(z.cpu(), torch.full((2, 3), 2.0))


def test_the_way_is_short() -> None:
    way = the_way()
    assert 0 < len(way) <= MOST_FUNCTIONS
    files = {file for file, _ in way if file}
    assert len(files) <= MOST_FILES
    for file, function in way:
        if not file:
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"def {function.rpartition('.')[2]}\b", text), f"{file} has no {function}"
