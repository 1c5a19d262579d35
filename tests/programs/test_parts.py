"""Programs of several streams, of meshes and of several nodes are cut into parts, and equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE
from as_program import Case, replayed_as_eager
from processes import blocked, slots


def _full(value: float, place: Any = REMOTE) -> torch.Tensor:
    return torch.full((4, 4), value).to(place)


# -- streams -------------------------------------------------------------------------------------------------


def _streams() -> Case:
    box = SimpleNamespace(w=torch.randn(4, 4).to(REMOTE), h=_full(0.0))
    one, other, own = dr.Stream(), dr.Stream(), dr.current_stream()

    def step(x: torch.Tensor) -> Any:
        one.wait_stream(own)
        with one:
            a = x @ box.w
            box.h = torch.tanh(box.h + a)
        with other:
            b = torch.relu(x * 2)
            box.w.add_(b, alpha=0.01)
        own.wait_stream(one)
        own.wait_stream(other)
        c = a + b
        box.w.mul_(0.9)
        return c, box.h.sum(), a[0]

    return Case(step, lambda k: (_full(0.1 * k),), lambda: (box.w, box.h))


def test_streams_of_a_node_are_replayed_each_on_its_own(session: Any) -> None:
    program = replayed_as_eager(_streams)
    assert program.replays == 6 and not program.why


def test_streams_without_implicit_waits_follow_the_recorded_events(session: Any) -> None:
    dr.set_implicit_waits(False)
    try:
        one, own = dr.Stream(), dr.current_stream()
        w, ready, over = _full(1.0), dr.Event(), dr.Event()

        def step(x: torch.Tensor) -> torch.Tensor:
            w.copy_(x)
            ready.record()
            with one:
                ready.wait(one)
                w.mul_(2)
                over.record(one)
            own.wait_event(over)
            return w + 1

        program = dr.program(step)
        found = []
        for k in range(8):
            x = _full(float(k))
            # A recording may wait for the worker.
            with blocked(one) if k > 2 else nullcontext():
                found.append(program(x))
        assert [y[0, 0].item() for y in found] == [2.0 * k + 1 for k in range(8)]
        assert program.replays == 6
    finally:
        dr.set_implicit_waits(True)


def test_a_replay_waits_for_an_event_that_was_recorded_outside(session: Any) -> None:
    one, event, w = dr.Stream(), dr.Event(), _full(0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        event.wait()
        return w + x

    program = dr.program(step)
    for k in range(6):
        with dr.stream(one):
            w.add_(1)
            event.record()
        assert program(_full(0.0))[0, 0].item() == k + 1
    assert program.replays == 4


def test_parts_leave_nothing_behind_and_cross_by_values_of_each_replay(session: Any) -> None:
    case = _streams()
    program = dr.program(case.function)
    x = _full(0.5)
    for _ in range(4):
        program(x)
    before = slots()
    for _ in range(20):
        program(x)
    assert program.replays == 22 and slots() == before


def test_another_current_stream_is_another_plan_where_streams_are_named(session: Any) -> None:
    one, third, w = dr.Stream(), dr.Stream(), _full(1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        with one:
            w.add_(x)
        return w * 2

    program = dr.program(step)
    found = []
    for k in range(12):
        with dr.stream(third if k % 2 else None):
            found.append(program(_full(1.0)))
    assert [y[0, 0].item() for y in found] == [2.0 * k for k in range(2, 14)]
    assert program.replays == 8


# -- meshes --------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(session: Any) -> dr.mesh.DeviceMesh:
    return dr.init_device_mesh("cpu", (2,))


def _shards(mesh: dr.mesh.DeviceMesh, value: float) -> torch.Tensor:
    return dr.from_shards([torch.full((4, 4), value + j) for j in range(mesh.size())], mesh)


def _members(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.member(k) for t in tensors for k in range(2)]  # type: ignore[attr-defined]


def test_a_program_on_a_mesh_is_one_instruction_of_all_members(mesh: dr.mesh.DeviceMesh) -> None:
    def make() -> Case:
        w, p = (torch.randn(4, 4).to(mesh.device) for _ in range(2))
        p.requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            p.grad = None
            loss = (torch.tanh(x @ p) * w).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            w.add_(p.grad, alpha=0.1)
            with torch.no_grad():
                p.sub_(torch.rand(4, 4, device=w.device))
            return loss.detach()

        return Case(step, lambda k: (_shards(mesh, 0.1 * k),), lambda: _members(w, p, p.grad))

    assert replayed_as_eager(make).replays == 6


def _collectives(mesh: dr.mesh.DeviceMesh) -> Case:
    lines, w = mesh.lines(), torch.randn(4, 4).to(mesh.device)

    def step(x: torch.Tensor) -> Any:
        y = torch.tanh(x @ w)
        total = dr.lines.all_reduce(lines, y)
        rows = dr.lines.reduce_scatter(lines, total * 2)
        w.add_(dr.lines.all_gather(lines, rows), alpha=0.1)
        # It is one member's, and the same memory.
        w.member(1).mul_(0.5)  # type: ignore[attr-defined]
        turned = dr.from_shards([y.member(1).to(y.member(0).device), y.member(1) * 2], mesh)  # type: ignore[attr-defined]
        return total.member(0), w.member(1) + 1, turned + w  # type: ignore[attr-defined]

    return Case(step, lambda k: (_shards(mesh, 0.1 * k),), lambda: _members(w))


def test_collectives_along_a_mesh_stand_between_parts(mesh: dr.mesh.DeviceMesh) -> None:
    assert replayed_as_eager(lambda: _collectives(mesh)).replays == 6


def test_members_of_one_worker_run_in_turns(fresh_session: Callable[..., Any]) -> None:
    fresh_session(world_size=1, simulate_cuda=2)
    mesh = dr.init_device_mesh("cuda", (2,))

    def make() -> Case:
        w = torch.randn(4, 4).to(mesh.device)

        def step(x: torch.Tensor) -> Any:
            y = torch.dropout(torch.tanh(x @ w), 0.3, True)
            w.add_(dr.lines.all_reduce(mesh.lines(), y), alpha=0.1)
            return y.member(0), y.member(1)  # type: ignore[attr-defined]

        return Case(step, lambda k: (_shards(mesh, 0.1 * k),), lambda: _members(w))

    assert replayed_as_eager(make).replays == 6


# -- nodes ---------------------------------------------------------------------------------------------------


def _two_nodes() -> Case:
    models = []
    for node in range(2):
        with dr.node(node):
            models.append(torch.nn.Linear(4, 4).to(REMOTE))
    here, there = (next(model.parameters()).device for model in models)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]

    def step(x: torch.Tensor) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = models[1](torch.tanh(models[0](x)).to(there)).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach(), loss.detach().to(here)

    parameters = [p for model in models for p in model.parameters()]
    return Case(step, lambda k: (_full(0.1 * k, here),), lambda: [*parameters, *(p.grad for p in parameters)])


def test_a_training_step_over_two_nodes(session: Any) -> None:
    program = replayed_as_eager(_two_nodes)
    assert program.replays == 5 and not program.why


def test_what_a_copy_brings_may_be_kept(session: Any) -> None:
    def make() -> Case:
        box = SimpleNamespace(there=torch.zeros(4, 4).to(dr.place(1, "cpu")), here=_full(1.0))

        def step(x: torch.Tensor) -> torch.Tensor:
            box.there = (x + box.here).to(dr.place(1, "cpu"))
            box.here.copy_(box.there * 0.5)
            return box.here + 1

        return Case(step, lambda k: (_full(0.1 * k),), lambda: (box.there, box.here))

    assert replayed_as_eager(make).replays == 6


def test_what_was_there_is_copied_after_something_else_is_there(session: Any) -> None:
    def make() -> Case:
        box = SimpleNamespace(held=_full(1.0))

        def step(x: torch.Tensor) -> torch.Tensor:
            before = box.held
            box.held = before + x
            return before.to(dr.place(1, "cpu"))

        return Case(step, lambda k: (_full(0.1 * k),), lambda: (box.held,))

    assert replayed_as_eager(make).replays == 6


def test_a_failure_crosses_to_the_other_node_and_names_both_lines(session: Any) -> None:
    table = torch.randn(5, 3).to(REMOTE)

    def look(index: torch.Tensor) -> Any:
        rows = table[index]  # this line
        far = rows.to(dr.place(1, "cpu"))
        return far * 2, torch.ones(2, device=far.device) + 1

    program = dr.program(look)
    good, bad = (torch.tensor([0, k], device=REMOTE) for k in (1, 9))
    for index in (good, good, good, bad, good):
        doubled, other = program(index)
        assert other.tolist() == [2.0, 2.0]
        if index is good:
            assert torch.equal(doubled.cpu(), table.cpu()[[0, 1]] * 2)
            continue
        with pytest.raises(IndexError) as caught:
            doubled.cpu()
        assert "# this line\n" in str(caught.value) and "in the program 'look', replayed at" in str(
            caught.value
        )
    assert program.replays == 3


def test_groups_collectives_and_events_of_other_nodes_stand_between_parts(session: Any) -> None:
    def make() -> Case:
        a, b = (torch.randn(4, 4).to(dr.place(k, "cpu")) for k in range(2))
        event = dr.Event()

        def step(x: torch.Tensor) -> Any:
            one, two = a * x, b + 1
            event.record()
            event.wait(dr.default_stream(1, "cpu"))
            dr.distributed.all_reduce([one, two])
            a.add_(one, alpha=0.1)
            return two.sum(), one

        return Case(step, lambda k: (_full(0.1 * k),), lambda: (a, b))

    assert replayed_as_eager(make).replays == 6
