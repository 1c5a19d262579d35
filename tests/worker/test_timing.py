"""What a worker notes while its master traces, and that nothing of it is left afterwards."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import CHECK, FIRST_TEMPLATE, PROGRAM, Fetch, OpenMesh, Segment, TraceKept
from distruntime_worker.log.timing import MOST, ROW, Recorded
from distruntime_worker.machine.devices import Devices
from distruntime_worker.machine.kernels import Kernels
from distruntime_worker.session.executor import Executor
from distruntime_worker.session.tracing import Tracing
from distruntime_worker.values.streams import Work

MUL = FIRST_TEMPLATE


def executor() -> Executor:
    found = Executor(Devices(), lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    found.learn([[MUL, "aten::mul.Tensor", [OPERAND, ["number"]], {}, 1]])
    found.state.slots[1] = torch.ones(3)
    return found


def issue(executor: Executor, start: int, *words: Any) -> None:
    work = Work(Segment(1, start, [], list(words), []), [], 1)
    executor.works.append(work)
    with torch.no_grad():
        executor.run(work)


def rows(kept: TraceKept, data: bytes) -> list[tuple[str, int, int, int, int, int]]:
    numbers = array("q", data[: sum(thread.rows for thread in kept.threads) * ROW * 8])
    found = []
    for k in range(0, len(numbers), ROW):
        step, *rest = numbers[k : k + ROW]
        found.append((kept.steps[step].name, *rest))
    return found  # type: ignore[return-value]


def brought(executor: Executor, recorded: Recorded) -> tuple[TraceKept, list[Any]]:
    executor.stop_trace()
    kept, data = recorded.kept(executor.state, [], "")
    return kept, rows(kept, data)


def test_each_instruction_has_its_row_and_its_times() -> None:
    one = executor()
    recorded = one.start_trace(100)
    issue(one, 0, MUL, 1, 2.0, 2, MUL, 2, 3.0, 3)
    recorded.arrived(1)
    kept, found = brought(one, recorded)
    assert [(name, mesh, position, sequence) for name, mesh, position, sequence, _, _ in found] == [
        ("aten::mul.Tensor", -1, 0, -1),
        ("aten::mul.Tensor", -1, 4, -1),
    ]
    times = [time for row in found for time in row[-2:]]
    assert times == sorted(times)
    assert (kept.arrived, kept.dropped, kept.threads[0][1:]) == (1, 0, ("stream", 2))
    assert one.state.slots[3].tolist() == [6.0] * 3  # type: ignore[attr-defined]


def test_an_instruction_that_is_checked_has_one_row() -> None:
    one = executor()
    recorded = one.start_trace(100)
    spec = [[3], [1], 0, "float32", 0]
    issue(one, 0, CHECK, 1, [spec], MUL, 1, 2.0, 2)
    _, found = brought(one, recorded)
    assert [(name, position) for name, _, position, *_ in found] == [("aten::mul.Tensor", 3)]


def test_nothing_is_left_of_a_trace() -> None:
    one = executor()
    before = dict(one.state.templates)
    runs = {number: step.run for number, step in one.state.info.items()}
    answer = one._answers.answer_with
    one.start_trace(100)
    assert one.state.templates[MUL] is not before[MUL]
    assert one._answers.answer_with != answer
    one.stop_trace()
    assert one.state.templates == before
    assert one.state.templates[MUL] is runs[MUL]
    assert one._answers.answer_with == answer


def test_templates_that_come_meanwhile_are_timed_and_meshes_too() -> None:
    one = executor()
    recorded = one.start_trace(100)
    one.learn([[MUL + 1, "aten::neg.default", [OPERAND], {}, 1]])
    issue(one, 0, MUL + 1, 1, 2)
    one.open_mesh(OpenMesh(0, ["cpu"]))
    mesh = one.state.meshes[0]
    one.learn([[FIRST_TEMPLATE, "aten::neg.default", [OPERAND], {}, 1]], mesh)
    work = Work(Segment(2, 0, [], [FIRST_TEMPLATE, 1, 5], []), [], 1, mesh=mesh)
    one.works.append(work)
    with torch.no_grad():
        one.run(work)
    _, found = brought(one, recorded)
    assert [(name, number, position) for name, number, position, *_ in found] == [
        ("aten::neg.default", -1, 0),
        ("aten::neg.default", 0, 0),
    ]


def test_the_parts_of_a_program_are_not_timed() -> None:
    one = executor()
    row = ["aten::mul.Tensor", [OPERAND, ["number"]], {}, 1]
    fields = program(row)
    one.learn([[MUL + 1, PROGRAM, fields, {}, 0]])
    recorded = one.start_trace(100)
    step = one.state.info[MUL + 1]
    assert all(run is part.run for run, part in zip(step.runs, step.parts))
    assert one.state.templates[MUL + 1] != step.run
    issue(one, 0, MUL + 1, 1, 2)
    _, found = brought(one, recorded)
    assert [(name, position) for name, _, position, *_ in found] == [(PROGRAM, 0)]
    assert one.state.slots[2].tolist() == [2.0] * 3  # type: ignore[attr-defined]


def program(row: list[Any]) -> list[Any]:
    """Return the fields of a program of one instruction: what it makes is its argument, times 2."""
    return [[row], [[0, [["a", 1], ["f", 2.0]], [0], None]], [], [["v", 0]], 1, 0]


def test_what_still_runs_has_no_end() -> None:
    one = executor()
    recorded = one.start_trace(100)
    seen: list[Any] = []

    def look(*_: Any) -> torch.Tensor:
        kept, data = recorded.kept(one.state, [], "")
        seen.extend(rows(kept, data))
        return torch.ones(3)

    one.steps._functions["distruntime::look"] = look
    one.learn([[MUL + 1, "distruntime::look", [], {}, 1]])
    issue(one, 0, MUL, 1, 2.0, 2, MUL + 1, 3)
    assert [(name, position) for name, _, position, *_ in seen] == [
        ("aten::mul.Tensor", 0),
        ("distruntime::look", 4),
    ]
    assert seen[0][-1] > 0 and seen[1][-1] == -1
    one.stop_trace()


def test_what_has_no_room_is_counted_and_no_memory_is_without_end() -> None:
    one = executor()
    recorded = one.start_trace(2)
    for k in range(5):
        issue(one, 4 * k, MUL, 1, 2.0, 2)
    kept, found = brought(one, recorded)
    assert (len(found), kept.dropped) == (2, 3)
    assert Recorded(1 << 60)._most == MOST


def test_the_master_takes_it_in_pieces_and_then_it_is_gone() -> None:
    one, kept, begun = executor(), list[TraceKept](), list[int]()
    tracing = Tracing(one)
    arrived = tracing.start(100, lambda: begun.append(1))
    arrived(1)
    issue(one, 0, MUL, 1, 2.0, 2)
    tracing.stop(kept.append)
    assert begun == [1] and kept[0].nbytes == ROW * 8 + 16
    assert len(tracing.take(0)) == kept[0].nbytes
    assert tracing.take(0) == b""
    tracing.stop(kept.append)
    assert kept[1].nbytes == 0


def test_an_answer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = executor()
    recorded = one.start_trace(100)
    one.fetch(Fetch(9, 1, [0, 0], "tensor", {}))
    _, found = brought(one, recorded)
    assert [(name, position) for name, _, position, *_ in found] == [("fetch tensor", 9)]


def test_torchs_profiler_begins_and_ends_and_a_second_one_is_told() -> None:
    first, second = Kernels({ProfilerActivity.CPU}), Kernels({ProfilerActivity.CPU})
    first.start()
    second.start()
    torch.ones(3) + 1
    # On a machine without an accelerator there are no kernels.
    assert first.stop() == ([], "")
    assert second.stop() == ([], "another session of the worker traces them")
    third = Kernels({ProfilerActivity.CPU})
    third.start()
    assert third.stop() == ([], "")
