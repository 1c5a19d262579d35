"""A program does what its function does, bit for bit, on the first call and on every later one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE, there
from processes import blocked, slots, steady

Step = Callable[..., torch.Tensor]


def _mlp(device: Any, make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, Any, Step, list[Any]]:
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    data = [(torch.randn(8, 12).to(device), torch.randint(0, 5, (8,)).to(device)) for _ in range(3)]
    optimizer = make(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step, data


def _agree(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a, b.cpu())
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad.cpu())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True, foreach=False),
}


@pytest.mark.parametrize("name", ["sgd", "momentum", "fused adamw"])
def test_a_training_step_is_replayed_and_equal_to_eager(session: object, name: str) -> None:
    mine, _, local, here = _mlp("cpu", OPTIMIZERS[name])
    theirs, _, remote, there = _mlp(REMOTE, OPTIMIZERS[name])
    program = dr.program(remote)
    losses = []
    for k in range(9):
        losses.append((local(*here[k % 3]), program(*there[k % 3])))
        if k % 4 == 0:
            _agree(mine, theirs)
    _agree(mine, theirs)
    # A list of losses keeps all of them.
    assert [a.item() for a, _ in losses] == [b.item() for _, b in losses]
    assert program.recordings <= 3 and program.replays == 9 - program.recordings and program.why == ""


def test_a_replay_is_one_instruction_of_a_few_words(fresh_session: Callable[..., Any]) -> None:
    # A session in which a test has used streams issues through their order.
    session = fresh_session()
    _, _, remote, there = _mlp(REMOTE, OPTIMIZERS["sgd"])
    program = dr.program(remote)
    for k in range(4):
        program(*there[k % 3])
    dr.synchronize()
    node = session.nodes[0]
    before, words = node.base + len(node.words), []
    append = node.append

    def noted(given: list[object], line: object) -> object:
        words.append(list(given))
        return append(given, line)

    node.append = noted
    try:
        loss = program(*there[0])
    finally:
        del node.append
    # The template, two arguments, one result.
    assert len(words) == 1 and len(words[0]) == 4
    assert before < node.base + len(node.words) <= before + 12
    assert loss.item() > 0


def test_values_are_let_go_of_while_a_replay_runs_and_behind_it(session: object) -> None:
    _, _, remote, there = _mlp(REMOTE, OPTIMIZERS["momentum"])
    program = dr.program(remote)
    for k in range(5):
        program(*there[k % 3])
    before = slots()
    for k in range(20):
        program(*there[k % 3])
    assert program.replays >= 20
    assert slots() == before


def test_draws_are_fresh_in_each_replay_and_follow_the_seed(session: object) -> None:
    x = torch.ones(16, device=REMOTE)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(16, device=x.device)

    program = dr.program(noisy)
    dr.manual_seed(5)
    eager = [noisy(x).tolist() for _ in range(6)]
    dr.manual_seed(5)
    replayed = [program(x).tolist() for _ in range(6)]
    assert replayed == eager and program.replays == 4


def test_state_in_objects_is_renewed_and_what_is_returned_stays(session: object) -> None:
    box = SimpleNamespace(h=torch.zeros(3, device=REMOTE), total=torch.zeros(3, device=REMOTE))

    def advance(x: torch.Tensor) -> torch.Tensor:
        box.h = torch.tanh(box.h + x)
        box.total.add_(box.h)
        return box.h

    program = dr.program(advance)
    x = torch.full((3,), 0.25, device=REMOTE)
    h = torch.zeros(3)
    total = torch.zeros(3)
    found, expected = [], []
    for _ in range(7):
        h = torch.tanh(h + 0.25)
        total += h
        expected.append(h)
        found.append(program(x))
    assert program.replays == 5
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found))
    assert torch.equal(box.h.cpu(), h) and torch.equal(box.total.cpu(), total)


def test_what_is_swapped_in_place_of_another_is_followed(session: object) -> None:
    box = SimpleNamespace(a=torch.zeros(2, device=REMOTE), b=torch.ones(2, device=REMOTE))

    def swap(x: torch.Tensor) -> None:
        box.a, box.b = box.b, box.a
        box.a.add_(x)

    program = dr.program(swap)
    x = torch.ones(2, device=REMOTE)
    a, b = torch.zeros(2), torch.ones(2)
    for _ in range(8):
        program(x)
        a, b = b, a
        a = a + 1
        assert torch.equal(box.a.cpu(), a) and torch.equal(box.b.cpu(), b)


@pytest.mark.parametrize("returned", [False, True])
def test_what_is_swapped_where_nothing_else_is_issued_is_followed(session: object, returned: bool) -> None:
    """No instruction of that worker is in the recording."""
    box = SimpleNamespace(a=there(torch.zeros(2), 0), b=there(torch.ones(2), 0))

    def swap(x: torch.Tensor) -> list[torch.Tensor]:
        box.a, box.b, before = box.b, box.a, box.a
        return [x + 1, before] if returned else [x + 1]

    program, x = dr.program(swap), there(torch.ones(2), 1)
    for k in range(8):
        # A program leaves alone what somebody else holds, so nothing here holds the tensors.
        values = [one.tolist() for one in program(x)]
        assert values == [[2, 2], [float(k % 2)] * 2][: 1 + returned]
        assert box.a.tolist() == [float(1 - k % 2)] * 2 and box.b.tolist() == [float(k % 2)] * 2
    assert program.replays == 6


def test_results_that_share_memory_share_it_in_replays_too(session: object) -> None:
    w = torch.zeros(4, device=REMOTE)

    def views(x: torch.Tensor) -> dict[str, Any]:
        y = x * 2
        return {"y": y, "row": y[0], "same": x, "part": w[:2], "n": 3}

    program = dr.program(views)
    for k in range(5):
        x = torch.full((2, 3), float(k), device=REMOTE)
        out = program(x)
        out["row"].add_(100)
        out["part"].add_(1)
        assert out["same"] is x and out["n"] == 3
        assert torch.equal(out["y"].cpu(), torch.tensor([[100.0 + 2 * k] * 3, [2.0 * k] * 3]))
        assert w.tolist() == [k + 1.0, k + 1.0, 0, 0]
    assert program.replays == 3


def test_train_and_eval_in_turns_are_recorded_once_each(session: object) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(REMOTE)
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    twin.load_state_dict(dr.fetch(model.state_dict()))
    program = dr.program(lambda x: model(x).sum())
    x = torch.randn(6, 4)
    there = x.to(REMOTE)
    for k in range(10):
        model.train(k % 2 == 0)
        twin.train(k % 2 == 0)
        with torch.no_grad():
            assert torch.equal(program(there).cpu(), twin(x).sum())
    assert program.recordings <= 6 and program.replays >= 4


def test_a_method_is_a_program_of_its_object(session: object) -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = torch.zeros((), device=REMOTE)

        @dr.program
        def add(self, x: torch.Tensor) -> torch.Tensor:
            self.n += x
            return self.n * 2

    one, other = Counter(), Counter()
    x = torch.ones((), device=REMOTE)
    assert [one.add(x).item() for _ in range(5)] == [2, 4, 6, 8, 10]
    assert [other.add(x).item() for _ in range(4)] == [2, 4, 6, 8]
    assert one.n.item() == 5


def test_programs_nest_and_take_trees(session: object) -> None:
    inner = dr.program(lambda x: x + 1)
    outer = dr.program(lambda tree, scale=2: {"sum": inner(tree["a"]) * scale + tree["b"][0]})
    a, b = torch.ones(2, device=REMOTE), torch.full((2,), 5.0, device=REMOTE)
    found = [outer({"a": a, "b": [b]}, scale=k % 2)["sum"].tolist() for k in range(8)]
    assert found == [[5, 5], [7, 7]] * 4
    assert outer.replays == 4 and inner.recordings == inner.replays == 0


def test_reads_behind_a_replay_see_what_it_has_written(session: object) -> None:
    w = torch.zeros(3, device=REMOTE)
    program = dr.program(lambda x: w.add_(x).sum())
    x = torch.ones(3, device=REMOTE)
    for k in range(1, 8):
        program(x)
        assert w.tolist() == [k] * 3


def test_what_a_replay_changes_in_place_counts_for_graphs_outside(session: object) -> None:
    w = torch.ones(3, device=REMOTE, requires_grad=True)

    def grow() -> None:
        with torch.no_grad():
            w.mul_(2)

    program = dr.program(grow)
    for _ in range(3):
        program()
    loss = (w * w).sum()
    program()
    assert program.replays == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_argument_that_a_replay_changes_counts_for_graphs_outside(session: object) -> None:
    def grow(x: torch.Tensor) -> None:
        x.mul_(2)

    program, x = dr.program(grow), torch.ones(3, device=REMOTE)
    for _ in range(3):
        program(x)
    w = torch.ones(3, device=REMOTE, requires_grad=True)
    loss = (w * x).sum()
    program(x)
    assert program.replays == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_on_a_node_with_streams_replays_keep_the_order(session: object) -> None:
    stream = dr.Stream()
    w = torch.zeros(3, device=REMOTE)
    program = dr.program(lambda x: w.add_(x) * 2)
    x = torch.ones(3, device=REMOTE)
    found = []
    for k in range(8):
        with dr.stream(stream if k % 3 == 1 else None):
            found.append(program(x))
    assert [y.tolist() for y in found] == [[2.0 * k] * 3 for k in range(1, 9)]
    assert program.replays > 3


def test_what_changes_places_is_written_after_another_stream_has_read_it(session: object) -> None:
    """What was found at one path and left at another is the first one's memory in a replay."""
    streams = [dr.Stream(REMOTE) for _ in range(2)]
    box = SimpleNamespace(a=torch.ones(3, device=REMOTE), b=torch.full((3,), 2.0, device=REMOTE))

    def step() -> torch.Tensor:
        with streams[0]:
            y = box.b * 10
        box.a, box.b = box.b, box.a
        with streams[1]:
            box.a.add_(1)
        # The last part of a program changes the places.
        with streams[0]:
            return y + 0

    program: Any = dr.program(step)
    here, found = [1.0, 2.0], []
    for _ in range(8):
        # A recording waits for what the worker says of a kernel's first results, and it cannot say so while
        # the stream stands.
        dr.synchronize(0)
        with blocked(streams[0]):
            y = program()
            # The other stream gets as far as it can.
            written = dr.Event()
            written.record(streams[1])
            steady(written.query, 0.1)
        found.append((y.tolist(), [here[1] * 10] * 3))
        here = [here[1] + 1, here[0]]
    assert program.replays >= 4
    assert [one for one, _ in found] == [other for _, other in found]
    assert [box.a.tolist(), box.b.tolist()] == [[value] * 3 for value in here]


@pytest.mark.parametrize("zero_inside", [True, False])
def test_a_backward_pass_and_an_optimizer_are_programs_of_their_own(
    session: object, zero_inside: bool
) -> None:
    """One leaves gradients that the other reads, and gradients are zeroed in either, or outside of both."""
    found = []
    for wrap in (lambda fn: fn, dr.program):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(REMOTE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def backward(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            if zero_inside:
                optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()  # type: ignore[no-any-return]

        first, second = wrap(backward), wrap(optimizer.step)
        losses = []
        for k in range(9):
            losses.append(first((torch.arange(12.0).view(3, 4) / (k + 9)).to(REMOTE)))
            second()
            if not zero_inside:
                optimizer.zero_grad()
        found.append([losses, [p.detach().cpu() for p in model.parameters()]])
    assert first.replays >= 4 and second.replays >= 4 and first.why == second.why == ""
    assert [a.item() for a in found[0][0]] == [b.item() for b in found[1][0]]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_gradients_are_accumulated_by_two_plans_in_turns(session: object) -> None:
    found = []
    for wrap in (lambda fn: fn, dr.program):
        p = torch.nn.Parameter(torch.ones(3, device=REMOTE))

        def backward(x: torch.Tensor, p: torch.nn.Parameter = p) -> torch.Tensor:
            loss = (p * x).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        act: Any = wrap(backward)
        seen, mine = [], None
        for k in range(18):
            act(torch.full((3,), 1.0 + k, device=REMOTE))
            assert p.grad is not None
            seen.append(p.grad.tolist())
            if k == 12:
                # Whoever has a gradient keeps it, whatever later calls leave.
                mine = p.grad
            if k % 3 == 2 or k == 12:
                p.grad = None
        assert mine is not None
        found.append((seen, mine.tolist()))
    assert found[0] == found[1]
    assert act.replays >= 8 and act.why == "" and "held elsewhere" not in act.why


def test_why_says_what_had_changed(session: object) -> None:
    scale = {"by": 2}

    @dr.program
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale["by"]

    x = torch.ones(2, device=REMOTE)
    for _ in range(3):
        scaled(x)
    assert scaled.why == ""
    scale["by"] = 3
    scaled(x), scaled(x)
    assert "scale['by'] was 2, and is 3 now, so it was recorded, and agrees" in scaled.why


def test_recorded_words_gather_as_others_do(session: object) -> None:
    """Each instruction in a message of its own would cost a large mesh seconds."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            x = x * 1.5 - 1
        return x

    mesh = dr.init_device_mesh("cpu", (2,))
    for device in (REMOTE, mesh.device):
        program, x = dr.program(chain), torch.full((3,), 2.0, device=device)
        log = x._handle.place.node  # type: ignore[attr-defined]
        dr.synchronize()
        # No worker says that it is done, as the thread that takes such words is kept out.
        with log.lock:
            before = log.outlet.seq
            first = program(x)
            assert program.recordings == 1 and log.outlet.seq - before < 20
        found = [program(x) for _ in range(4)]
        assert program.replays
        for y in (first, *found):
            shard = y if device == REMOTE else y.member(1)  # type: ignore[attr-defined]
            assert shard.tolist() == [2.0] * 3
