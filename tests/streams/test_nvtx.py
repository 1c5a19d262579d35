"""`dr.nvtx`: ranges with a name hold what a stream runs between their begin and their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import distruntime as dr
from distruntime.session.session import Session
from distruntime_worker.machine import ranges
from traces import Read, Slice, line_of, read_trace


class Under:
    """What a trace has recorded, once it is over."""

    trace: Read

    def range(self, name: str) -> Slice:
        """Return the only range of a name."""
        (found,) = [one for one in self.trace.of("node", "range") if one.name == name]
        return found

    def inside(self, name: str) -> list[str]:
        """Return what ran in a range, without ranges."""
        outer = self.range(name)
        return [
            one.name
            for one in self.trace.of("node")
            if one.kind != "range"
            and (one.process, one.thread) == (outer.process, outer.thread)
            and outer.began <= one.began
            and one.ended <= outer.ended
        ]


@contextmanager
def traced(folder: Path) -> Iterator[Under]:
    under, path = Under(), folder / "step.json"
    with dr.trace(path, quiet=True):
        yield under
    under.trace = read_trace(path)


def test_a_range_holds_what_its_stream_runs(session: Session, tmp_path: Path) -> None:
    x = torch.ones(4, device="remote")
    with traced(tmp_path) as under:
        y = x + 1
        with dr.nvtx.range("step"):  # the step
            y = y * 2
            with dr.nvtx.range("inner"):
                y = y.exp()
            dr.nvtx.mark("half")
        y = y.neg()
    assert under.inside("step") == ["aten.mul.Tensor", "aten.exp"]
    assert under.inside("inner") == ["aten.exp"]
    assert under.range("step").args["line"].endswith(line_of(__file__, "the step"))
    half, inner, step = (under.range(name) for name in ("half", "inner", "step"))
    assert step.began <= inner.began <= inner.ended <= half.began <= half.ended <= step.ended
    # The ranges are no instructions of their own.
    assert [one.name for one in under.trace.of("node", "operator")] == [
        *("aten.add.Tensor", "aten.mul.Tensor", "aten.exp", "aten.neg")
    ]


def test_a_training_step_in_ranges(session: Session, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traced(tmp_path) as under:
        with dr.nvtx.range("forward"):
            loss = model(torch.ones(2, 4, device="remote")).square().mean()
        with dr.nvtx.range("backward"):
            loss.backward()
        with dr.nvtx.range("optimizer"):
            optimizer.step()
    assert "aten.linear" in under.inside("forward")
    behind = under.inside("backward")
    assert "distruntime.linear_backward" in behind and "aten.linear" not in behind
    assert "aten._foreach_add_.List" in under.inside("optimizer")


def test_a_range_is_on_the_stream_where_it_began(session: Session, tmp_path: Path) -> None:
    side = dr.Stream(1)
    x = torch.ones(4, device=dr.place(1))
    with traced(tmp_path) as under:
        with dr.stream(side):
            assert dr.nvtx.range_push("side") == 0
            y = x.sin()
        # This place and stream are others now, and the range ends where it began.
        x.cos()
        with dr.stream(side):
            y = y.tan()
        assert dr.nvtx.range_pop() == 0
        with dr.on(1), dr.nvtx.range("default"):
            x.exp()
    assert under.inside("side") == ["aten.sin", "aten.tan"] and under.inside("default") == ["aten.exp"]
    assert under.range("side").process.startswith("node 1")


def test_a_function_in_a_range(session: Session, tmp_path: Path) -> None:
    @dr.nvtx.range("each call")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(4, device="remote")
    with traced(tmp_path) as under:
        double(double(x))
    assert [one.name for one in under.trace.of("node", "range")] == ["each call"] * 2


def test_a_range_of_a_mesh_is_on_each_node(session: Session, tmp_path: Path) -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = torch.ones(4, device=mesh.device)
    with traced(tmp_path) as under, mesh, dr.nvtx.range("all"):
        x = x + 1
    found = [one for one in under.trace.of("node", "range") if one.name == "all"]
    assert sorted(one.process[:6] for one in found) == ["node 0", "node 1"]


def test_ranges_that_reach_over_the_ends_of_a_trace(session: Session, tmp_path: Path) -> None:
    x = torch.ones(4, device="remote")
    dr.nvtx.range_push("before")
    with traced(tmp_path) as under:
        x = x + 1
        dr.nvtx.range_pop()
        dr.nvtx.range_push("after")
        x = x * 2
    dr.nvtx.range_pop()
    assert under.inside("before") == ["aten.add.Tensor"] and under.range("before").began == 0
    assert under.inside("after") == ["aten.mul.Tensor"]


def test_each_thread_has_ranges_of_its_own(session: Session) -> None:
    def ends() -> None:
        with pytest.raises(dr.errors.UsageError, match="this thread has no range open"):
            dr.nvtx.range_pop()

    with dr.nvtx.range("mine"):
        thread = threading.Thread(target=ends)
        thread.start()
        thread.join()
    ends()
    with pytest.raises(dr.errors.UsageError, match="the name of a range is a text, got 3"):
        dr.nvtx.range_push(3)  # type: ignore[arg-type]


def test_a_program_with_ranges_is_replayed(session: Session) -> None:
    @dr.program
    def step(x: torch.Tensor) -> torch.Tensor:
        with dr.nvtx.range("step"):
            return x * 2 + 1

    x = torch.ones(4, device="remote")
    for _ in range(4):
        x = step(x)
    assert x.tolist() == [31.0] * 4 and step.replays > 0


def test_a_cancelled_begin_leaves_the_ranges_in_order(session: Session, tmp_path: Path) -> None:
    x = torch.ones(4, device="remote")
    with traced(tmp_path) as under:
        with dr.nvtx.range("cancelled"):
            x = x + 1
            dr.cancel(0)
        with dr.nvtx.range("next"):
            y = torch.ones(4, device="remote") * 2
        assert y.tolist() == [2.0] * 4
    assert "aten.mul.Tensor" in under.inside("next")


def test_the_worker_opens_ranges_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(ranges, "_has_nvtx", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append(None))
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: told.append((name,)))
    ranges.range_push("a")
    ranges.range_push("b")
    ranges.mark("m")
    # The end of `b` was dropped, and the begin of `c`.
    ranges.range_pop("c")
    ranges.range_pop("a")
    ranges.range_pop("a")
    assert told == ["a", "b", ("m",), None, None]
