"""Programs that Inductor compiles: the regions, what runs until they are ready, and what a failure leaves."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
import torch
import torch._inductor
from torch._dynamo.utils import preserve_rng_state

import distruntime as dr
from agree import REMOTE
from distruntime.wire.codec import OPERAND
from distruntime.wire.messages import (
    ARGUMENT,
    FIRST_TEMPLATE,
    FLOAT,
    HELD,
    MADE,
    PROGRAM,
    Segment,
)
from distruntime_worker.machine import settings
from distruntime_worker.machine.devices import Devices
from distruntime_worker.machine.settings import configure
from distruntime_worker.programs import inductor
from distruntime_worker.programs.compiler import compiled, job_for, prepare
from distruntime_worker.programs.definition import Definition, Instruction, Name, Row
from distruntime_worker.programs.program import Program
from distruntime_worker.programs.regions import Inputs, Region, graph_of, regions_of
from distruntime_worker.programs.source import NotBegun, Source
from distruntime_worker.python import children
from distruntime_worker.session.executor import Executor
from distruntime_worker.values.step import Slots
from distruntime_worker.values.streams import Work
from distruntime_worker.values.template import Template, operator
from dynamo import COMPILES, DYNAMO_WARNS
from processes import until

# A compiler has a lower priority than the work beside it. On a busy machine it takes minutes.
pytestmark = [COMPILES, pytest.mark.timeout(400), *DYNAMO_WARNS]

# -- regions, without Inductor -------------------------------------------------------------------------------

X, W = (ARGUMENT, 1), (HELD, 7)


def _made(*numbers: int) -> list[Name]:
    return [(MADE, number) for number in numbers]


def _row(name: str, *args: Any, results: Any = 1) -> Row:
    return Row(name, [*args], {}, results)


def _parts(definition: Definition) -> list[Template]:
    def fail(*told: object) -> None:
        raise AssertionError(told)

    return [
        Template(row.name, operator(row.name), row.args, row.kwargs, row.results, torch.device, fail)
        for row in definition.rows
    ]


def _program(operand: Any = OPERAND) -> Definition:
    """Return `h = relu(x @ w); n = bernoulli(h); a, b = split(h * 2); w.add_(b.t() @ a); return n, b`."""
    rows = [
        _row("aten::mm", operand, operand),
        _row("aten::relu", operand),
        _row("aten::mul.Scalar", operand, ["number"]),
        _row("aten::bernoulli", operand),
        _row("aten::split.Tensor", operand, 2, results=[1, 1]),
        _row("aten::t", operand),
        _row("aten::add_.Tensor", operand, operand, results=0),
    ]
    body = [
        Instruction(0, [X, W], [0], None),
        Instruction(1, _made(0), [1], None),
        Instruction(2, [*_made(1), (FLOAT, 2.0)], [2], None),
        Instruction(3, _made(1), [3], None),
        Instruction(4, _made(2), [4, 5], None),
        Instruction(5, _made(5), [6], None),
        Instruction(0, _made(6, 4), [7], None),
        Instruction(6, [W, *_made(7)], [], None),
    ]
    return Definition(rows, body, [], _made(3, 5), 1, 0)


def _regions() -> tuple[Definition, list[Template], list[Region]]:
    definition = _program()
    parts = _parts(definition)
    return definition, parts, regions_of(definition, parts)


def test_an_offset_into_an_arguments_memory_stands_between_regions() -> None:
    rows = [
        _row("aten::mul.Scalar", OPERAND, ["number"]),
        _row("aten::select.int", OPERAND, 0, 1),
        _row("aten::as_strided", OPERAND, ["list", 2], ["list", 1], 9),
    ]
    double = [Instruction(0, [name, (FLOAT, 2.0)], [k], None) for k, name in ((0, X), (1, W), (2, (MADE, 1)))]
    view, own = Instruction(1, [X], [3], None), Instruction(2, _made(2), [4], None)
    placed = Instruction(2, _made(3), [5], None)
    definition = Definition(rows, [*double, view, own, placed, *double], [], _made(4, 5), 1, 0)
    found = regions_of(definition, _parts(definition))
    assert [(one.first, one.behind) for one in found] == [(0, 5), (6, 9)]


def test_what_is_written_has_one_name_in_a_region() -> None:
    rows = [
        _row("aten::t", OPERAND),
        _row("aten::bernoulli", OPERAND),
        _row("aten::mm", OPERAND, OPERAND),
        _row("aten::add_.Tensor", OPERAND, OPERAND, results=0),
    ]
    view, drawn = Instruction(0, [W], [0], None), Instruction(1, [X], [1], None)
    # As a step does it: the backward pass reads a view from before a draw, and then the optimizer writes.
    read = [Instruction(2, [*_made(k), *_made(0)], [k + 1], None) for k in (1, 2, 3)]
    write = [Instruction(3, [W, *_made(k)], [], None) for k in (2, 3, 4)]

    def found(*behind: Instruction) -> list[tuple[int, int]]:
        body = [view, drawn, *behind]
        definition = Definition(rows, body, [], _made(4), 1, 0)
        return [(one.first, one.behind) for one in regions_of(definition, _parts(definition))]

    assert found(*read, *write) == [(2, 5), (5, 8)]
    assert found(*read, *write[:1], *read) == [(2, 5), (6, 9)]
    # A view that is made in the region is no other name: Inductor knows what it is of.
    assert found(view, *read, *write) == [(2, 9)]
    # One that does so by itself is in none.
    assert found(*read, Instruction(3, [W, *_made(0)], [], None), *read) == [(2, 5), (6, 9)]


def test_what_draws_stands_between_regions() -> None:
    _, _, (first, second) = _regions()
    assert (first.first, first.behind, first.writes) == (0, 3, False)
    assert (list(first.inputs), list(first.outputs)) == ([X, W], _made(1, 2))
    assert (second.first, second.behind, second.writes) == (4, 8, True)
    assert (list(second.inputs), list(second.outputs)) == ([(MADE, 2), W], _made(5))


def _eager(definition: Definition, parts: list[Template], region: Region) -> Callable[..., Any]:
    return graph_of(region, definition, [part.pattern for part in parts if part.pattern], torch.device)


def _source(calls: Sequence[Callable[..., Any]] | None = None) -> tuple[Source, Any, list[Region]]:
    definition, parts, regions = _regions()
    source = Source(definition, [part.pattern for part in parts if part.pattern], set(), torch.device)
    inputs = Inputs()
    first = source.first_run(_slots(), [5, 1, 2, 3], 0, regions, inputs)
    assert [len(inputs.of[region.first]) for region in regions] == [2, 2]
    if calls is None:
        calls = [_eager(definition, parts, region) for region in regions]
    other, run = source.with_regions([*zip(regions, calls)])
    return other, (first, run), regions


def _slots() -> Slots:
    torch.manual_seed(0)
    return {1: torch.rand(4, 4) / 8, 7: torch.rand(4, 4)}


def test_a_program_of_regions_does_what_it_does_as_straight_line_code() -> None:
    _, runs, _ = _source()
    seen = []
    for run in runs:
        slots = _slots()
        torch.manual_seed(1)
        run(slots, [5, 1, 2, 3], 0)
        seen.append(slots)
    assert seen[0].keys() == seen[1].keys() == {1, 2, 3, 7}
    for one, other in zip(seen[0].values(), seen[1].values()):
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


@pytest.mark.parametrize("error", [NotBegun(), ValueError("no")], ids=["not begun", "half-way"])
@pytest.mark.parametrize("which", [0, 1], ids=["reads", "writes"])
def test_a_region_that_fails_runs_again_if_it_has_written_nothing(error: Exception, which: int) -> None:
    definition, parts, regions = _regions()

    def fails(*inputs: object) -> object:
        raise error

    calls = [_eager(definition, parts, region) for region in regions]
    source, (_, run), _ = _source([*calls[:which], fails, *calls[which + 1 :]])
    with pytest.raises(type(error)) as caught:
        run(_slots(), [5, 1, 2, 3], 0)
    stopped = source.stopped_in(caught.value)
    again = which == 0 or isinstance(error, NotBegun)
    assert stopped.at == regions[which].first
    assert list(stopped.failed) == ([] if again else [4, 5, 6, 7])


# -- what Inductor has made ----------------------------------------------------------------------------------


def _run(executor: Executor) -> torch.Tensor:
    """Run a program of one argument, which is under ref 1; return its result."""
    work = Work(Segment(1, 0, [], [FIRST_TEMPLATE, 1, 2], []), [], 1)
    executor.works.append(work)
    with torch.no_grad():
        executor.run(work)
    found = executor.state.slots[2]
    assert isinstance(found, torch.Tensor)
    return found


def _runs_of(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Program, Callable[[], torch.Tensor]]:
    """Return the program `x * 2 * 2 * 2` of a matrix that lies transposed, which is compiled to `call`, and
    what runs it.
    """
    monkeypatch.setattr(inductor, "prepare", lambda *_: None)
    monkeypatch.setattr(inductor, "compiled", lambda *_: call)
    executor = Executor(Devices(), lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    body = [
        [0, [[kind, k], [FLOAT, 2.0]], [m], None]
        for kind, k, m in ((ARGUMENT, 1, 0), (MADE, 0, 1), (MADE, 1, 2))
    ]
    fields = [[["aten::mul.Scalar", [OPERAND, ["number"]], {}, 1]], body, [], [[MADE, 2]], 1, 0]
    executor.learn([[FIRST_TEMPLATE, PROGRAM, fields, {"compile": "inductor"}, 0]])
    executor.state.slots[1] = torch.ones(3, 2).t()
    program = executor.state.info[FIRST_TEMPLATE]
    assert isinstance(program, Program)

    def run() -> torch.Tensor:
        return _run(executor)

    run()
    until(lambda: program.compiled != "compiling", 60)
    assert program.compiled == "inductor"
    return program, run


def test_results_of_compiled_code_lie_as_those_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(x)
        return [(x * 8).contiguous()]

    program, run = _runs_of(call, monkeypatch)
    for k in range(1, 3):
        assert torch.equal(found := run(), torch.full((2, 3), 8.0)) and found.stride() == (1, 2)
        assert (program.compiled, len(calls)) == ("inductor", k)


def _in_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_results_of_compiled_code_share_memory_as_those_of_its_operators() -> None:
    x = torch.arange(6.0).view(2, 3)

    def operators(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.sin()
        return [x * 1, y, y * 1, y.t(), y[1:].view(torch.int32), x.t()]

    # These are what Inductor has been seen to return, and what nothing forbids it to.
    returned: list[Callable[[torch.Tensor], list[torch.Tensor]]] = [
        lambda x: [x, y := x.sin(), y, y.t(), y[1:].view(torch.int32), x.t()],
        lambda x: [x * 1, y := x.sin(), y * 1, y.t() + 0, (y[1:] + 0).view(torch.int32), x.t()],
        lambda x: [x, y := x.t().sin().t(), y, y.t() + 0, y.contiguous()[1:].view(torch.int32), x.t()],
    ]
    laid = inductor.laid_out({x.untyped_storage()._cdata}, operators(x))
    for call in returned:
        run = inductor._guarded(call, laid)
        for _ in range(2):
            made, wanted = run(x), operators(x)
            assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))
            assert [one.stride() for one in made] == [one.stride() for one in wanted]
            pairs = [(k, n) for k in range(7) for n in range(k)]
            (one, other) = ([x, *made], [x, *wanted])
            assert [_in_one_memory(one[k], one[n]) for k, n in pairs] == [
                _in_one_memory(other[k], other[n]) for k, n in pairs
            ]


def test_compiled_code_that_raises_what_its_operators_do_not_is_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(x)
        raise AssertionError("expected size 2==3\nand more")

    program, run = _runs_of(call, monkeypatch)
    for _ in range(2):
        assert torch.equal(run(), torch.full((2, 3), 8.0))
    assert len(calls) == 1
    assert program.compiled == (
        "Inductor cannot compile it: its code raises AssertionError: expected size 2==3"
    )


@pytest.mark.parametrize("shared", [False, True])
def test_a_held_value_in_the_memory_of_a_written_argument_is_not_for_compiled_code(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    calls = []

    def call(*values: torch.Tensor) -> list[torch.Tensor]:
        calls.append(values)
        values[0].add_(values[0])
        return [values[1] * 4]

    monkeypatch.setattr(inductor, "prepare", lambda *_: None)
    monkeypatch.setattr(inductor, "compiled", lambda *_: call)
    executor = Executor(Devices(), lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    rows = [
        ["aten::add_.Tensor", [OPERAND, OPERAND], {}, 0],
        ["aten::mul.Scalar", [OPERAND, ["number"]], {}, 1],
    ]
    body = [
        [0, [[ARGUMENT, 1], [ARGUMENT, 1]], [], None],
        [1, [[HELD, 7], [FLOAT, 2.0]], [0], None],
        [1, [[MADE, 0], [FLOAT, 2.0]], [1], None],
    ]
    executor.learn(
        [[FIRST_TEMPLATE, PROGRAM, [rows, body, [], [[MADE, 1]], 1, 0], {"compile": "inductor"}, 0]]
    )
    program = executor.state.info[FIRST_TEMPLATE]
    assert isinstance(program, Program)
    for k in range(3):
        x = torch.ones(4)
        held = x.view(2, 2) if shared and k == 2 else torch.ones(2, 2)
        executor.state.slots.update({1: x, 7: held})
        _run(executor)
        until(lambda: program.compiled != "compiling", 60)
    assert program.compiled == "inductor" and len(calls) == 2 - shared


def test_code_is_for_the_settings_that_it_was_compiled_under(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def compile(*_: object) -> Callable[..., Any]:
        deterministic = torch.are_deterministic_algorithms_enabled()

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            calls.append(deterministic)
            return [x * 8]

        return call

    program, run = _runs_of(compile(), monkeypatch)
    monkeypatch.setattr(inductor, "compiled", compile)
    # The settings of this process are the test's to bring back: torch's own test helpers freeze some of them.
    monkeypatch.setattr(settings, "_at_start", {})
    try:
        run()
        configure(use_deterministic_algorithms=True)
        run()
        until(lambda: program.compiled != "compiling", 60)
        run()
        configure(use_deterministic_algorithms=False)
        run()
        configure(use_deterministic_algorithms=True)
        run()
    finally:
        configure(use_deterministic_algorithms=False)
    run()
    # Between the first two, the operators run, and what they get is noted.
    assert calls == [False, True, False, True, False] and program.compiled == "inductor"


# -- with Inductor -------------------------------------------------------------------------------------------


def _ready(program: Any) -> None:
    until(lambda: program.compiled != "compiling", 300)
    if why := inductor._of_folders("C++ compile error"):
        assert why in program.compiled
        pytest.skip(f"torch cannot compile here{why}")
    assert program.compiled == "inductor"


def _looked_up() -> list[int]:
    counters = torch._dynamo.utils.counters
    return [counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass")]


@pytest.mark.slow
def test_a_process_of_its_own_leaves_in_the_cache_what_the_worker_looks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    dr.shutdown()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with dr.init_master_worker(world_size=1, quiet=True):
        w = torch.rand(4, 4, device=REMOTE)
        program: Any = dr.program(
            lambda x: torch.bernoulli(((x[1:] @ w).sigmoid() + 1) / 2).exp().mul(2).add(w),
            compile="inductor",
        )
        # The argument is a view, from where its memory does not begin.
        x = torch.rand(5, 4, device=REMOTE)
        for _ in range(4):
            program(x)
        until(lambda: program.compiled == "inductor", 300)
        assert dr.fetch(dr.remote(_looked_up, returns=object)()) == [2, 0, 0]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (("/a b", "/c"), r"^ \(/a b has a blank, .*; TMPDIR names another\)$"),
        (("/a", "/b c/d"), r"^ \(/b c/d has a blank, .*; TORCHINDUCTOR_CACHE_DIR names another\)$"),
        (("/a", "/ü"), "^$"),
    ],
)
def test_a_path_that_the_compiler_does_not_get_whole_is_named(
    paths: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", paths[0])
    # The path of torch may have one, too.
    monkeypatch.setattr(torch, "__file__", "/torch/__init__.py")
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.cache_dir", lambda: paths[1])
    assert re.search(said, inductor._of_folders("CppCompileError: C++ compile error"))
    assert inductor._of_folders("no such operator") == ""


def test_a_process_that_nobody_wants_any_more_is_ended() -> None:
    definition = _program()
    parts, inputs = _parts(definition), Inputs()
    patterns = [part.pattern for part in parts if part.pattern is not None]
    job = job_for(definition, regions_of(definition, parts), patterns, torch.device, inputs)
    assert job is not None
    prepare(job, lambda: False)
    assert not children._nursery


def test_without_room_for_a_process_the_worker_compiles_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise dr.errors.ConfigurationError("no descriptor is left")

    monkeypatch.setattr(children, "enter", refused)
    definition = _program()
    parts = _parts(definition)
    patterns = [part.pattern for part in parts if part.pattern is not None]
    job = job_for(definition, regions_of(definition, parts), patterns, torch.device, Inputs())
    assert job is not None
    # It raises nothing, and whoever has called it goes on.
    prepare(job, lambda: True)


@pytest.mark.slow
def test_a_compilation_leaves_random_numbers_alone_that_are_drawn_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch puts the generators' states back behind it: what was drawn meanwhile came once more."""
    begun, drawn = threading.Event(), threading.Event()

    def compile(module: object, inputs: object) -> object:
        with preserve_rng_state():
            begun.set()
            assert drawn.wait(60)
        return module

    monkeypatch.setattr(torch._inductor, "compile", compile)
    torch.manual_seed(3)
    expected = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    thread = threading.Thread(target=compiled, args=(torch.fx.GraphModule({}, torch.fx.Graph()), []))
    thread.start()
    assert begun.wait(60)
    first = torch.rand(2)
    drawn.set()
    thread.join(60)
    assert torch.equal(first, expected[0]) and torch.equal(torch.rand(2), expected[1])
    # A thread that compiles nothing puts them back, as before.
    with preserve_rng_state():
        before = torch.rand(2)
    assert torch.equal(torch.rand(2), before)


def test_a_compiled_program_does_what_eager_does(session: object) -> None:
    there, here = torch.ones(8, device=REMOTE), torch.ones(8)
    table, held = torch.arange(12.0, device=REMOTE).view(6, 2), torch.arange(12.0).view(6, 2)

    def f(x: torch.Tensor, i: torch.Tensor, table: torch.Tensor, state: torch.Tensor) -> Any:
        y = (x.sin() + x * 2).relu()
        state.mul_(0.5).add_(y)
        return y.sum(), (table[i] * 2 + 1).exp(), x[:2]

    program: Any = dr.program(lambda x, i: f(x, i, table, there), compile="inductor")
    assert program.compiled == "no call was replayed yet"
    x, i = torch.rand(8), torch.tensor([1, 5])
    for k in range(10):
        if k == 5:
            _ready(program)
        for one, other in zip(f(x, i, held, here), program(x.to(REMOTE), i.to(REMOTE))):
            torch.testing.assert_close(one, other.cpu())
        torch.testing.assert_close(here, there.cpu())
    assert program.replays >= 6
    # The state was written before the error, or not: it is lost. All else goes on.
    total, rows, _ = program(x.to(REMOTE), torch.tensor([1, 77], device=REMOTE))
    for lost in (total, rows, there):
        with pytest.raises(RuntimeError, match=r"(?s)index out of bounds.*compiled by Inductor"):
            lost.cpu()
    there = here.to(REMOTE)
    for one, other in zip(f(x, i, held, here), program(x.to(REMOTE), i.to(REMOTE))):
        torch.testing.assert_close(one, other.cpu())


@pytest.mark.slow
def test_a_compiled_training_step_trains(session: object) -> None:
    def made(device: str) -> tuple[torch.nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
        ).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step

    (mine, local), (theirs, remote) = made("cpu"), made(REMOTE)
    program: Any = dr.program(remote, compile="inductor")
    x, y = torch.rand(8, 16), torch.randint(0, 4, (8,))
    for k in range(30):
        if k == 8:
            _ready(program)
        one, other = local(x, y), program(x.to(REMOTE), y.to(REMOTE))
        torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)
    for p, q in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-5)
    assert program.replays > 20


@pytest.mark.slow
def test_a_joined_empty_tensor_leaves_the_strides_as_they_are(session: object) -> None:
    # Inductor would lay the result out as its second part, as torch's decomposition of `cat` does.
    def f(x: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
        return torch.cat([none, (x * 2).sin().transpose(0, 1)], -2)

    program: Any = dr.program(f, compile="inductor")
    x, none = torch.rand(3, 2), torch.empty(0)
    for k in range(7):
        if k == 4:
            _ready(program)
        found = program(x.to(REMOTE), none.to(REMOTE))
        torch.testing.assert_close(found.view(-1).cpu(), f(x, none).view(-1))


@pytest.mark.slow
def test_arguments_that_share_memory_are_not_for_compiled_code(session: object) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1).mul_(2)
        return (y.sin() + 1).exp()

    program: Any = dr.program(f, compile="inductor")
    # Those that share memory are another kind of call, with the same instructions.
    for k in range(12):
        x = torch.rand(6)
        there = x.to(REMOTE)
        if k == 8:
            _ready(program)
        mine, theirs = x[:3], there[:3]
        if k % 2:
            mine, theirs = torch.ones(3), torch.ones(3, device=REMOTE)
        torch.testing.assert_close(f(x[:3], mine), program(there[:3], theirs).cpu())
        torch.testing.assert_close(x, there.cpu())


def _change(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1).mul_(2).sub_(3)


# These are more kinds of tensors for one list of operators.
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.ones(8),
    "another dtype": lambda: torch.arange(8, dtype=torch.int32),
    "another size": lambda: torch.ones(4, 3),
    "strides": lambda: torch.ones(3, 4).t(),
}


@pytest.mark.slow
def test_code_is_for_the_kinds_of_tensors_that_it_was_compiled_for(session: object) -> None:
    step = torch.compile(_change)
    for kind in KINDS.values():
        here = kind()
        there = here.to(REMOTE)
        for k in range(8):
            if k == 6:
                dr.synchronize()
                until(lambda: all(one.compiled != "compiling" for one in dr.profiler.compiled_graphs()), 300)
            _change(here), step(there)
            assert torch.equal(here, there.cpu())


def _programs(log: Any, act: Callable[[], object]) -> list[Any]:
    """Return the programs that a log's worker learns while something runs."""
    before = {*log.templates._numbers}
    act()
    dr.synchronize()
    found = [msgpack.unpackb(key) for key in {*log.templates._numbers} - before]
    return [fields for fields in found if fields[0] == PROGRAM]


def test_the_same_operators_on_other_kinds_of_tensors_are_another_program(session: Any) -> None:
    step = dr.program(_change, compile="inductor")

    def act() -> None:
        for kind in KINDS.values():
            # Another tensor of a kind is none.
            for there in (kind().to(REMOTE), kind().to(REMOTE)):
                for _ in range(3):
                    step(there)

    found = _programs(session.nodes[0], act)
    # Their instructions are one list.
    assert len(found) == len(KINDS) and all(one[1] == found[0][1] for one in found)


def test_what_another_part_sizes_makes_another_program(session: Any) -> None:
    step: Any = dr.program(
        lambda n: _change(torch.zeros(n, device="remote:0").to("remote:1")), compile="inductor"
    )
    found = _programs(session.nodes[1], lambda: [step(n) for n in (5, 5, 5, 6, 6, 6)])
    assert len(found) == 2 and found[0][1] == found[1][1]


def _reads_a_view(x: torch.Tensor) -> Any:
    view, noise = x.t(), torch.rand_like(x)
    grown = noise.exp()
    product = view @ grown
    x.add_(noise)
    return grown, product


@pytest.mark.slow
def test_a_view_that_is_read_before_a_write_has_the_values_from_before_it(session: object) -> None:
    step: Any = torch.compile(_reads_a_view)
    for k in range(8):
        if k == 6:
            dr.synchronize()
            until(lambda: all(one.compiled != "compiling" for one in dr.profiler.compiled_graphs()), 300)
        x = torch.arange(12.0, device=REMOTE).view(3, 4) + 0
        before = x.cpu()
        grown, product = step(x)
        torch.testing.assert_close(product.cpu(), before.t() @ grown.cpu())
    assert [one.compiled for one in dr.profiler.compiled_graphs()][-1] == "inductor"


def _keeps_its_argument(x: torch.Tensor) -> Any:
    old, y, noise = x + torch.zeros_like(x), x.sin() * 2, torch.rand_like(x)
    x.add_(noise).mul_(2).sub_(1)
    return old, y


@pytest.mark.slow
def test_a_result_that_equals_its_argument_is_another_tensor(session: object) -> None:
    steps: Any = [
        torch.compile(lambda x: (x * torch.ones_like(x), x.sin() + 1)),
        torch.compile(_keeps_its_argument),
    ]
    x = torch.ones(4, device=REMOTE)
    for k in range(8):
        if k == 6:
            dr.synchronize()
            until(lambda: all(one.compiled != "compiling" for one in dr.profiler.compiled_graphs()), 300)
        before = x.cpu()
        steps[0](x)[0].add_(1)
        dr.synchronize()
        assert torch.equal(x.cpu(), before)
        old, _ = steps[1](x)
        assert torch.equal(old.cpu(), before)
    assert [one.compiled for one in dr.profiler.compiled_graphs()][-2:] == ["inductor"] * 2


@pytest.mark.slow
def test_a_program_that_inductor_cannot_compile_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    dr.shutdown()
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with dr.init_master_worker(world_size=1, quiet=True), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x = torch.ones(3, device=REMOTE)
        program: Any = dr.program(lambda x: (x.sin() + 1).exp().relu(), compile="inductor")
        for _ in range(4):
            program(x)
        until(lambda: program.compiled != "compiling", 300)
        assert program.compiled.startswith("Inductor cannot compile it: ")
        torch.testing.assert_close(program(x).cpu(), (torch.ones(3).sin() + 1).exp().relu())
        dr.synchronize()
    assert any("runs as straight-line code" in str(warning.message) for warning in seen)
