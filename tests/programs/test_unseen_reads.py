"""What a function depends on and no instruction of the user's shows: arguments besides their metadata, what
C code and this package's own Python read, and values that Python calls equal.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import distruntime as dr
from agree import REMOTE

# A program that is recorded at each call says so once.
pytestmark = pytest.mark.filterwarnings("ignore:the program:UserWarning")


def _ones(value: float = 1.0, wants: bool = False) -> Any:
    return torch.full((2,), value, device=REMOTE, requires_grad=wants)


def _agrees(
    function: Callable[..., torch.Tensor],
    usual: Callable[[], tuple[Any, ...]],
    other: Callable[[], tuple[Any, ...]] | None = None,
    change: Callable[[], object] = lambda: None,
    replays: bool = True,
) -> None:
    """Call a program of a function with usual arguments, and then with others, or after a change."""
    program: Any = dr.program(function)
    for _ in range(4):
        program(*usual())
    assert not replays or program.replays > 0, program.why
    change()
    found, wanted = program(*(other or usual)()), function(*(other or usual)())
    assert found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted.detach().cpu())


def _with(tensor: Any, **attributes: object) -> tuple[Any]:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return (tensor,)


# -- arguments -----------------------------------------------------------------------------------------------


def test_a_graph_that_an_argument_brings(session: object) -> None:
    w = _ones(wants=True)

    def step(loss: torch.Tensor) -> torch.Tensor:
        w.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return w.grad + 0

    # Each call is recorded, as another call brings another graph.
    _agrees(step, lambda: ((w * 2).sum(),), lambda: ((w * 5).sum(),), replays=False)
    # The gradient of an argument itself does not enter its graph.
    _agrees(
        lambda y: torch.autograd.grad((y * y).sum(), y)[0], lambda: (w * 2,), lambda: (w.exp(),), replays=True
    )


def test_the_hooks_the_gradient_and_the_attributes_of_an_argument(session: object) -> None:
    def hooked() -> tuple[Any]:
        x = _ones(wants=True)
        x.register_hook(lambda gradient: gradient * 100)
        return (x,)

    def wanting() -> tuple[Any]:
        return (_ones(wants=True),)

    _agrees(lambda x: torch.autograd.grad((x * 2).sum(), x)[0], wanting, hooked)
    _agrees(
        lambda x: x.detach() * (2 if x.grad is None else 3),
        wanting,
        lambda: _with(_ones(wants=True), grad=_ones(50.0)),
    )
    _agrees(
        lambda x: x.detach() * (2 if x.grad is None else 3),
        lambda: (_ones(),),
        lambda: _with(_ones(), grad=_ones(50.0)),
        replays=False,
    )
    _agrees(lambda x: x * x.scale, lambda: _with(_ones(), scale=2), lambda: _with(_ones(), scale=7))
    _agrees(lambda x: x * getattr(x, "scale", 2), lambda: (_ones(),), lambda: _with(_ones(), scale=7))
    _agrees(
        lambda x: x.detach() * (2 if isinstance(x, torch.nn.Parameter) else 3),
        wanting,
        lambda: (torch.nn.Parameter(_ones()),),
    )
    _agrees(lambda x: x.detach() * (2 if x.is_leaf else 3), wanting, lambda: (_ones(wants=True) + 0,))
    _agrees(
        lambda x: x * (2 if x._version else 3), lambda: (_ones(),), lambda: (_ones().mul_(1),), replays=False
    )


def test_how_often_a_held_tensor_was_written(session: object) -> None:
    w = _ones()
    _agrees(lambda x: x * w._version, lambda: (_ones(),), change=lambda: w.add_(0), replays=False)


def test_a_tensor_that_the_function_gives_another_graph(session: object) -> None:
    w = _ones(wants=True)
    y, expected = w * 2, w * 2

    def twice(of: torch.Tensor) -> torch.Tensor:
        of.mul_(2)
        return torch.autograd.grad(of.sum(), w, retain_graph=True)[0]

    program: Any = dr.program(lambda: twice(y))
    for _ in range(5):
        assert program().tolist() == twice(expected).tolist()
    given: Any = dr.program(lambda x: x.mul_(2).detach() + 0)
    for _ in range(5):
        z = w * 3
        given(z)
        assert torch.autograd.grad(z.sum(), w)[0].tolist() == [6.0, 6.0]


def test_what_no_step_reads_lets_it_be_replayed(session: object) -> None:
    """Attributes of a batch, a counter of a wrapped module, a view of a parameter, and a key made anew."""
    program: Any = dr.program(lambda x: x * 2)
    for k in range(8):
        program(*_with(_ones(), path=f"{k}.png", mask=_ones(k), number=k))
    assert program.replays == 6

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.step = torch.nn.Linear(2, 2), 0

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    wrapped: Any = dr.parallel.DataParallel(Net(), dr.init_device_mesh("cpu", (2,)))
    rows = torch.ones(4, 2).to(REMOTE)
    passed: Any = dr.program(lambda x: wrapped(x).detach())
    for k in range(8):
        wrapped.module.step = k
        passed(rows)
    assert passed.replays >= 5, passed.why

    weight = torch.nn.Parameter(torch.eye(2).to(REMOTE))
    tied, optimizer = weight.t(), torch.optim.SGD([weight], lr=0.1)

    def step(x: Any) -> None:
        optimizer.zero_grad()
        (x @ tied).sum().backward()
        optimizer.step()

    trained: Any = dr.program(step)
    for _ in range(8):
        trained(rows)
    assert trained.replays >= 5, trained.why
    keyed: Any = dr.program(lambda table: next(iter(table.values())) * 2)
    for k in range(8):
        keyed({("a", k - k): _ones()})
    assert keyed.replays == 6, keyed.why


def test_a_held_tensor_that_gets_another_graph(session: object) -> None:
    w = _ones(wants=True)
    y = w * 2
    _agrees(
        lambda: torch.autograd.grad(y.sum(), w, retain_graph=True)[0], lambda: (), change=lambda: y.mul_(3)
    )


class Tag(str):
    """A text with an attribute."""

    scale: float


def _tag(scale: float) -> Tag:
    tag = Tag("a")
    tag.scale = scale
    return tag


def test_arguments_that_python_calls_equal(session: object) -> None:
    whole = torch.ones(2, dtype=torch.int64, device=REMOTE)

    def first(table: dict[Any, torch.Tensor]) -> torch.Tensor:
        return next(key * value for key, value in [*table.items()])

    for make in (dict, OrderedDict, functools.partial(defaultdict, None)):
        _agrees(first, lambda: (make({1: whole}),), lambda: (make({1.0: whole}),), replays=False)  # noqa: B023
    divided: Callable[..., Any] = lambda x, a: x / a  # noqa: E731
    _agrees(
        divided,
        lambda: (_ones(), np.float64(0.0)),
        lambda: (_ones(), np.float64(-0.0)),
    )
    _agrees(
        lambda x, tag: x * tag.scale, lambda: (_ones(), _tag(2)), lambda: (_ones(), _tag(7)), replays=False
    )


# -- what this package reads ---------------------------------------------------------------------------------


def test_what_layers_and_wrappers_of_this_package_hold(session: object) -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0], [0.0, 1.0]]).to(REMOTE)
    partition = dr.mesh.Partition([0, 1], (2, 1))
    pieces = partition.scatter(rows)
    norm, layer = dr.nn.BatchNorm1d(partition, 2), dr.nn.LayerNorm(partition, 2)
    _agrees(lambda a, b: norm([a, b])[0].detach(), lambda: (*pieces,), change=norm.eval)
    _agrees(
        lambda a, b: layer([a, b])[0].detach(),
        lambda: (*pieces,),
        change=lambda: setattr(layer, "eps", 100.0),
    )
    mesh = dr.init_device_mesh("cpu", (2,))
    wrapped = dr.parallel.DataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)), mesh
    )
    _agrees(
        lambda x: wrapped(x).detach(), lambda: (rows,), change=lambda: setattr(wrapped.module[1], "p", 1.0)
    )
    other = torch.nn.Linear(2, 2).to(mesh.device)
    _agrees(lambda x: wrapped(x).detach(), lambda: (rows,), change=lambda: setattr(wrapped, "module", other))


def test_lists_that_a_function_of_this_package_takes(session: object) -> None:
    a, b = torch.arange(4.0).to("remote:0"), (torch.arange(4.0) + 10).to("remote:1")
    group = dr.distributed.new_group([dr.place(0), dr.place(1)])
    given, taken = [[2, 2], [2, 2]], [[2, 2], [2, 2]]

    def change() -> None:
        given[0][:], given[1][:] = [1, 3], [3, 1]
        taken[0][:], taken[1][:] = [1, 3], [3, 1]

    def swapped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        outs = [torch.empty_like(a), torch.empty_like(b)]
        dr.distributed.all_to_all_single(outs, [a, b], taken, given, group=group)
        return outs[0]

    _agrees(swapped, lambda: (a, b), change=change)


# -- what C code reads ---------------------------------------------------------------------------------------


class Slots:
    """An object without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self, scale: int) -> None:
        self.scale = scale


class Reader:
    """An object that looks its attributes up itself."""

    def __init__(self) -> None:
        self.scale = 2

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class A:
    """A class that an object may lose."""


class B:
    """And get this one."""


def _c_reads() -> dict[str, tuple[Callable[[Any], Any], Callable[[], object]]]:
    table, order, names = {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a"}
    items, objects = [1, 2], [SimpleNamespace(scale=2)]
    module, slots, text, thing = torch.nn.Sequential(torch.nn.ReLU()), Slots(2), bytearray(b"ab"), A()
    setattr(module[0], "scale", 2)  # noqa: B010
    scale, found = operator.attrgetter("scale"), operator.attrgetter("0.scale")
    view, part, reader = table.keys(), functools.partial(operator.getitem, table), Reader()
    other, error = SimpleNamespace(scale=2), ValueError(2)

    def set_scale(owner: object) -> Callable[[], object]:
        return lambda: setattr(owner, "scale", 7)

    return {
        "map of a method": (lambda x: x * sum(map(table.get, ["a", "b"])), lambda: table.update(a=10)),
        "a method as a key": (
            lambda x: x * (5 if sorted(["a", "b"], key=order.__getitem__)[0] == "a" else 7),
            lambda: order.update(a=10),
        ),
        "map of items": (lambda x: x * sum(map(items.__getitem__, [0])), lambda: items.insert(0, 7)),
        "filter": (lambda x: x * len([*filter(names.__contains__, ["a", "b"])]), lambda: names.add("b")),
        "reduce(getattr)": (
            lambda x: x * functools.reduce(getattr, ["0", "scale"], module),  # type: ignore[arg-type]
            set_scale(module[0]),
        ),
        "map of getattr": (lambda x: x * sum(map(getattr, objects, ["scale"])), set_scale(objects[0])),
        "attrgetter of a module": (lambda x: x * scale(module[0]), set_scale(module[0])),
        "dotted attrgetter": (lambda x: x * found(module), set_scale(module[0])),
        "attrgetter of slots": (lambda x: x * scale(slots), set_scale(slots)),
        "attrgetter as a key": (lambda x: x * max(objects, key=scale).scale, set_scale(objects[0])),
        "attrgetter in a map": (lambda x: x * sum(map(scale, [slots])), set_scale(slots)),
        "format": (lambda x: x * int("{.scale}".format(slots)), set_scale(slots)),  # noqa: UP032
        "nested format": (
            lambda x: x * "{1:{0.scale}}".format(slots, 1).count(" "),
            set_scale(slots),
        ),
        "copy of slots": (lambda x: x * _copied(slots), set_scale(slots)),
        "map of a partial": (lambda x: x * sum(map(part, ["a", "b"])), lambda: table.update(a=10)),
        "its own __getattribute__": (lambda x: x * reader.scale, set_scale(reader)),
        "comparison in C": (lambda x: x * (2 if objects[0] == other else 7), set_scale(objects[0])),
        "text of an error": (lambda x: x * int(str(error)), lambda: setattr(error, "args", (7,))),
        "length of a buffer": (lambda x: x * len(text), lambda: text.extend(b"c")),
        "length of a view": (lambda x: x * len(view), lambda: table.update(c=3)),
        "class of an object": (
            lambda x: x * (2 if isinstance(thing, A) else 7),
            lambda: setattr(thing, "__class__", B),
        ),
        "type of an object": (
            lambda x: x * (2 if type(thing) is A else 7),
            lambda: setattr(thing, "__class__", B),
        ),
    }


def _copied(slots: Slots) -> int:
    state = slots.__reduce_ex__(4)[2]
    assert isinstance(state, tuple)
    return int(state[1]["scale"])


@pytest.mark.parametrize("name", _c_reads())
def test_what_c_code_reads_is_a_guard_or_a_reason(session: object, name: str) -> None:
    function, change = _c_reads()[name]
    _agrees(function, lambda: (_ones(),), change=change, replays=False)


@pytest.mark.parametrize(
    "name", ["map of a method", "attrgetter of slots", "attrgetter as a key", "type of an object"]
)
def test_what_c_code_reads_may_be_replayed(session: object, name: str) -> None:
    function, change = _c_reads()[name]
    _agrees(function, lambda: (_ones(),), change=change)


class Rate(float):
    """A number with an attribute."""

    scale: float


def test_records_of_arrays_and_numbers_with_attributes(session: object) -> None:
    rows = np.zeros(3, dtype=[("x", "f4")])
    row, rate = rows[0], Rate(0.1)
    row["x"], rate.scale = 2, 2

    def change() -> None:
        rows["x"][0], rate.scale = 7, 7

    def scaled(x: Any) -> Any:
        return x * float(row["x"]) * rate.scale

    far = dr.remote(scaled)
    assert far(_ones()).tolist() == [4.0, 4.0]
    _agrees(scaled, lambda: (_ones(),), change=change)
    assert far(_ones()).tolist() == [49.0, 49.0]


# -- what a gradient's formula decides -----------------------------------------------------------------------


def test_a_gradient_that_depends_on_a_number_by_its_formula(session: object) -> None:
    x, y = torch.tensor([3.0, 1.0]).to(REMOTE), torch.zeros(2, device=REMOTE)
    z, inf = torch.tensor([0.0, 1.0]).to(REMOTE), float("inf")

    def distance(x: Any, p: float) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.dist(x, y, p), x)[0]

    def power(x: Any, p: float) -> Any:
        x = x.detach().requires_grad_()
        return torch.cat([torch.autograd.grad((x**p).sum(), x)[0], x.detach() * (p - 1.0)])

    for function, tensor, numbers, last in (
        (distance, x, (inf, -inf, inf), 2.0),
        (power, z, (2.0, 3.0, 2.0), 0.0),
    ):
        program: Any = dr.program(function)
        for number in numbers:
            program(tensor, number)
        assert torch.equal(program(tensor, last).cpu(), function(tensor, last).cpu())
