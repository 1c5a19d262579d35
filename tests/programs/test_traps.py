"""Where a replay and eager could part: each is equal to eager, or refused with the line and a remedy."""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import distruntime as dr
from agree import REMOTE
from fewer import fewer

scale = 2.0
counted = [0]


@pytest.fixture
def x(session: object) -> torch.Tensor:
    return torch.ones(3, device=REMOTE)


def _calls(program: Any, *args: Any, times: int = 4) -> list[Any]:
    return [program(*args).tolist() for _ in range(times)]


# -- equal to eager ------------------------------------------------------------------------------------------


def test_a_learning_rate_that_changes_now_and_then(session: object) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=REMOTE))
    mine = torch.nn.Parameter(torch.ones(3))
    there, here = torch.optim.SGD([w], lr=0.5), torch.optim.SGD([mine], lr=0.5)

    def step(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (p * p).sum().backward()
        optimizer.step()

    program = dr.program(lambda: step(w, there))
    for k in range(14):
        if k in (5, 9):
            for optimizer in (there, here):
                optimizer.param_groups[0]["lr"] *= 0.5
        program()
        step(mine, here)
        assert torch.equal(w.detach().cpu(), mine.detach())
    assert program.replays >= 7


def test_an_argument_that_the_function_also_finds_by_itself(session: object) -> None:
    w, other = torch.ones(3, device=REMOTE), torch.full((3,), 5.0, device=REMOTE)

    def step(given: torch.Tensor) -> torch.Tensor:
        return given * 2 + w

    program = dr.program(step)
    for given in (w, w, w, other, w, other):
        assert torch.equal(program(given), step(given))
    assert program.replays


def test_a_float_that_decides_something(session: object) -> None:
    x = torch.ones(3, device=REMOTE)

    def step(x: torch.Tensor, a: float) -> torch.Tensor:
        return x * 2 if a > 1 else x * 3

    program = dr.program(step)
    for a in (2.0, 2.0, 2.0, 0.5, 2.0, 0.5, 1.5):
        assert torch.equal(program(x, a), step(x, a))
    assert program.replays


@pytest.mark.parametrize(
    "name", ["learning-rate", "class", "x.y", "a\nb", "factor if counted.append(1) else 0", "größe"]
)
def test_an_attribute_may_have_any_name(x: torch.Tensor, name: str) -> None:
    there = SimpleNamespace(**{name: 2.0})
    program = dr.program(lambda x: x * getattr(there, name))
    assert _calls(program, x) == [[2.0] * 3] * 4 and program.replays and counted == [0]
    setattr(there, name, 3.0)
    assert _calls(program, x) == [[3.0] * 3] * 4


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_learning_rate_that_changes_at_each_call_is_an_operand(session: object, decay: float) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=REMOTE))
    mine = torch.nn.Parameter(torch.ones(3))
    options: dict[str, Any] = {"lr": 0.5, "foreach": False, "weight_decay": decay, "momentum": 0.5}
    there, here = torch.optim.SGD([w], **options), torch.optim.SGD([mine], **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (there, here)]

    def step(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (p * p).sum().backward()
        optimizer.step()

    program = dr.program(lambda: step(w, there))
    for _ in range(12):
        program()
        step(mine, here)
        for schedule in schedules:
            schedule.step()
        assert torch.equal(w.detach().cpu(), mine.detach())
    # It is compared with a recording at its replays 1, 2, 4 and so on.
    assert program.replays >= 4


def test_a_float_argument_that_changes_is_an_operand(x: torch.Tensor) -> None:
    program = dr.program(lambda x, a: x * a)
    found = [program(x, 0.5 * k)[0].item() for k in range(9)]
    assert found == [0.5 * k for k in range(9)] and program.replays >= 3


def test_two_floats_that_were_equal_are_told_apart(x: torch.Tensor) -> None:
    box = SimpleNamespace(a=1.0, b=1.0)
    program = dr.program(lambda x: x * box.a + box.b * x)
    found, expected = [], []
    for k in range(10):
        box.a, box.b = float(k), float(k if k < 6 else 2 * k)
        found.append(program(x)[0].item())
        expected.append(box.a + box.b)
    assert found == expected


def test_a_global_that_is_rebound(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    program = dr.program(lambda x: x * scale)
    assert _calls(program, x) == [[2.0] * 3] * 4
    monkeypatch.setitem(globals(), "scale", 3.0)
    assert _calls(program, x) == [[3.0] * 3] * 4


def test_a_zero_has_a_sign(x: torch.Tensor) -> None:
    held = {"divisor": 0.0}
    program = dr.program(lambda x: x / held["divisor"])
    assert _calls(program, x) == [[float("inf")] * 3] * 4
    held["divisor"] = -0.0
    assert _calls(program, x) == [[-float("inf")] * 3] * 4


def test_a_class_attribute_that_is_rebound(x: torch.Tensor) -> None:
    class Model(torch.nn.Module):
        factor = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    model = Model()
    program = dr.program(lambda x: model(x))
    assert _calls(program, x) == [[2.0] * 3] * 4
    Model.factor = 5
    assert _calls(program, x) == [[5.0] * 3] * 4


def test_a_parameter_that_is_rebound_and_one_whose_data_is(x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 1, bias=False).to(REMOTE)
    program = dr.program(lambda x: model(x).detach())
    _calls(program, x)
    model.weight = torch.nn.Parameter(torch.full((1, 3), 2.0, device=REMOTE))
    assert _calls(program, x) == [[6.0]] * 4
    model.weight.data = torch.full((1, 3), 3.0, device=REMOTE)
    assert _calls(program, x) == [[9.0]] * 4


def test_a_parameter_that_is_frozen(x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 2).to(REMOTE)

    def gradients(x: torch.Tensor) -> list[torch.Tensor | None]:
        model.zero_grad()
        model(x).sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    program = dr.program(gradients)
    for _ in range(4):
        program(x)
    model.weight.requires_grad_(False)
    model.weight.grad = None
    for _ in range(4):
        weight, bias = program(x)
        assert weight is None and bias.tolist() == [1.0, 1.0]


def test_a_gradient_that_is_kept_stays_as_it_was(x: torch.Tensor) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=REMOTE))

    def step(x: torch.Tensor) -> None:
        w.grad = None
        (w * x).sum().backward()

    program = dr.program(step)
    kept = []
    for k in range(8):
        program(x * k)
        if k % 2:
            kept.append((k, w.grad))
    assert [(k, g.tolist()) for k, g in kept if g is not None] == [(k, [float(k)] * 3) for k in (1, 3, 5, 7)]
    assert "held elsewhere" in program.why or program.replays


def test_a_gradient_that_is_none_and_one_that_gathers(x: torch.Tensor) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=REMOTE))
    program = dr.program(lambda x: (w * x).sum().backward())
    total = 0
    for k in range(12):
        if k in (5, 8):
            w.grad, total = None, 0
        program(x)
        total += 1
        assert w.grad is not None and w.grad.tolist() == [float(total)] * 3


def test_hooks_that_come_later_run(x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 3).to(REMOTE)
    program = dr.program(lambda x: model(x).detach())
    for _ in range(4):
        program(x)
    model.register_forward_hook(lambda module, args, out: out * 0)
    assert _calls(program, x) == [[0.0] * 3] * 4
    w = torch.nn.Parameter(torch.ones(3, device=REMOTE))

    def step(x: torch.Tensor) -> None:
        w.grad = None
        (w * x).sum().backward()

    program = dr.program(step)
    for _ in range(4):
        program(x)
    w.register_hook(lambda g: g * 10)
    for _ in range(4):
        program(x)
        assert w.grad is not None and w.grad.tolist() == [10.0] * 3


def test_other_shapes_dtypes_and_aliases_are_other_kinds_of_calls(x: torch.Tensor) -> None:
    program = dr.program(lambda a, b: a.add_(1) + b)
    for _ in range(3):
        one = torch.zeros(3, device=REMOTE)
        assert program(one, one).tolist() == [2.0] * 3
        assert program(torch.zeros(3, device=REMOTE), torch.zeros(3, device=REMOTE)).tolist() == [1.0] * 3
        assert program(torch.zeros(2, device=REMOTE), torch.zeros(2, device=REMOTE)).tolist() == [1.0] * 2
        two = torch.zeros(2, dtype=torch.int64, device=REMOTE)
        assert program(two, two.clone()).tolist() == [1, 1]


def test_grad_mode_autocast_and_the_default_dtype_are_seen(x: torch.Tensor) -> None:
    program = dr.program(lambda x: torch.ones(3, device=REMOTE) + x @ x)
    for _ in range(3):
        assert program(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert program(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("remote", dtype=torch.bfloat16):
        product = dr.program(lambda x: torch.outer(x, x) @ torch.outer(x, x))
        assert {product(x).dtype for _ in range(4)} == {torch.bfloat16}
    assert {product(x).dtype for _ in range(4)} == {torch.float32}


def test_autocast_around_a_program_that_casts_parameters_says_where_to_enter_it(x: torch.Tensor) -> None:
    w = torch.nn.Parameter(torch.ones(3, 3, device=REMOTE))

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("remote", dtype=torch.bfloat16):
            return (x.view(1, 3) @ w).detach()

    program = dr.program(lambda x: (x.view(1, 3) @ w).detach())
    for around in (range(1), range(3)):
        for _ in around:
            program(x)
        with (
            pytest.raises(dr.errors.NotSupportedError, match="enter it inside"),
            torch.autocast("remote", dtype=torch.bfloat16),
        ):
            for _ in range(4):
                program(x)
    program = dr.program(inside)
    with torch.autocast("remote", dtype=torch.bfloat16, cache_enabled=False):
        assert {program(x).dtype for _ in range(4)} == {torch.bfloat16}
    assert {program(x).dtype for _ in range(4)} == {torch.bfloat16}
    assert program.replays > 2


# torch makes its rules of forward derivatives with it, at the first use in a process.
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_derivatives_and_transforms_see_each_operator(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    def by_dual(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, x))).tangent

    program: Callable[[torch.Tensor], torch.Tensor] = dr.program(fn)
    ways: list[Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor | None]] = [
        by_dual,
        lambda fn: torch.func.jvp(fn, (x,), (x,))[1],
        lambda fn: torch.func.vmap(fn)(x.view(3, 1)),
        lambda fn: torch.func.grad(lambda x: fn(x).sum())(x),
    ]
    for _ in range(3):
        for way in ways:
            program(x)
            found, expected = way(program), way(fn)
            assert found is not None and expected is not None and found.tolist() == expected.tolist()
    assert program.replays > 5  # type: ignore[attr-defined]


def test_another_current_place(x: torch.Tensor) -> None:
    program = dr.program(lambda: torch.ones(2, device=REMOTE) * 2)
    for k in range(12):
        with dr.node(k % 2):
            assert program().place.node == k % 2
    assert program.replays == 8
    try:
        dr.set_place(1)
        assert program().place.node == 1
    finally:
        dr.set_place(0)
    assert [program().place.node for _ in range(3)] == [0] * 3


def test_a_tensor_that_is_also_an_argument(x: torch.Tensor) -> None:
    w = torch.ones(3, device=REMOTE)
    program = dr.program(lambda a: a + w)
    assert _calls(program, w) == [[2.0] * 3] * 4
    other = torch.full((3,), 5.0, device=REMOTE)
    assert _calls(program, other) == [[6.0] * 3] * 4
    assert _calls(program, w) == [[2.0] * 3] * 4


def _unseen() -> tuple[torch.Tensor, Callable[[float], None]]:
    """Return a tensor of this process, and what writes it where its version does not tell."""
    large = torch.ones(1 << 15)
    shared = large.numpy()

    def write(value: float) -> None:
        shared[0] = value

    return large, write


def test_another_thread_issues_meanwhile_and_is_kept_out(x: torch.Tensor) -> None:
    y = torch.zeros(3, device=REMOTE)
    with _beside(lambda: y.add_(1)) as act:

        def function(x: torch.Tensor) -> torch.Tensor:
            a = x * 2
            act()
            return a + 1

        program = dr.program(function)
        assert _calls(program, x, times=6) == [[3.0] * 3] * 6
    assert program.replays == 4 and y.tolist() == [2.0] * 3


@contextmanager
def _beside(work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Give a function that lets another thread do something, and waits until it is done.

    The two agree by what no guard sees, since what another thread changes meanwhile would be recorded anew.
    """
    turn, write = _unseen()
    write(0.0)
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            if turn[0].item():
                work()
                write(0.0)

    def act() -> None:
        write(1.0)
        while turn[0].item():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield act
    finally:
        over.set()
        thread.join()


def test_another_thread_waits_for_another_node_meanwhile(fresh_session: Callable[..., Any]) -> None:
    """No word of it is sent behind the recorded ones, as if it were one of them."""
    fresh_session(world_size=2)
    x, y = torch.ones(3, device=dr.place(0)), torch.ones(3, device=dr.place(1))
    with dr.stream(dr.Stream(0)):
        x.add_(0)

    with _beside(lambda: dr.current_stream(1).record_event().wait(dr.current_stream(0))) as act:

        def function(x: torch.Tensor) -> torch.Tensor:
            a = x * 2
            act()
            return a + 1

        program = dr.program(function)
        assert _calls(program, x, times=5) == [[3.0] * 3] * 5
    assert program.replays == 3 and y.tolist() == [1.0] * 3


def test_a_function_that_starts_a_thread_is_recorded_each_time(x: torch.Tensor) -> None:
    """Nobody looks at what the thread reads."""
    values = [0.0]

    def function(x: torch.Tensor) -> torch.Tensor:
        values[0] = 2.0
        thread = threading.Thread(target=lambda: values[0])
        thread.start()
        thread.join()
        return x * values[-1]

    program = dr.program(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _calls(program, x, times=4) == [[2.0] * 3] * 4
    assert program.replays == 0 and "thread" in program.why


def test_another_thread_draws_meanwhile(x: torch.Tensor) -> None:
    """Nobody can see which thread has drawn, so the call is recorded again, and is not refused."""
    with _beside(random.random) as act:

        def function(x: torch.Tensor) -> torch.Tensor:
            a = x * 2
            act()
            return a + 1

        program = dr.program(function)
        assert _calls(program, x) == [[3.0] * 3] * 4
    assert program.replays == 0
    assert "random drew random numbers here or in another thread" in program.why
    assert "draw on the worker" in program.why


def test_a_second_program_over_the_same_model(x: torch.Tensor) -> None:
    w = torch.nn.Parameter(torch.zeros(3, device=REMOTE))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def gather(x: torch.Tensor) -> None:
        (w * x).sum().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    programs = dr.program(gather), dr.program(step)
    for k in range(1, 7):
        for _ in range(2):
            programs[0](x)
        programs[1]()
        assert w.tolist() == [-2.0 * k] * 3


# -- refused -------------------------------------------------------------------------------------------------

box = SimpleNamespace(n=0, w=None, losses=[])
numbers, counter = np.random.default_rng(0), itertools.count()


def _counts(x: torch.Tensor) -> torch.Tensor:
    box.n += 1
    return x + 1


def _appends(x: torch.Tensor) -> torch.Tensor:
    box.losses.append((x * 2).sum())
    return x


def _reads_file(x: torch.Tensor) -> torch.Tensor:
    return x * len(Path(__file__).read_text(encoding="utf-8"))


def _hides() -> Callable[[torch.Tensor], torch.Tensor]:
    tensors: Iterator[torch.Tensor] = iter([torch.ones(3, device=REMOTE) for _ in range(9)])
    return lambda x: x + next(tensors)


def _keeps_graph(x: torch.Tensor) -> torch.Tensor:
    box.w = torch.ones(3, device=REMOTE, requires_grad=True) * x
    return x + 1


REFUSED: dict[str, tuple[Callable[[], Callable[[torch.Tensor], Any]], str, str]] = {
    "item": (lambda: lambda x: x * x.sum().item(), "read a value", "read it outside"),
    "bool": (lambda: lambda x: x * 2 if x.sum() > 0 else x, "read a value", "torch.where"),
    "print": (lambda: lambda x: (str(x), x + 1)[1], "read a value", "outside"),
    "a mask": (lambda: lambda x: x[x > 0], "depends on data", "mask"),
    "nonzero": (lambda: lambda x: x.nonzero(), "depends on data", "outside"),
    "local data": (lambda: lambda x: x + torch.arange(3.0).to(REMOTE), "data of this process", "argument"),
    "a counter": (lambda: _counts, "change box.n", "outside"),
    "a list of losses": (lambda: _appends, "change the number of items of box.losses", "outside"),
    "an iterator of tensors": (_hides, "cannot be found from its function", "argument"),
    "a graph in an object": (lambda: _keeps_graph, "with its graph at box.w", "detach"),
    "a local result": (lambda: lambda x: torch.ones(3), "returns a local tensor", "return remote tensors"),
    "synchronize": (lambda: lambda x: (dr.synchronize(), x + 1)[1], "wait for a worker", "before or after"),
    "a function of the user's": (lambda: lambda x: dr.remote(abs)(x), "yet", "outside"),
    "an event's query": (
        lambda: lambda x: (dr.current_stream().query(), x)[1],
        "wait for a worker",
        "before or",
    ),
    "a seed": (lambda: lambda x: (dr.manual_seed(1), x + 1)[1], "seed", "outside"),
}


RECORDED: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    "torch's draws": (lambda x: x + float(torch.rand(1)), "drew random numbers", "worker"),
    "Python's draws": (lambda x: x * random.random(), "drew random numbers", "worker"),
    "numpy's draws": (lambda x: x * np.random.rand(), "drew random numbers", "worker"),
    "a numpy generator": (lambda x: x * numbers.random(), "drew random numbers", "worker"),
    "a clock": (lambda x: x * time.time(), "calls time.time()", "argument"),
    "a file": (_reads_file, "read", "argument"),
    "an iterator": (lambda x: x * next(counter), "itertools.count", "argument"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_nobody_can_watch_is_recorded_and_says_why(x: torch.Tensor, name: str) -> None:
    function, why, remedy = RECORDED[name]
    program = dr.program(function)
    with pytest.warns(UserWarning, match="was recorded 5 times, and no call was replayed"):
        for _ in range(7):
            program(x)
    assert (program.recordings, program.replays) == (5, 0)
    assert why in program.why and remedy in program.why, program.why


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_replay_can_do_is_refused_with_the_line_and_a_remedy(x: torch.Tensor, name: str) -> None:
    make, what, remedy = REFUSED[name]
    box.n, box.w, box.losses = 0, None, []
    program = dr.program(make())
    with pytest.raises(dr.errors.UsageError) as caught:
        for _ in range(4):
            program(x)
    text = str(caught.value)
    assert what in text and remedy in text and "program" in text
    assert program.replays == 0
    box.n, box.w, box.losses = 0, None, []


def test_a_group_that_is_made_at_each_call_is_never_replayed(x: torch.Tensor) -> None:
    y = torch.ones(3).to(dr.place(1, "cpu"))

    def step(x: torch.Tensor) -> torch.Tensor:
        group, mine = dr.distributed.new_group([0, 1]), x * 2
        dr.distributed.all_reduce([mine, y * 2], group=group)
        return mine

    program = dr.program(step)
    with pytest.warns(UserWarning, match=r"'step' was recorded 5 times.*instruction 2 is another one"):
        for _ in range(7):
            assert program(x).tolist() == [4.0] * 3


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW for each": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "AdamW that is fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "no schedule": lambda o: None,
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", fewer(OPTIMIZERS, 3, "another optimizer"))
def test_an_optimizer_is_replayed_as_it_is(session: object, kind: str, schedule: str) -> None:
    """Also where it counts its steps here, and where momentum or betas follow the schedule."""
    if schedule == "OneCycleLR" and kind in ("Adadelta", "Adagrad", "Rprop"):
        pytest.skip("OneCycleLR wants momentum or betas, and this optimizer has none")
    found = []
    for wrap in (lambda f: f, dr.program):
        w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], device="cpu").to(REMOTE))
        optimizer = OPTIMIZERS[kind]([w])
        scheduler = SCHEDULES[schedule](optimizer)

        def step(optimizer: Any = optimizer, w: Any = w) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (w * w * w).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        called: Any = wrap(step)
        losses = []
        for _ in range(14):
            losses.append(called())
            if scheduler is not None:
                scheduler.step()
        steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
        found.append(([float(loss) for loss in losses], w.tolist(), steps))
    assert found[0] == found[1] and called.replays >= 9


def test_a_step_that_is_counted_elsewhere_too(session: object) -> None:
    """What another one has counted is in the numbers of the next replay."""
    found = []
    for wrap in (lambda f: f, dr.program):
        w = torch.nn.Parameter(torch.ones(3, device=REMOTE))
        optimizer = torch.optim.AdamW([w], 0.1)

        def step(optimizer: Any = optimizer, w: Any = w) -> None:
            optimizer.zero_grad()
            (w * w).sum().backward()
            optimizer.step()

        called: Any = wrap(step)
        for k in range(12):
            called()
            if k in (5, 8):
                step()
            if k == 10:
                optimizer.state[w]["step"].fill_(2)
        found.append((w.tolist(), float(optimizer.state[w]["step"])))
    assert found[0] == found[1] and called.replays >= 6


def test_numbers_that_follow_nothing_are_refused(x: torch.Tensor) -> None:
    at = [0]
    program = dr.program(lambda x: x * (at[0] + 0.5))

    with pytest.warns(UserWarning, match="follows no float that was found") as caught:
        for k in range(7):
            at[0] = k
            program(x)
    assert "test_traps.py" in str(caught[0].message)


def test_arguments_must_be_remote_and_stay_as_they_are(x: torch.Tensor) -> None:
    program = dr.program(lambda x: x + 1)
    with pytest.raises(dr.errors.UsageError, match=r"send it first, x.to\(\"remote\"\)"):
        program(torch.ones(3))
    program = dr.program(lambda d: d.update(y=d["x"] + 1))
    with pytest.raises(dr.errors.UsageError, match="change the lists and dictionaries of its arguments"):
        program({"x": x})
    leaf = x.clone().requires_grad_()
    program = dr.program(lambda x: (x * x).sum().backward())
    with pytest.raises(dr.errors.UsageError, match="leave a gradient in argument 0"):
        program(leaf)


def test_a_float_decides_anew_in_each_call(x: torch.Tensor) -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor if factor > 0.5 else x + factor

    program = dr.program(scaled)
    for factor in (0.9, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2):
        assert torch.equal(program(x, factor).cpu(), scaled(x.cpu(), factor)), factor
    assert program.replays >= 2


def test_a_parameter_that_is_frozen_gets_no_gradient_any_more(x: torch.Tensor) -> None:
    w, v = (torch.ones(3, device=REMOTE, requires_grad=True) for _ in range(2))

    def gradients(x: torch.Tensor) -> None:
        w.grad = v.grad = None
        ((w * x).sum() + (v * x).sum()).backward()

    program = dr.program(gradients)
    for _ in range(4):
        program(x)
    assert program.replays >= 1
    v.requires_grad_(False)
    program(x)
    assert w.grad is not None and v.grad is None


def test_no_graph_leaves_a_program_not_even_the_first_time(x: torch.Tensor) -> None:
    model = torch.nn.Linear(3, 1).to(REMOTE)
    program = dr.program(lambda x: model(x).sum())
    for _ in range(4):
        loss = program(x)
        with pytest.raises(
            dr.errors.UsageError, match=r"its graph stays in the program.*Call backward\(\) inside"
        ):
            loss.backward()
        head = torch.nn.Parameter(torch.ones((), device=REMOTE))
        with pytest.raises(dr.errors.UsageError, match="its graph stays in the program"):
            (loss * head).backward()
    assert model.weight.grad is None and program.replays == 2
    with torch.no_grad():
        assert not program(x).requires_grad


@pytest.mark.parametrize("how", ["cuda graphs", "inducter", True])
def test_a_program_is_compiled_in_two_ways_or_not_at_all(how: Any) -> None:
    with pytest.raises(dr.errors.NotSupportedError, match='there are "inductor" and "cudagraphs"'):
        dr.program(lambda x: x, compile=how)


def test_verify_finds_what_nobody_can_see(x: torch.Tensor, tmp_path: Path) -> None:
    hidden, write = _unseen()
    program = dr.program(lambda x: x * float(hidden[0]), verify=True)
    for _ in range(3):
        assert program(x).tolist() == [1.0] * 3
    write(2.0)
    with pytest.raises(dr.errors.UsageError, match="does something else than its replays did"):
        program(x)


def test_verify_compares_each_call_even_of_floats_that_it_follows(x: torch.Tensor) -> None:
    hidden, write = _unseen()

    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x.mul(rate) + float(hidden[0])

    program = dr.program(step, verify=True)
    for k in range(7):
        assert program(x, 0.5 + k).tolist() == [1.5 + k] * 3
    assert (program.recordings, program.replays) == (7, 0)
    write(2.0)
    with pytest.raises(dr.errors.UsageError, match="does something else than its replays did"):
        program(x, 0.5)


def test_transformers_are_told_that_nobody_may_read(x: torch.Tensor) -> None:
    seen = []
    program = dr.program(lambda x: (seen.append(torch.cuda.is_current_stream_capturing()), x + 1)[1])
    before = torch.cuda.is_current_stream_capturing
    program(x)
    assert seen == [True] and torch.cuda.is_current_stream_capturing is before


def test_code_that_python_does_not_hash_is_recorded(session: Any) -> None:
    x = torch.ones(3, device=REMOTE)

    def made(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    # Dynamo writes the globals of a function that it has inlined into the code that it makes. What shows them
    # reads what is remote among them.
    code = made.__code__
    compiled = FunctionType(code.replace(co_consts=(*code.co_consts, {"x": x})), globals())
    program = dr.program(lambda x: compiled(x).sum())
    assert [program(x).item() for _ in range(4)] == [9.0] * 4
    assert program.replays and not program.why
