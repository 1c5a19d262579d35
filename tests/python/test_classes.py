"""Results of classes that both sides know: named tuples, and what torch's pytree has registered."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import distruntime as dr
from agree import REMOTE
from distruntime.log.storage import HeldStorage
from distruntime.python.structure import known_here, require
from distruntime.tensors.trees import is_here, remade
from distruntime.wire.codec import Opened, opened

pytestmark = pytest.mark.usefixtures("session")


class Losses(NamedTuple):
    loss: Any
    extra: Any = None
    count: int = 3


class Output(OrderedDict[str, Any]):
    """Like transformers' `ModelOutput`: items that are attributes, too. A subclass registers itself."""

    def __init_subclass__(cls) -> None:
        register(cls)

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, value in given.items():
            self[name] = value
            self.__dict__[name] = value

    __reduce__ = object.__reduce__


def register(cls: type) -> None:
    """Tell torch's pytree of an output's class."""
    pytree.register_pytree_node(
        cls,
        lambda value: ([*value.values()], [*value]),
        lambda parts, names: cls(**dict(zip(names, parts))),
    )


class Answer(Output):
    """What a model returns."""


def in_a_named_tuple(x: Any) -> Any:
    return Losses((x * 2).sum(), {"twice": x * 2})


def in_an_output(x: Any) -> Any:
    return Answer(loss=(x * 3).sum(), logits=x * 2)


def in_a_class_of_its_own(x: Any) -> Any:
    kind: Any = collections.namedtuple("kind", ["a", "b"])
    return x * 5, kind(x * 7, 2), x * 3


@dataclasses.dataclass
class Batch:
    inputs: Any
    labels: Any = None


def in_a_dataclass(x: Any) -> Any:
    if Batch not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(Batch)
    return Batch(x + 1)


@pytest.fixture
def x() -> Any:
    return torch.ones(3, device=REMOTE, requires_grad=True)


def test_what_torch_returns_is_of_torchs_class() -> None:
    x = torch.tensor([[1.0, 5.0], [2.0, 4.0]], device=REMOTE)
    f: Any = dr.remote(lambda x: torch.max(x, 0))
    # The first call asks what it returns, and the second knows.
    for _ in range(2):
        found = f(x)
        assert type(found) is torch.return_types.max
        assert (found.values.tolist(), found.indices.tolist()) == ([2.0, 5.0], [1, 0])


def test_a_named_tuple_is_one_here_and_carries_gradients(x: Any) -> None:
    f: Any = dr.remote(in_a_named_tuple)
    for k in range(1, 3):
        found = f(x)
        assert type(found) is Losses
        (found.loss + found.extra["twice"].sum()).backward()
        assert x.grad.tolist() == [4.0 * k] * 3
        assert dr.fetch(found).count == 3


def test_none_in_a_named_tuple_is_none_and_may_be_a_tensor_later() -> None:
    f: Any = dr.remote(lambda x: Losses(x, None if x.sum() < 1 else x + 1))
    assert f(torch.zeros(2, device=REMOTE)).extra is None
    assert f(torch.ones(2, device=REMOTE)).extra.tolist() == [2.0, 2.0]
    # What was a tensor is expected to be one, and what was not expected is an error.
    with pytest.raises(dr.errors.UsageError, match=r'where a tensor .* was expected.*returns="ask"'):
        dr.fetch(f(torch.zeros(2, device=REMOTE)))
    assert f.options(returns="ask")(torch.zeros(2, device=REMOTE)).extra is None


@pytest.mark.parametrize("recorded", [True, False])
def test_an_output_of_a_model_is_one_here_and_later_calls_wait_for_nothing(x: Any, recorded: bool) -> None:
    f: Any = dr.remote(in_an_output)
    with torch.set_grad_enabled(recorded):
        for _ in range(2):
            found = f(x)
            assert type(found) is Answer
            assert found.logits.tolist() == [2.0] * 3
            # What only the result holds is known to be there once.
            assert not isinstance(found.logits._handle.storage, HeldStorage)
            assert not isinstance(found.loss._handle.storage, HeldStorage)
    if recorded:
        found.loss.backward()
        assert x.grad.tolist() == [3.0] * 3


def test_what_an_object_holds_in_a_class_is_in_one_memory() -> None:
    class Model:
        def __init__(self) -> None:
            self.last = Answer(weights=torch.zeros(2))
            self.pair = (torch.zeros(2), torch.ones(2))

        def get(self) -> Any:
            return self.last

        def both(self) -> Any:
            return self.pair

    model: Any = dr.remote(Model)()
    for read in (lambda: model.get().weights, lambda: model.both()[0]):
        first, second = read(), read()
        assert first._handle.storage is second._handle.storage
        first.add_(1)
        assert read().tolist() == [1.0, 1.0]


def test_a_class_that_is_not_here_stays_an_object_beside_tensors_with_gradients(x: Any) -> None:
    f: Any = dr.remote(in_a_class_of_its_own)
    for k in range(1, 3):
        a, found, b = f(x)
        assert isinstance(found, dr.types.RemoteObject)
        assert found.a.tolist() == [7.0] * 3
        (a + 2 * b).sum().backward()
        assert x.grad.tolist() == [11.0 * k] * 3
        x.grad.zero_()
        x.grad += 11.0 * k


def test_dataclasses_and_ordered_dicts_are_what_they_are() -> None:
    x = torch.zeros(2, device=REMOTE)
    pytree.register_dataclass(Batch)
    try:
        found = dr.remote(in_a_dataclass)(x)
        assert type(found) is Batch
        assert (found.inputs.tolist(), found.labels) == ([1.0, 1.0], None)
    finally:
        pytree._deregister_pytree_node(Batch)
    model: Any = dr.remote(torch.nn.Linear)(2, 1)
    state = model.state_dict()
    assert type(state) is OrderedDict
    state["bias"].fill_(3)
    assert model.bias.tolist() == [3.0]
    queue: Any = dr.remote(lambda x: collections.deque([x + 1]))(x)
    queue.append(1)
    assert len(queue) == 2


def test_an_example_may_be_of_such_a_class() -> None:
    one, total = torch.empty(3, device="meta"), torch.empty((), device="meta")
    x = torch.ones(3, device=REMOTE)
    f: Any = dr.remote(in_a_named_tuple, returns=Losses(total, {"twice": one}, object))  # type: ignore[arg-type]
    g: Any = dr.remote(in_an_output, returns=Answer(loss=total, logits=one))
    for _ in range(2):
        assert f(x).extra["twice"].tolist() == [2.0] * 3
        assert g(x).loss.item() == 9.0
    with pytest.raises(
        dr.errors.UsageError, match=r"returned a Losses of 3 where a Answer of 2|returned a tuple of 3"
    ):
        dr.fetch(dr.remote(in_a_named_tuple, returns=Answer(loss=total, logits=one))(x))

    class Hidden(NamedTuple):
        a: Any

    with pytest.raises(dr.errors.UsageError, match="its class is not found by its name"):
        dr.remote(in_a_named_tuple, returns=Hidden(one))(x)


def test_on_a_mesh_the_class_holds_tensors_of_the_mesh(mesh: dr.mesh.DeviceMesh) -> None:
    x = torch.ones(3, device=mesh.device)
    found: Any = dr.remote(in_a_named_tuple)(x)
    assert type(found) is Losses
    assert found.extra["twice"].member(1).tolist() == [2.0] * 3

    @dr.spmd(mesh)
    def ranks(x: Any) -> Any:
        return Losses(x.sum(), None), torch.max(x, 0)

    for _ in range(2):
        losses, largest = ranks(x)
        assert type(losses) is Losses and type(largest) is torch.return_types.max
        assert losses.loss.member(1).item() == 3.0
        assert (losses.extra, dr.fetch(losses.count)) == (None, [3, 3])


# -- classes that a worker names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "antigravity:fly",
        "builtins:tuple",
        "builtins:dict",
        "functools:partial",
        "lazy_module:Thing",
        "collections:OrderedDict.fromkeys",
        "nothing",
        ":",
        "",
    ],
)
def test_a_class_that_a_worker_names_runs_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, asked = ModuleType("lazy_module"), list[str]()

    def imported(name: str) -> Any:
        asked.append(name)
        raise AttributeError(name)

    lazy.__getattr__ = imported  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    before = {*sys.modules}
    assert not is_here(name, "None")
    tensor = ["tensor", [2], [1], 0, "float32", 0, False, -1]
    told = require(["tuple", ["class", name, "None", tensor], tensor], 0)
    assert known_here(told) == (["tuple", "object", tensor], [False, True])
    assert {*sys.modules} == before and "Thing" not in asked


def test_a_class_whose_fields_differ_is_not_taken() -> None:
    assert is_here(f"{__name__}:Losses", "['loss', 'extra', 'count']")
    assert not is_here(f"{__name__}:Losses", "['loss', 'extra']")
    with pytest.raises(dr.errors.UsageError, match="is another one now, or is gone"):
        remade(Opened(f"{__name__}:Losses", "['loss']", [1]))
    with pytest.raises(dr.DistruntimeError, match="not plain values"):
        remade(Opened("collections:OrderedDict", "__import__('os')", [1]))


def test_what_is_opened_says_no_more_than_plain_values() -> None:
    assert opened(collections.defaultdict(list, a=1)) is None
    assert opened(OrderedDict({(1, object): 2})) is None
    assert opened((1, 2)) is None
    assert opened(torch.Size([1])) is None
    assert opened(OrderedDict(a=1)) == Opened("collections:OrderedDict", "['a']", [1])
