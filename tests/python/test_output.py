"""What functions print, log and warn of is shown here, with the node in front."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from distruntime.session.output import Output
from distruntime.session.screen import voice
from distruntime.wire.messages import Printed
from distruntime_worker.python.alarms import Alarms
from distruntime_worker.python.running import Around
from processes import until


def says() -> None:
    print("one")
    print("two", "three", end="")
    sys.stderr.write("wrong\n")


def test_letters_that_a_stream_does_not_take_are_written_as_numbers(
    session: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    dr.fetch(dr.remote(lambda: print("größe … \u4e2d"), returns=object)(node=1))
    voice(False)("8 × a, …\n")
    assert narrow.buffer.getvalue() == b"[node 1] gr\\xf6\\xdfe ... \\u4e2d\n8 x a, ...\n"  # type: ignore[attr-defined]


def test_what_a_function_prints_is_there_when_its_result_is(
    session: object, capsys: pytest.CaptureFixture[str]
) -> None:
    dr.fetch(dr.remote(says)(node=1))
    out, err = capsys.readouterr()
    assert out == "[node 1] one\n[node 1] two three\n"
    assert err == "[node 1] wrong\n"


def test_it_is_shown_while_the_function_runs_and_nobody_waits(
    session: object, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    go_on = tmp_path / "go on"

    def says_and_waits() -> None:
        print("begun ...", end="")
        limit = time.monotonic() + 60
        while not go_on.exists() and time.monotonic() < limit:
            time.sleep(0.01)

    running = dr.remote(says_and_waits, returns=object)(node=1)
    shown: list[str] = []

    def begun() -> bool:
        shown.append(capsys.readouterr().out)
        return "[node 1] begun ..." in "".join(shown)

    until(begun)
    go_on.touch()
    dr.fetch(running)


def test_records_come_to_the_logger_of_their_name(session: object, caplog: pytest.LogCaptureFixture) -> None:
    def logs() -> None:
        log = logging.getLogger("a.library")
        log.info("quiet")
        log.warning("%d of %d", 1, 2)
        try:
            raise KeyError("k")
        except KeyError:
            log.exception("failed")

    caplog.set_level(logging.WARNING, "a.library")
    dr.fetch(dr.remote(logs)(node=1))
    first, second = caplog.records
    assert (first.name, first.levelname, first.getMessage()) == ("a.library", "WARNING", "[node 1] 1 of 2")
    assert first.pathname == __file__
    assert second.getMessage().startswith("[node 1] failed\nTraceback") and "KeyError: 'k'" in second.message


def test_warnings_are_warnings_of_the_line_that_has_called(session: object) -> None:
    def warns() -> None:
        for _ in range(3):
            warnings.warn("mind this", FutureWarning, stacklevel=1)

    f = dr.remote(warns)
    with pytest.warns(FutureWarning, match="mind this") as found:
        dr.fetch(f(node=1))
    assert [(w.filename, str(w.message)) for w in found] == [(__file__, "mind this")]
    with pytest.warns(FutureWarning, match="mind this"):
        dr.fetch(f(node=1))


def test_a_thread_of_the_function_prints_too(session: object, capsys: pytest.CaptureFixture[str]) -> None:
    def threads() -> None:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()

    dr.fetch(dr.remote(threads)(node=0))
    assert capsys.readouterr().out == "[node 0] from a thread\n"


def test_a_loop_of_prints_neither_floods_nor_blocks(
    session: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def loud() -> None:
        for k in range(40_000):
            print(f"line {k} " + "x" * 100)

    dr.fetch(dr.remote(loud)(node=1))
    out, err = capsys.readouterr()
    assert 1_000_000 < len(out) < 3_000_000
    assert "[node 1] line 0 x" in out
    assert " characters were left out ..." in out + err
    # What a session may send comes back with time.
    until(lambda: _printed(capsys) == "[node 1] one\n")


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    dr.fetch(dr.remote(print)("one", node=1))
    return capsys.readouterr().out


def test_what_nobody_can_show_harms_nobody(session: object, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert dr.fetch(dr.remote(lambda: print("x"))(node=1)) is None
        monkeypatch.undo()
    assert torch.ones(1, device=REMOTE).item() == 1.0


# -- the pieces ----------------------------------------------------------------------------------------------


def test_each_line_has_its_node_and_lines_of_two_nodes_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(lambda: None)
    zero: Any = SimpleNamespace(index=0)
    one: Any = SimpleNamespace(index=1)
    for node, text in ((zero, "a\nb"), (zero, "c"), (one, "d\r\ne\n"), (zero, "10%\r20%\n")):
        output.note(node, Printed(1, 0, "stdout", text), None)
    output.show()
    assert capsys.readouterr().out.split("\n") == [
        "[node 0] a",
        "[node 0] bc",
        "[node 1] d\r",
        "[node 1] e",
        "[node 0] 10%\r[node 0] 20%",
        "",
    ]


def around(sent: list[Any], present: Callable[[], bool] = lambda: True) -> Around:
    return Around(sent.append, lambda thread: None, present)


def test_what_is_written_without_a_master_is_not_sent() -> None:
    sent: list[Any] = []
    here = around(sent, lambda: False)
    call = here.call("f", None)
    call.begin()
    assert not call.write("stdout", "x\n")
    call.finish()
    here.close()
    assert sent == []


def test_lines_are_gathered_and_the_last_comes_with_the_end() -> None:
    sent: list[Any] = []
    here = around(sent)
    call = here.call("f", None)
    call.begin()
    for k in range(1000):
        assert call.write("stdout", f"{k}\n")
    call.finish()
    here.close()
    assert "".join(message.text for message in sent) == "".join(f"{k}\n" for k in range(1000))
    assert len(sent) < 100 and all(type(message) is Printed for message in sent)
    assert not call.write("stdout", "late\n")


def test_a_call_that_prints_nothing_costs_little() -> None:
    """It runs four functions of Python's."""
    here = around([])
    ran: list[str] = []

    def stood_around() -> None:
        call = here.call("f", None)
        try:
            call.begin()
        finally:
            call.finish()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            ran.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        stood_around()
    finally:
        sys.setprofile(before)
        here.close()
    assert ran == ["stood_around", "__init__", "begin", "_leave", "finish"], ran


def test_alarms_that_are_called_off_are_forgotten() -> None:
    alarms = Alarms()
    rung: list[int] = []
    for k in range(1000):
        alarms.call_off(alarms.after(1000.0, lambda k=k: rung.append(k)))  # type: ignore[misc]
    assert len(alarms._due) < 200
    alarms.after(0.0, lambda: rung.append(-1))
    until(lambda: rung == [-1])
