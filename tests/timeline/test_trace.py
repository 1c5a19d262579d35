"""`dr.trace` writes what the master, the wire and the workers did, with the user's lines, on one clock."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distruntime as dr
from distruntime.session import stalls
from distruntime.session.session import Session
from distruntime.timeline import chrome
from distruntime.timeline.parts import Clock, Reading, read_clock
from distruntime.timeline.recording import Sampler, Stay
from distruntime.wire.messages import AskClock, StopTrace
from processes import blocked, stopped, until
from traces import Read, Slice, line_of, read_trace

at = partial(line_of, __file__)


def operators(trace: Read) -> list[Slice]:
    return trace.of("node", "operator", "function", "program", "upload", "collective", "wait")


def short(one: Slice) -> str:
    """Return the line of a slice, without its folder."""
    return os.path.basename(one.args.get("line", "no line"))


@pytest.fixture
def traced(session: Session, tmp_path: Path) -> Callable[[Callable[[], None]], Read]:
    """Run a function under a trace, and read the trace."""

    def run(work: Callable[[], None]) -> Read:
        path = tmp_path / "step.json"
        with dr.trace(path, quiet=True):
            work()
        return read_trace(path)

    return run


def test_each_instruction_is_there_once_with_its_line(traced: Callable[..., Read], session: Session) -> None:
    x = torch.ones(20, 20, device="remote")
    y = torch.ones(20, 20, device=dr.place(1))
    dr.synchronize()

    def work() -> None:
        z = x
        for _ in range(30):
            z = z + x  # the addition
        (y * 2).sum()  # the other node

    trace = traced(work)
    found = operators(trace)
    additions = [one for one in found if one.name == "aten.add.Tensor"]
    assert len(additions) == 30
    assert {short(one) for one in additions} == {at("the addition")}
    assert {one.process for one in additions} == {"node 0 (" + session.nodes[0].host + ")"}
    positions = [one.args["position"] for one in additions]
    assert len(set(positions)) == 30 and positions == sorted(positions)
    other = [one for one in found if one.process.startswith("node 1")]
    assert [(one.name, short(one)) for one in other] == [
        ("aten.mul.Tensor", at("the other node")),
        ("aten.sum", at("the other node")),
    ]
    assert sum(row["instructions"] for row in trace.about["nodes"]) == len(found) == 32


def test_the_file_is_what_perfetto_reads(traced: Callable[..., Read]) -> None:
    x = torch.ones(20, 20, device="remote")
    trace = traced(lambda: [(x + k).sum().item() for k in range(5)])
    known = {(e["pid"], e["tid"]) for e in trace.events if e["name"] == "thread_name"}
    assert {s.process.split()[0] for s in trace.slices} == {"master", "node"}
    for event in trace.events:
        assert event["ph"] in "MXisft" and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in known
            assert isinstance(event["args"], dict)
    assert trace.flows
    by_thread: dict[tuple[str, str], list[Slice]] = {}
    for one in trace.slices:
        by_thread.setdefault((one.process, one.thread), []).append(one)
    for flow in trace.flows:
        assert [e["ph"] for e in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert flow[-1]["bp"] == "e" and len(flow) >= 3
        times = [e["ts"] for e in flow]
        # The clocks differ by less than the trace says.
        within = sum(row["clock_within_ms"] for row in trace.about["nodes"]) * 1e3
        assert all(b >= a - within for a, b in itertools.pairwise(times))
    for (_, thread), slices in by_thread.items():
        # What a viewer shows on one thread is nested, or follows.
        ends: list[float] = []
        for one in sorted(slices, key=lambda s: (s.began, -s.ended)):
            while ends and ends[-1] <= one.began + 0.002:
                ends.pop()
            assert not ends or one.ended <= ends[-1] + 0.002, (thread, one)
            ends.append(one.ended)


def test_a_read_of_the_worker_lies_in_the_wait_of_the_master(traced: Callable[..., Read]) -> None:
    x = torch.ones(20, 20, device="remote")

    def work() -> None:
        for _ in range(20):
            (x + 1).sum().item()  # the read

    trace = traced(work)
    within = max(row["clock_within_ms"] for row in trace.about["nodes"]) * 1e3
    waits = [one for one in trace.of("master", "read") if one.args["why"] == "item"]
    assert len(waits) == 20 and {short(one) for one in waits} == {at("the read")}
    answers = [one for one in trace.slices if one.kind == "answer"]
    assert len(answers) == 20
    for answer in answers:
        # The reply may be here before the worker's thread has returned from sending it.
        assert any(w.began - within <= answer.began <= w.ended + within for w in waits)
        assert short(answer) == at("the read")
    # One clock serves all processes of this machine, so the estimate is nearly nothing.
    assert all(row["clock_within_ms"] < 1000 for row in trace.about["nodes"])


def test_a_clock_is_estimated_to_within_what_it_says(session: Session) -> None:
    for node in session.nodes:
        reading = read_clock(session, node, 60.0)
        assert reading is not None
        # They are processes of one machine, and so their clocks are one.
        assert abs(reading.ahead) <= reading.trip // 2
        assert Clock(reading, reading).uncertainty == reading.trip // 2
    assert session.value(session.ask(session.nodes[0], AskClock)).calendar > 1_700_000_000 * 10**9


def test_a_clock_that_runs_faster_is_followed() -> None:
    second = 10**9
    steady = Clock(Reading(0, 500, 100, 0), Reading(second, 540, 60, 0))
    assert steady.steady and steady.here(1540) == 1000 and steady.uncertainty == 30
    fast = Clock(Reading(0, 0, 100, 0), Reading(second, 10_000, 300, 0))
    assert not fast.steady and fast.uncertainty == 150
    assert fast.here(0) == 0 and fast.here(second + 10_000) == second
    assert abs(fast.here(second // 2 + 5000) - second // 2) <= 1


def test_uploads_and_copies_and_functions_have_their_names(traced: Callable[..., Read]) -> None:
    @dr.remote
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def work() -> None:
        here = torch.arange(40_000.0).reshape(200, 200).to("remote")  # the upload
        there = here.to(dr.place(1))  # the copy
        twice(there)  # the function
        dr.synchronize()

    work()
    trace = traced(work)
    (upload,) = trace.of("node 0", "upload")
    assert short(upload) == at("the upload")
    copies = trace.of("node", "collective")
    assert {one.process.split()[1] for one in copies} == {"0", "1"}
    assert {short(one) for one in copies} == {at("the copy")}
    assert len({one.args["together"] for one in copies}) == 1 and copies[0].args["nodes"] == [0, 1]
    (function,) = trace.of("node 1", "function")
    assert "twice" in function.name and short(function) == at("the function")
    assert any("upload" in one.args for one in trace.of("master", "send"))


def test_streams_have_threads_of_their_own_and_their_waits_are_shown(traced: Callable[..., Read]) -> None:
    stream = dr.Stream(0)
    x = torch.ones(300, 300, device="remote")
    dr.synchronize()

    def work() -> None:
        # A wait for what has run already is left out.
        with blocked(stream):
            with dr.stream(stream):
                y = x @ x  # on a stream
            y + 1  # on the default stream

    trace = traced(work)
    (product,) = trace.named("aten.mm")
    assert product.thread.startswith("stream 1") and short(product) == at("on a stream")
    (held,) = [one for one in trace.of("node 0", "wait") if one.thread == "stream 0"]
    assert short(held) == at("on the default stream")


def test_a_program_is_one_slice_with_its_name(traced: Callable[..., Read]) -> None:
    @dr.program
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu().sum()

    x = torch.ones(20, 20, device="remote")
    for _ in range(4):
        step(x)
    assert "replay" in repr(step)
    # What still ran would be in the trace, too.
    dr.synchronize()

    def work() -> None:
        for _ in range(5):
            step(x)  # the replay

    trace = traced(work)
    found = [one for one in operators(trace) if one.kind == "program"]
    assert [(one.name, short(one)) for one in found] == [("program 'step'", at("the replay"))] * 5
    # The straight-line code of a program still runs as one.
    assert operators(trace) == found
    step(x)


def test_a_mesh_names_the_nodes_of_its_members(traced: Callable[..., Read]) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.ones(8, 8, device=mesh.device)
    line = mesh.lines()
    dr.lines.all_reduce(line, x)
    dr.synchronize()

    def work() -> None:
        y = x * 3  # on the mesh
        dr.lines.all_reduce(line, y)  # the sum

    trace = traced(work)
    products = [one for one in operators(trace) if one.name == "aten.mul.Tensor"]
    assert [one.args["nodes"] for one in products] == [[0, 1], [0, 1]]
    assert {one.process.split()[1] for one in products} == {"0", "1"}
    assert {short(one) for one in products} == {at("on the mesh")}
    sums = [one for one in trace.of("node", "collective") if "all_reduce" in one.name]
    assert {one.process.split()[1] for one in sums} == {"0", "1"}
    assert {short(one) for one in sums} == {at("the sum")}
    assert len({one.args["together"] for one in sums}) == 1


def test_a_mesh_that_is_made_meanwhile_is_traced(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    fresh_session(world_size=2)
    with dr.trace(tmp_path / "step.json", quiet=True):
        mesh = dr.init_device_mesh("cpu", (2,))
        torch.ones(8, 8, device=mesh.device) * 3  # on a new mesh
    trace = read_trace(tmp_path / "step.json")
    products = [one for one in operators(trace) if one.name == "aten.mul.Tensor"]
    assert len(products) == 2 and {short(one) for one in products} == {at("on a new mesh")}


def test_what_was_issued_before_says_so(session: Session, tmp_path: Path) -> None:
    x = torch.ones(3, device="remote")
    dr.synchronize()
    with ExitStack() as until_then:
        until_then.enter_context(blocked(dr.default_stream(0)))
        x.add_(1)  # before
        with dr.trace(tmp_path / "step.json", quiet=True):
            until_then.close()
            x + 1  # inside
    found = {one.name: one for one in operators(read_trace(tmp_path / "step.json"))}
    assert short(found["aten.add_.Tensor"]) == at("before")
    assert found["aten.add_.Tensor"].args["issued"] == "before the trace"
    assert short(found["aten.add.Tensor"]) == at("inside")
    assert "issued" not in found["aten.add.Tensor"].args


def test_nothing_is_left_when_it_is_over(session: Session, tmp_path: Path) -> None:
    sends = [log.outlet.send for log in session.logs]
    threads = set(threading.enumerate())
    with dr.trace(tmp_path / "step.json.gz", quiet=True):
        assert [log.outlet.send for log in session.logs] != sends
        torch.ones(3, device="remote") + 1
    assert [log.outlet.send for log in session.logs] == sends
    assert stalls.watchers == [] and session.on_mesh == []
    assert set(threading.enumerate()) <= threads
    assert read_trace(tmp_path / "step.json.gz").named("aten.add.Tensor")
    # The workers have nothing to bring any more.
    kept = session.value(session.ask(session.nodes[0], StopTrace))
    assert (kept.nbytes, kept.threads, kept.dropped) == (0, [], 0)


def test_an_error_in_the_body_is_raised_and_the_trace_is_written(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with pytest.raises(ZeroDivisionError), dr.trace(path, quiet=True):
        torch.ones(3, device="remote") * 7
        raise ZeroDivisionError
    assert read_trace(path).named("aten.mul.Tensor")
    with dr.trace(path, quiet=True):
        pass


def test_a_second_trace_is_refused(session: Session, tmp_path: Path) -> None:
    with dr.trace(tmp_path / "step.json", quiet=True):  # the first
        with pytest.raises(dr.errors.UsageError, match="a trace is on already") as caught:
            dr.trace(tmp_path / "other.json").start()
        assert "step.json" in str(caught.value) and at("the first").split(":")[1] in str(caught.value)
        with pytest.raises(dr.errors.UsageError, match="still on"):
            dr.why_slow(tmp_path / "step.json")
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    "name, reason", [("step.txt", "expected a name that ends in"), ("no/step.json", "there is no folder")]
)
def test_a_file_that_cannot_be_is_refused_before_anything_runs(
    session: Session, tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(dr.errors.UsageError, match=reason):
        dr.trace(tmp_path / name)
    with pytest.raises(dr.errors.UsageError, match="a number of instructions"):
        dr.trace(tmp_path / "step.json", most=0)


def test_start_and_stop(session: Session, tmp_path: Path) -> None:
    trace = dr.trace(tmp_path / "step.json", quiet=True)
    with pytest.raises(dr.errors.UsageError, match="never started"):
        trace.stop()
    trace.start()
    assert "on" in repr(trace)
    torch.ones(3, device="remote") * 7
    trace.stop()
    assert trace.seconds > 0 and [node.missing for node in trace.nodes] == ["", ""]
    assert read_trace(trace.path).named("aten.mul.Tensor")


def test_without_a_session(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(dr.errors.SessionClosed):
        dr.trace(tmp_path / "step.json").start()
    fresh_session(world_size=1)
    with dr.trace(tmp_path / "step.json", quiet=True):
        torch.ones(3, device="remote") * 7
        dr.shutdown()
    trace = read_trace(tmp_path / "step.json")
    assert "the session has ended" in trace.about["nodes"][0]["missing"]


def test_what_has_no_room_is_counted(
    session: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(3, device="remote")
    with dr.trace(tmp_path / "step.json", most=10, quiet=False) as trace:
        for _ in range(50):
            x + 1
    assert trace.nodes[0].dropped >= 40 and trace.nodes[0].instructions <= 10
    assert "had no room for" in capfd.readouterr().out
    assert read_trace(tmp_path / "step.json").about["nodes"][0]["dropped"] == trace.nodes[0].dropped
    assert "had no room for" in repr(dr.why_slow())


def test_a_worker_that_dies_leaves_its_part_out(fresh_session: Callable[..., Any], tmp_path: Path) -> None:
    session = fresh_session(world_size=2)
    x = torch.ones(3, device="remote")
    with dr.trace(tmp_path / "step.json", quiet=True) as trace:
        x * 7
        os.kill(session.nodes[1].welcome.pid, signal.SIGKILL)
        until(lambda: dr.nodes()[1].state == "lost")
    assert trace.nodes[0].missing == "" and "node 1" in trace.nodes[1].missing
    found = read_trace(tmp_path / "step.json")
    assert found.named("aten.mul.Tensor")
    assert any("its part is left out" in note["name"] for note in found.notes)
    assert "node 1 is left out" in repr(dr.why_slow())


def test_a_worker_that_does_not_answer_is_left_out(
    fresh_session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = fresh_session(world_size=2)
    x = torch.ones(3, device="remote")
    with dr.trace(tmp_path / "step.json", timeout=0.2, quiet=True) as trace:
        x * 7
        monkeypatch.setenv("DISTRUNTIME_LOOK_TIMEOUT", "0.2")
        holding = stopped(session.nodes[1].welcome.pid)
        holding.__enter__()
        torch.ones(3, device=dr.place(1))
    holding.__exit__(None, None, None)
    assert "did not answer" in trace.nodes[1].missing
    assert dr.why_slow().missing
    dr.synchronize()


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in (
        "",
        "[]",
        '{"traceEvents": []}',
        json.dumps({"traceEvents": 3, "otherData": {chrome.MARK: 1}}),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(dr.errors.UsageError, match="is no trace that"):
            dr.why_slow(path)
    with pytest.raises(dr.errors.UsageError, match="cannot be read"):
        dr.why_slow(tmp_path / "nothing.json")


def test_a_frame_between_two_lines_is_at_the_line_where_its_code_begins() -> None:
    def look() -> Stay:
        caller = sys._getframe(1)
        assert caller.f_lineno is None
        sampler = Sampler(0)
        sampler._look(caller, 0, 1)
        return sampler.stays[0]

    def nowhere(call: Callable[[], Stay]) -> Stay:
        return call()

    nowhere.__code__ = nowhere.__code__.replace(co_linetable=b"")
    assert nowhere(look).number == nowhere.__code__.co_firstlineno
