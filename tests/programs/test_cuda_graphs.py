"""Programs as CUDA graphs, with a stand-in for the graph: what is copied, what stays, and what is refused."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import distruntime as dr
from agree import REMOTE
from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import ARGUMENT, FLOAT, HELD, MADE, NUMBER
from distruntime_worker.programs.cuda_graphs import Graphs
from distruntime_worker.programs.definition import Definition, Instruction, Name, Row
from distruntime_worker.programs.program import _written
from distruntime_worker.programs.source import Source, Straight
from distruntime_worker.values.step import Slots, Words
from distruntime_worker.values.template import Template, operator


class Launches(TorchDispatchMode):
    """Notes each operator, with the tensors that it was given and has made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        # What each memory has held that it was given, and the memory of what was made.
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.pool: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for memory in _memories((args, kwargs)):
            if memory._cdata not in self.pool:
                self.before.setdefault(memory._cdata, (memory, memory.clone()))
        out = func(*args, **(kwargs or {}))
        for memory in _memories(out):
            if memory._cdata not in self.before:
                self.pool[memory._cdata] = memory
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _bare(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address, which does not keep the memory."""
    memory = value.untyped_storage()
    there = (ctypes.c_uint8 * memory.nbytes()).from_address(memory.data_ptr())
    bare = torch.frombuffer(there, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(bare, value.storage_offset(), value.size(), value.stride())


def _memories(values: object) -> list[torch.UntypedStorage]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


class StandIn:
    """A graph of CPU kernels: it reads and writes the addresses that it was captured with."""

    def __init__(self, why: str = "", error: Exception | None = None) -> None:
        self.why, self.error, self.captures, self.launches = why, error, 0, 0

    def refusal(self, device: torch.device) -> str:
        return self.why

    def capture(self, device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        if self.error is not None:
            raise self.error
        noted = Launches()
        with noted:
            call()
        # A capture launches nothing, so nothing has changed.
        for memory, before in noted.before.values():
            memory.copy_(before)
        # It keeps what it has made, and knows no more of what it was given than addresses.
        calls = torch.utils._pytree.tree_map_only(torch.Tensor, _bare, noted.calls)
        pool = noted.pool

        def launch() -> None:
            assert pool
            self.launches += 1
            for func, args, kwargs, outs in calls:
                again = func(*args, **kwargs)
                flat = [torch.utils._pytree.tree_leaves(one) for one in (outs, again)]
                for old, new in zip(*flat):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return launch


class Runs:
    """A program that runs as a graph as soon as it may, beside itself as straight-line code."""

    def __init__(self, definition: Definition, device: StandIn, alone: bool = True) -> None:
        def fail(*told: object) -> None:
            raise AssertionError(told)

        self.definition, self.device = definition, device
        parts = [
            Template(row.name, operator(row.name), row.args, row.kwargs, row.results, torch.device, fail)
            for row in definition.rows
        ]
        moved = {ref for ref, _ in definition.kept}
        self.told: list[str] = []
        self.graphs = Graphs(
            definition,
            parts,
            _written(definition, parts),
            moved,
            lambda: alone,
            lambda p, i, text: self.told.append(text),
            device,
        )
        emptied = {(HELD, ref) for ref in moved}
        self.source = Source(definition, [x.pattern for x in parts if x.pattern], emptied, torch.device)
        self.straight: Straight | None = None

    def run(self, slots: Slots, words: Words) -> bool:
        """Run it once; return whether that was the graph."""
        if self.straight is None:
            self.straight = self.source.first_run(slots, words, 0)
            return False
        if self.graphs.ran(self.straight, slots, words, 0):
            return True
        self.straight(slots, words, 0)
        return False


X, W, H = (ARGUMENT, 1), (HELD, 7), (HELD, 8)


def _made(*numbers: int) -> list[Name]:
    return [(MADE, number) for number in numbers]


def _step(argument_written: bool = False) -> Definition:
    """Return `y = x @ w; h = tanh(h + y); w.add_(h, alpha=0.5); v = x[0]; return y, y.t(), v`; h stays."""
    rows = [
        Row("aten::mm", [OPERAND, OPERAND], {}, 1),
        Row("aten::add.Tensor", [OPERAND, OPERAND], {}, 1),
        Row("aten::tanh", [OPERAND], {}, 1),
        Row("aten::add_.Tensor", [OPERAND, OPERAND], {"alpha": ["number"]}, 0),
        Row("aten::t", [OPERAND], {}, 1),
        Row("aten::select.int", [OPERAND, 0, 0], {}, 1),
    ]
    body = [
        Instruction(0, [X, W], [0], None),
        Instruction(1, [H, *_made(0)], [1], None),
        Instruction(2, _made(1), [2], None),
        Instruction(3, [X if argument_written else W, *_made(2), (FLOAT, 0.5)], [], None),
        Instruction(4, _made(0), [3], None),
        Instruction(5, [X], [4], None),
    ]
    return Definition(rows, body, [(8, (MADE, 2))], _made(0, 3, 4), 1, 0)


def _slots() -> Slots:
    torch.manual_seed(0)
    return {7: torch.rand(3, 3) / 8, 8: torch.zeros(3, 3)}


def _both(
    definition: Definition, calls: int, x: Callable[[int], torch.Tensor], device: StandIn, fixed: bool
) -> Runs:
    """Compare all that both leave and return, in each call and behind the last one.

    A fixed argument is the same view in each call, and not from where its memory begins.
    """
    program, slots = Runs(definition, device), (_slots(), _slots())
    plain = Runs(definition, StandIn("never"))
    stays = torch.zeros(4, 3)[1:], torch.zeros(4, 3)[1:]
    seen: list[list[object]] = [[], []]
    kept: list[list[torch.Tensor]] = [[], []]
    for k in range(calls):
        for n, (one, mine) in enumerate(zip((program, plain), slots)):
            mine[1] = stays[n].copy_(x(k)[:3]) if fixed else x(k).clone()[:3]
            was_graph = one.run(mine, [5, 1, 2, 3, 4])
            assert was_graph == (n == 0 and k > 3)
            results: Sequence[Any] = [mine[key] for key in (2, 3, 4)]
            # They share their memory, and what the program has read.
            results[0][0, 0] = k
            mine[1][0, 1] = k + 0.5  # type: ignore[index]
            seen[n] += [mine[key].clone() for key in (1, 2, 3, 4, 7, 8)]  # type: ignore[attr-defined]
            kept[n] += [*results, mine[8]]  # type: ignore[list-item]
    for a, b in zip((*seen[0], *kept[0]), (*seen[1], *kept[1]), strict=True):
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return program


def _own(program: Runs) -> set[Name]:
    """Return what a graph copies."""
    graph = program.graphs._graph
    assert graph is not None
    return {*graph.own}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("argument_written", [False, True])
def test_a_graph_does_what_straight_line_code_does(argument_written: bool, fixed: bool) -> None:
    device = StandIn()
    program = _both(_step(argument_written), 9, lambda k: torch.full((4, 3), 0.1 * k), device, fixed)
    assert _own(program) == ({H} if fixed else {X, H})
    assert program.graphs.state == "cudagraphs" and not program.told
    assert (device.captures, device.launches) == (1, 5)


def test_held_tensors_that_move_are_captured_again() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    for k in range(20):
        if k > 5:
            # Somebody has given it other memory.
            slots[7] = torch.rand(3, 3)
        slots[1] = torch.ones(3, 3)
        before = slots[7].clone()  # type: ignore[attr-defined]
        program.run(slots, [5, 1, 2, 3, 4])
        assert torch.equal(slots[2], torch.ones(3, 3) @ before)  # type: ignore[arg-type]
    assert device.captures == 4
    assert program.graphs.state.startswith("no CUDA graph: what it reads has other memory again and again")
    assert program.told == [f"a program has {program.graphs.state}"]


def _called(program: Runs, slots: Slots, x: torch.Tensor) -> bool:
    """Run it with an argument; require what it returns. Return whether that was the graph."""
    w, h = slots[7].clone(), slots[8]  # type: ignore[attr-defined]
    wanted = x @ w
    first = x[0].clone()
    slots[1] = x
    found = program.run(slots, [5, 1, 2, 3, 4])
    results: list[Any] = [slots[key] for key in (2, 3, 4, 8)]
    assert all(map(torch.equal, results, (wanted, wanted.t(), first, (h + wanted).tanh())))
    # The last one is a view of the argument, and no copy.
    assert results[2].data_ptr() == x.data_ptr()
    return found


def test_arguments_that_are_replaced_once_are_right_at_once_and_captured_anew() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    models = torch.rand(3, 3), torch.rand(3, 3)
    assert [_called(program, slots, models[k >= 7]) for k in range(14)] == (
        [False] * 4 + [True] * 3 + [False] * 3 + [True] * 4
    )
    assert device.captures == 2 and _own(program) == {H} and not program.told


def test_views_that_are_made_anew_of_one_memory_are_not_copied() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    memory = torch.rand(4, 3)
    assert [_called(program, slots, memory[1:]) for _ in range(6)] == [False] * 4 + [True] * 2
    assert _own(program) == {H}
    # It begins elsewhere now.
    assert not _called(program, slots, memory[:3])


@pytest.mark.parametrize("turns", [1, 6])
def test_arguments_in_turns_are_copied_in_the_end(turns: int) -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    models = torch.rand(3, 3), torch.rand(3, 3)
    for _ in range(6):
        _called(program, slots, models[0])
    was_graph = [_called(program, slots, models[k // turns % 2]) for k in range(1, 80)]
    assert all(was_graph[40:]) and not program.told
    assert program.graphs.state == "cudagraphs" and _own(program) == {X, H}
    assert device.captures == (2 if turns == 1 else 5)


def test_arguments_that_change_are_not_counted_with_held_tensors_that_move() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    for k in range(60):
        if k in (10, 50, 55):
            slots[7] = torch.rand(3, 3)
        if k % 10 == 0:
            x = torch.rand(3, 3)
        _called(program, slots, x)
    assert program.graphs.state == "cudagraphs" and not program.told


def test_a_graph_does_not_keep_an_argument() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    x = torch.rand(3, 3)
    assert [_called(program, slots, x) for _ in range(6)][-1] and _own(program) == {H}
    memory, tensor = StorageWeakRef(x.untyped_storage()), weakref.ref(x)
    slots.update({1: None, 4: None})
    del x
    assert tensor() is None and memory.expired()
    for _ in range(6):
        _called(program, slots, torch.rand(3, 3))
    assert device.captures == 2 and _own(program) == {X, H}


def test_an_argument_that_stays_is_written_where_it_is() -> None:
    device = StandIn()
    program, slots = Runs(_step(argument_written=True), device), _slots()
    x, wanted = torch.ones(3, 3), torch.ones(3, 3)
    address = x.data_ptr()
    for k in range(8):
        slots[1] = x
        assert program.run(slots, [5, 1, 2, 3, 4]) == (k > 3)
        wanted.add_(slots[8], alpha=0.5)  # type: ignore[arg-type]
        assert torch.equal(x, wanted) and x.data_ptr() == address
    assert _own(program) == {H}


def test_an_argument_that_is_resized_or_set_in_place() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    memory = torch.rand(12)
    x = memory[:9].view(3, 3)
    assert [_called(program, slots, x) for _ in range(6)][-1]
    # The address and the memory are the same, but not what is there.
    x.set_(memory.untyped_storage(), 0, (3, 3), (1, 3))
    assert not _called(program, slots, x)
    x.set_(memory.untyped_storage(), 0, (3, 3), (3, 1))
    assert _called(program, slots, x) and device.captures == 1
    x.set_(memory.untyped_storage(), 3, (3, 3), (3, 1))
    assert [_called(program, slots, x) for _ in range(4)] == [False] * 3 + [True]
    x.set_(torch.rand(3, 3))
    assert [_called(program, slots, x) for _ in range(4)] == [False] * 3 + [True]
    assert device.captures == 3


def test_an_argument_that_stays_may_share_memory_with_what_is_written() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    x = slots[7]
    for k in range(8):
        slots[1] = x
        wanted = x.clone() @ x  # type: ignore[attr-defined,operator]
        assert program.run(slots, [5, 1, 2, 3, 4]) == (k > 3)
        assert torch.equal(slots[2], wanted)  # type: ignore[arg-type]
    assert _own(program) == {H}


def test_one_call_with_what_is_written_as_its_argument_costs_no_graph() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    x = torch.ones(3, 3)
    for k in range(9):
        slots[1] = slots[7] if k == 6 else x
        assert program.run(slots, [5, 1, 2, 3, 4]) == (k > 3 and k != 6)
    assert device.captures == 1


def test_an_argument_that_shares_memory_with_what_is_written_is_no_operand_of_a_graph() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    for k in range(8):
        slots[1] = slots[7] if k % 2 else torch.ones(3, 3)
        assert program.run(slots, [5, 1, 2, 3, 4]) == (k > 3 and k % 2 == 0)


def test_a_poisoned_operand_and_another_shape_are_for_straight_line_code() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device), _slots()
    for k in range(6):
        slots[1] = torch.ones(3, 3)
        assert program.run(slots, [5, 1, 2, 3, 4]) == (k > 3)
    slots[1] = torch.ones(3, 3).t()[:, :3].double()
    with pytest.raises(RuntimeError, match="dtype"):
        program.run(slots, [5, 1, 2, 3, 4])
    slots = _slots()
    slots[1] = None
    with pytest.raises(TypeError):
        program.run(slots, [5, 1, 2, 3, 4])


def test_another_stream_that_may_draw_keeps_it_from_being_captured() -> None:
    device = StandIn()
    program, slots = Runs(_step(), device, alone=False), _slots()
    for _ in range(6):
        slots[1] = torch.ones(3, 3)
        assert not program.run(slots, [5, 1, 2, 3, 4])
    assert device.captures == 0 and program.graphs.state.startswith("no graph yet")


def _refused(definition: Definition, device: StandIn, words: Words) -> str:
    program, slots = Runs(definition, device), _slots()
    for _ in range(6):
        slots[1] = torch.ones(3, 3)
        assert not program.run(slots, words)
    assert program.told == [f"a program has {program.graphs.state}"]
    return program.graphs.state


def test_what_cannot_be_captured_says_why() -> None:
    words: Words = [5, 1, 2, 3, 4]
    none = _refused(_step(), StandIn("the worker has no CUDA device"), words)
    assert none == "no CUDA graph: the worker has no CUDA device, so it runs as straight-line code"
    failing = _refused(_step(), StandIn(error=RuntimeError("not permitted\nwhen capturing")), words)
    assert "it cannot be captured: RuntimeError: not permitted, so" in failing
    scaled = Row("aten::mul.Scalar", [OPERAND, ["number"]], {}, 1)
    changing = Definition([scaled], [Instruction(0, [X, (NUMBER, 2)], [0], None)], [], _made(0), 1, 1)
    assert "a number changes at each call" in _refused(changing, StandIn(), [5, 1, 2.0, 2])
    zeros = Row("aten::zeros", [["list", 2]], {}, 1)
    made = Definition(
        [zeros, scaled],
        [Instruction(0, [], [0], None), Instruction(1, [X, (FLOAT, 2.0)], [1], None)],
        [],
        _made(0, 1),
        1,
        0,
    )
    placed = Definition(
        [Row("aten::as_strided", [OPERAND, ["list", 2], ["list", 1], 1], {}, 1)], [], [], [], 1, 0
    )
    placed = replace(placed, instructions=[Instruction(0, [X], [0], None)], results=_made(0))
    assert "an offset counts from the begin" in _refused(placed, StandIn(), [5, 1, 2])
    assert "aten::zeros makes a tensor that is not on cpu" in _refused(made, StandIn(), [5, 1, 2, 3])


def _scaled() -> Definition:
    """Return `y = x * s`, as a backward pass reads the seed that its forward pass has left."""
    rows = [Row("aten::mul.Tensor", [OPERAND, OPERAND], {}, 1)]
    return Definition(rows, [Instruction(0, [X, (ARGUMENT, 2)], [0], None)], [], _made(0), 2, 0)


def test_a_scalar_that_comes_to_the_gpu_later_is_waited_for() -> None:
    program = Runs(_scaled(), StandIn())
    there = {1: torch.ones(3, device="meta"), 2: torch.tensor(2.0)}
    for _ in range(10):
        assert not program.run(dict(there), [5, 1, 2, 3])
    assert program.graphs.state == "no graph yet: it reads a scalar on cpu beside tensors on meta"
    # From here on both are on one device.
    for k in range(5):
        slots: Slots = {1: torch.ones(3), 2: torch.tensor(2.0 + k)}
        assert program.run(slots, [5, 1, 2, 3]) == (k > 2)
        assert isinstance(slots[3], torch.Tensor) and slots[3].tolist() == [2.0 + k] * 3
    assert program.graphs.state == "cudagraphs" and not program.told


def test_a_scalar_that_stays_on_the_cpu_is_told_of_in_the_end() -> None:
    program = Runs(_scaled(), StandIn())
    there = {1: torch.ones(3, device="meta"), 2: torch.tensor(2.0)}
    for _ in range(30):
        assert not program.run(dict(there), [5, 1, 2, 3])
    assert program.told == [
        "a program has no CUDA graph: its tensors are on cpu, meta, so it runs as straight-line code"
    ]


def test_without_a_gpu_a_program_runs_as_it_is_and_says_so(session: object) -> None:
    x = torch.ones(3, device=REMOTE)
    program: Any = dr.program(lambda x: (x.sin() + 1).exp(), compile="cudagraphs")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(6):
            torch.testing.assert_close(program(x).cpu(), (torch.ones(3).sin() + 1).exp())
        dr.synchronize()
    assert program.replays == 4
    assert program.compiled.startswith("no CUDA graph: ")
    assert sum("so it runs as straight-line code" in str(one.message) for one in seen) == 1
