"""What is said while bytes move and while a program without a terminal starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.session import announce
from distruntime.session.announce import Announcer, bar
from distruntime.session.screen import Log, voice
from distruntime.session.session import active_session
from processes import PATH, until

REMOTE = "remote"


class Recorder:
    """A screen that keeps what it is to show."""

    first = 0.0

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ends: list[str] = []

    def show(self, text: str) -> None:
        self.texts.append(text)

    def finish(self, text: str) -> None:
        self.ends.append(text)

    def pause(self, seconds: float) -> float:
        return 0.0

    def has(self, start: str) -> bool:
        return any(text.startswith(start) for text in self.texts)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """What is shown, and at once."""
    found = Recorder()
    monkeypatch.setattr(announce, "screen", lambda: found)
    monkeypatch.setattr(announce, "_LONG", 0.0)
    monkeypatch.setattr(announce, "_GAP", 0.0)
    yield found


def test_a_bar_has_an_estimate_of_what_is_left() -> None:
    assert re.fullmatch(
        r"uploading:  50%\|.+\| 1\.00G/2\.00G \[00:10<00:10, 107MB/s\]",
        bar("uploading", 1 << 30, 2 << 30, 10.0),
    )


def test_uploads_and_fetches_are_bars(session: object, recorder: Recorder) -> None:
    node = active_session().nodes[0]
    shared, node.shared = node.shared, False
    try:
        x = torch.ones(1 << 24)

        def uploaded() -> bool:
            x.to(REMOTE)
            return recorder.has("uploading: ")

        until(uploaded)
        y = x.to(REMOTE)

        def fetched() -> bool:
            y.cpu()
            return recorder.has("fetching: ")

        until(fetched)
    finally:
        node.shared = shared
    dr.synchronize()
    announcer = active_session().requests.announcer
    # What has ended is taken away.
    until(lambda: not announcer._shown)
    assert recorder.ends


def test_saves_and_loads_are_bars(session: object, recorder: Recorder, tmp_path: Path) -> None:
    tree = {"x": torch.ones(1 << 22, device=REMOTE)}

    def saved_and_loaded() -> bool:
        dr.save(tree, tmp_path / "checkpoint")
        dr.load(tmp_path / "checkpoint")
        return recorder.has("saving to ") and recorder.has("loading from ")

    until(saved_and_loaded)
    until(lambda: any("100%" in text for text in recorder.ends))


def test_a_wait_says_about_how_long_the_rest_takes() -> None:
    assert announce._estimate((0.0, 100), 50, 10.0, 10.0) == ", about 10 s left"
    # Nobody knows yet.
    assert announce._estimate((0.0, 100), 100, 10.0, 10.0) == ""
    assert announce._estimate((0.0, 100), 50, 1.0, 1.0) == ""


def test_an_announcer_without_a_session_says_nothing(recorder: Recorder) -> None:
    announcer = Announcer()
    announcer.show()
    announcer.stop_waiting()
    assert recorder.texts == recorder.ends == []


def test_a_log_gets_few_lines() -> None:
    log = Log()
    said, seconds = 0, log.first
    while seconds < 3600:
        said, seconds = said + 1, seconds + log.pause(seconds)
    assert said == 7


def test_a_start_without_a_terminal_is_plain_lines_on_standard_error(tmp_path: Path) -> None:
    code = "import distruntime as dr; dr.init_master_worker(world_size=1); print('mine'); dr.shutdown()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "DISTRUNTIME_STATE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=environment
    )
    first, head, row, last = done.stderr.splitlines()
    assert done.stdout == "mine\n" and re.fullmatch(r"starting 1 worker +ready in \d+\.\d s", first)
    assert head.split()[0] == "node" and row.split()[0] == "0"
    assert last.startswith("new tensors go to node 0 cpu")


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_QUIET", "1")
    voice(None)("nothing\n")
    monkeypatch.delenv("DISTRUNTIME_QUIET")
    for quiet in (True, None, False):
        voice(quiet)("a ")
        voice(quiet)("line\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a line\n", "line\n")
