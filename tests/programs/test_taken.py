"""Arguments that nobody names behind a program: its worker frees each behind its last use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from agree import REMOTE
from distruntime.compiled.graph import Graph, alive
from distruntime.programs.parts import Piece
from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import ARGUMENT, FLOAT, MADE
from distruntime_worker.programs.definition import Definition, Instruction, Row
from distruntime_worker.programs.source import Source, Stopped
from distruntime_worker.values.step import Slots
from distruntime_worker.values.template import Template, operator
from dynamo import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    yield
    torch._dynamo.reset()


# -- the worker's straight-line code -------------------------------------------------------------------------

X, Y = (ARGUMENT, 1), (ARGUMENT, 2)


def _source(look: Any) -> Source:
    """Return the source of `h = x * 2; n = look(h); return n + y`, which takes both arguments."""
    rows = [
        Row("aten::mul.Scalar", [OPERAND, ["number"]], {}, 1),
        Row("aten::neg", [OPERAND], {}, 1),
        Row("aten::add.Tensor", [OPERAND, OPERAND], {}, 1),
    ]
    body = [
        Instruction(0, [X, (FLOAT, 2.0)], [0], None),
        Instruction(1, [(MADE, 0)], [1], None),
        Instruction(2, [(MADE, 1), Y], [2], None),
    ]
    definition = Definition(rows, body, [], [(MADE, 2)], 2, 0)

    def fail(*told: object) -> None:
        raise AssertionError(told)

    parts = [
        Template(row.name, operator(row.name), row.args, row.kwargs, row.results, torch.device, fail)
        for row in rows
    ]
    patterns = [part.pattern for part in parts if part.pattern]
    patterns[1] = patterns[1]._replace(call=look)
    return Source(definition, patterns, {X, Y}, torch.device)


def _slots() -> Slots:
    return {1: torch.ones(2), 2: torch.ones(2), 3: torch.ones(2)}


def test_an_argument_is_gone_behind_its_last_use() -> None:
    slots, seen = _slots(), []
    lost = weakref.ref(slots[1])

    def look(h: torch.Tensor) -> torch.Tensor:
        seen.append((lost() is None, sorted(slots)))
        return -h

    run = _source(look).first_run(slots, [5, 1, 2, 9], 0)
    assert seen == [(True, [3])] and sorted(slots) == [3, 9]
    slots.update(_slots())
    lost = weakref.ref(slots[1])
    run(slots, [5, 1, 2, 9], 0)
    assert seen[1:] == [(True, [3, 9])] and sorted(slots) == [3, 9]
    assert slots[9].tolist() == [-1.0, -1.0]  # type: ignore[union-attr]


def test_what_a_failure_has_not_reached_is_still_known() -> None:
    slots = _slots()

    def look(h: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    with pytest.raises(Stopped) as caught:
        _source(look).first_run(slots, [5, 1, 2, 9], 0)
    values = caught.value.values
    assert caught.value.at == 1 and "a1" not in values and "a2" in values


# -- graphs of torch.compile ---------------------------------------------------------------------------------


class Curved(nn.Module):
    """Its backward pass needs what it returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).exp()


def _backward_graph() -> Graph:
    """Return the newest: those of the tests before may still wait for the collector."""
    newest = reversed(list(alive.values()))
    return next(graph for graph in newest if graph.name.startswith("backward") and graph.replays)


def _gradients(model: nn.Module) -> list[Any]:
    found = dr.fetch([p.grad for p in model.parameters()])
    model.zero_grad()
    return found  # type: ignore[return-value]


@pytest.fixture
def twins() -> tuple[nn.Module, Any]:
    """Return a model, and an equal one that is compiled."""
    return Curved().to(REMOTE), torch.compile(Curved().to(REMOTE), backend="distruntime")


# torch compiles a graph that may be kept another way.
@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_graph_takes_what_only_it_needs(twins: Any, kept: bool) -> None:
    with torch._functorch.config.patch(donated_buffer=not kept):
        _train_side_by_side(twins, kept)
    plan = _backward_graph()._last
    assert plan is not None and len(plan._taken) > 0


def _train_side_by_side(twins: Any, kept: bool) -> None:
    plain, compiled = twins
    x = torch.rand(3, 4, device=REMOTE)
    for k in range(12):
        held = []
        for model in twins:
            found = model(x)
            # Its result is held in some calls, and the graph is kept in some, and not in others.
            if k % 3 == 1:
                held.append(found)
            loss = found.sum()
            del found
            if kept and k % 4 == 1:
                loss.backward(retain_graph=True)
            loss.backward()
        assert all(map(torch.equal, _gradients(plain), _gradients(compiled))), k
        assert not held or torch.equal(*dr.fetch(held))


class OnTwo(nn.Module):
    """Its second half is on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(dr.place(k)) for k in (0, 1))
        self.there = self.far[0].weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(self.near(x).to(self.there))  # type: ignore[no-any-return]


def _taught(graph: Graph) -> list[int | None]:
    """Return the numbers by which workers know the parts of a graph's plan."""
    assert graph._last is not None
    dr.synchronize()
    pieces = [act for act in graph._last.layout.acts if isinstance(act, Piece)]
    return [piece.log.templates.find(piece._used.key) for piece in pieces]


def test_a_part_that_takes_the_same_as_before_is_not_taught_again() -> None:
    model = torch.compile(OnTwo(), backend="distruntime")
    x = torch.rand(3, 4, device=dr.place(0))
    for _ in range(4):
        model(x).sum().backward()
    first = _taught(_backward_graph())
    found = model(x)
    held = torch.ones_like(found)
    found.backward(held)
    # The far part reads the gradient that is held, and the near part does not.
    far, near = _taught(_backward_graph())
    assert near == first[1] and far not in (None, first[0])
    assert held.tolist() == [[1.0] * 4] * 3


def test_a_graph_that_goes_leaves_its_equal_to_the_worker() -> None:
    one = torch.compile(lambda x: (x * 2).sin() + 1, backend="distruntime")
    two = torch.compile(lambda x: (x * 2).sin() + 1, backend="distruntime")
    x = torch.rand(3, device=REMOTE)
    for _ in range(3):
        one(x), two(x)
    gone, stays = list(alive.values())[-2:]
    known = _taught(stays)
    assert known == _taught(gone) != [None]
    gone._plans, gone._last = {}, None
    assert _taught(stays) == known
    key = stays._last.layout.acts[0]._used.key  # type: ignore[union-attr]
    log = stays._last.layout.logs[0]  # type: ignore[union-attr]
    stays._plans, stays._last = {}, None
    dr.synchronize()
    assert log.templates.find(key) is None


def test_a_result_that_another_stream_reads_is_not_taken(twins: Any) -> None:
    _, compiled = twins
    x, aside = torch.rand(3, 4, device=REMOTE), dr.Stream()
    expected = compiled(x).tolist()
    for _ in range(5):
        found = compiled(x)
        with dr.stream(aside):
            again = found * 1
        loss = found.sum()
        del found
        loss.backward()
        assert again.tolist() == expected
    assert _backward_graph()._last is not None


def test_what_is_poisoned_passes_through_and_the_next_step_works(twins: Any) -> None:
    plain, compiled = twins
    x = torch.rand(3, 4, device=REMOTE)
    bad = x[torch.tensor([0, 1, 7], device=REMOTE)]
    for _ in range(4):
        for model in twins:
            model(x).sum().backward()
    _gradients(plain), _gradients(compiled)
    compiled(bad).sum().backward()
    with pytest.raises(IndexError, match="out of bounds"):
        _gradients(compiled)
    compiled.zero_grad()
    for model in twins:
        model(x).sum().backward()
    assert all(map(torch.equal, _gradients(plain), _gradients(compiled)))


def test_what_the_first_replays_keep_is_taken_later(twins: Any) -> None:
    _, compiled = twins
    x = torch.rand(3, 4, device=REMOTE)
    with torch._functorch.config.patch(donated_buffer=False):
        for k in range(8):
            loss = compiled(x).sum()
            if k < 6:
                loss.backward(retain_graph=True)
            loss.backward()
    plan = _backward_graph()._last
    assert plan is not None and 0 < len(plan._taken) < 20 and not plan._looks
