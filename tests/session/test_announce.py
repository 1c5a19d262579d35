"""What is said while bytes move and while a program without a terminal starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.log.progress import under_way, until_room
from distruntime.session import announce
from distruntime.session.announce import Announcer, Uploads, Wait, bar
from distruntime.session.interrupts import queued_text
from distruntime.session.screen import Log, Terminal, voice
from distruntime.session.session import active_session
from distruntime.wire.link import Delivery, Link
from processes import PATH, blocked, until

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


def test_a_bar_of_an_upload_ends_with_its_statement(session: object, recorder: Recorder) -> None:
    node = active_session().nodes[0]
    shared, node.shared = node.shared, False
    try:

        def uploaded() -> bool:
            recorder.ends.clear()
            torch.ones(1 << 24).to(REMOTE)
            return recorder.has("uploading: ")

        until(uploaded)
    finally:
        node.shared = shared
    assert len(recorder.ends) == 1 and recorder.ends[0].startswith("uploading: 100%")
    said = len(recorder.texts)
    dr.synchronize()
    assert not [text for text in recorder.texts[said:] if text.startswith("uploading")]


def test_a_module_that_is_sent_has_one_bar(session: object, recorder: Recorder) -> None:
    def sent() -> bool:
        recorder.ends.clear()
        torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(REMOTE)
        return recorder.has("uploading: ")

    until(sent)
    assert len(recorder.ends) == 1


def test_a_bar_of_one_upload_moves_by_frames() -> None:
    class Tracker:
        done = False

    trackers = [Tracker() for _ in range(4)]
    move = Uploads(lambda: None).moving(100)
    link = Link()
    move.delivery = Delivery(link, [])
    move.delivery.trackers = trackers
    assert move.done() == 0
    trackers[0].done = trackers[1].done = True
    assert move.done() == 50


def test_what_an_upload_waits_for_is_an_upload(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distruntime.log.log.PAYLOAD_WINDOW", 1 << 20)
    node = active_session().nodes[0]
    shared, node.shared = node.shared, False
    dr.synchronize()
    dr.profiler.stalls(reset=True)
    try:
        with blocked(dr.default_stream(0)):
            sender = threading.Thread(target=lambda: torch.ones(1 << 22).to(REMOTE))
            sender.start()
            # The bytes have left, and the worker does not run the upload.
            until(lambda: any(text.startswith("uploading: 100%") for text in recorder.texts))
        sender.join()
    finally:
        node.shared = shared
    assert [stall.why for stall in dr.profiler.stalls()] == [
        "an upload"
    ] and not dr.profiler.stalls().advice()


def test_a_full_window_says_how_much_must_run_until_there_is_room(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distruntime.log.log.WINDOW", 300)
    x = torch.ones(3, device=REMOTE)
    dr.synchronize()

    def issue() -> None:
        for _ in range(1000):
            x.add(1)

    with blocked(dr.default_stream(0)):
        issuer = threading.Thread(target=issue)
        issuer.start()
        full = r"waiting for node 0 \(.+\): its queue is full, (\d+) operations? until it takes more"
        until(lambda: any(re.match(full, text) for text in recorder.texts))
        log = active_session().nodes[0]
        assert 0 < until_room(log) <= under_way(log)

        def is_room_where_all_has_run() -> bool:
            told, log.told = log.told, log.base
            try:
                return until_room(log) == 0
            finally:
                log.told = told

        # The pump sends what the issuer has left in the log.
        until(is_room_where_all_has_run)
    issuer.join()


def test_a_long_wait_names_what_drops_the_queue(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "_COUNTING", 0.0)
    x = torch.ones(3, device=REMOTE)
    with blocked(dr.default_stream(0)):
        y = [x + k for k in range(20)]
        reader = threading.Thread(target=y[-1].tolist)
        reader.start()
        long = (
            r"waiting for node 0 .+ under way.* \(Ctrl-C leaves, dr\.cancel\(\) then drops what is queued\)"
        )
        until(lambda: any(re.fullmatch(long, text) for text in recorder.texts))
    reader.join()


def test_a_terminal_is_repainted_a_few_times_a_second(recorder: Recorder) -> None:
    recorder.pause = Terminal().pause  # type: ignore[method-assign]
    announcer = Announcer()
    started = time.monotonic()
    with announcer.working("saving", 1 << 20, count().__next__):
        until(lambda: announcer.show() or time.monotonic() > started + 0.6)
    assert 2 <= len(recorder.texts) <= 4


def test_saves_and_loads_are_bars(session: object, recorder: Recorder, tmp_path: Path) -> None:
    tree = {"x": torch.ones(1 << 22, device=REMOTE)}

    def saved_and_loaded() -> bool:
        dr.save(tree, tmp_path / "checkpoint")
        dr.load(tmp_path / "checkpoint")
        return recorder.has("saving to ") and recorder.has("loading from ")

    until(saved_and_loaded)
    until(lambda: any("100%" in text for text in recorder.ends))


def test_a_wait_says_about_how_long_the_rest_takes(session: object) -> None:
    wait = Wait(0.0, active_session().nodes[0], None, False, (0.0, 100), (10.0, 50))
    assert announce._estimate(wait, 10.0) == ", about 10 s left"
    # It does not rise until the worker has told more, or has not moved for a while.
    assert announce._estimate(wait, 11.0) == ", about 10 s left"
    assert announce._estimate(wait, 20.0) == ", about 20 s left"
    assert announce._estimate(wait, 5000.0) == ", about 1 h 23 m left"
    # Nobody knows yet.
    wait.last = wait.first
    assert announce._estimate(wait, 10.0) == ""
    wait.first = wait.last = None
    assert announce._estimate(wait, 10.0) == ""


def test_the_counts_agree_and_go_on_within_a_segment(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distruntime.log.log.FIRST_BATCH", 4000)
    monkeypatch.setattr(announce, "_ASKED", 0.0)
    monkeypatch.setattr(announce, "_COUNTING", 0.0)
    x, stream = torch.ones(3, device=REMOTE), dr.default_stream(0)
    dr.synchronize()
    first = ExitStack()
    first.enter_context(blocked(stream))
    y = [x + k for k in range(50)]
    # It stands in the middle of a segment.
    with blocked(stream):
        z = [x + k for k in range(50)]
        reader = threading.Thread(target=z[-1].tolist)
        reader.start()
        first.close()
        until(
            lambda: any(re.match(r"waiting for .+: 5[0-3] operations under way", t) for t in recorder.texts)
        )

        def agree() -> bool:
            queued = dr.nodes()[0].queued
            assert queued is not None and 50 <= queued <= 53
            return f": {queued} operations queued" in queued_text(active_session())

        # The worker may take another word between the two looks.
        until(agree)
    reader.join()
    assert y[-1].tolist() == [50.0] * 3


def test_the_bar_of_an_upload_that_has_just_ended_is_not_shown_again(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    announcer = Announcer()
    # The upload has ended since the text was made, and the next statement waits.
    monkeypatch.setattr(announcer, "_text", lambda on, now: (now - 10, "uploading: 100%"))
    announcer.start_waiting(active_session().nodes[0])
    announcer.show()
    announcer.stop_waiting()
    assert recorder.texts == recorder.ends == []


def test_a_wait_that_ends_while_its_line_is_shown_takes_it_away(
    session: object, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook would keep the line: a display takes long."""
    announcer, showing, on = Announcer(), threading.Event(), threading.Event()

    def show(text: str) -> None:
        showing.set()
        on.wait(60)
        recorder.texts.append(text)

    monkeypatch.setattr(recorder, "show", show)
    monkeypatch.setattr(announcer, "_text", lambda screen, now: (now - 10, "waiting for node 0"))
    announcer.start_waiting(active_session().nodes[0])
    shower = threading.Thread(target=announcer.show)
    # It goes on once the wait is over.
    other = threading.Thread(target=lambda: (until(lambda: not announcer.waiting), on.set()))
    shower.start()
    assert showing.wait(60)
    other.start()
    announcer.stop_waiting()
    for thread in (shower, other):
        thread.join()
    assert recorder.texts == ["waiting for node 0"] and len(recorder.ends) == 1 and not announcer._shown
    assert recorder.ends[0].startswith("waited ")


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


def test_a_start_in_a_notebook_has_no_dots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distruntime.session.screen.in_notebook", lambda: True)
    say = voice(None)
    for text in ("\n", "starting ", ".", ".", " ready\n"):
        say(text)
    assert capsys.readouterr().out == "starting  ready\n"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUNTIME_QUIET", "1")
    voice(None)("nothing\n")
    monkeypatch.delenv("DISTRUNTIME_QUIET")
    for quiet in (True, None, False):
        voice(quiet)("a ")
        voice(quiet)("line\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a line\n", "line\n")
