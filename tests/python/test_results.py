"""What comes back of a call: tensors, or objects, and whose memory they are in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

pytestmark = pytest.mark.usefixtures("session")


class Table:
    """Something of everything."""

    def __init__(self) -> None:
        self.items = {"count": 1, "weights": torch.ones(2)}
        self.last: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.items[name]

    def fill(self) -> None:
        """Have a tensor where there was none."""
        self.last = torch.zeros(2)


def if_wanted(x: Any, wanted: bool) -> Any:
    return x + 1 if wanted else None


def second(x: Any, y: Any) -> Any:
    return y


def test_an_object_under_one_name_is_no_reason_to_expect_one_under_another() -> None:
    table: Any = dr.remote(Table)()
    assert dr.fetch(table["count"]) == 1
    assert isinstance(table["weights"], torch.Tensor)
    assert table["weights"].tolist() == [1.0, 1.0]
    assert dr.fetch(table["count"]) == 1


def test_an_attribute_that_was_none_may_become_a_tensor() -> None:
    table: Any = dr.remote(Table)()
    assert dr.fetch(table.last) is None
    table.fill()
    assert isinstance(table.last, torch.Tensor)
    assert table.last.tolist() == [0.0, 0.0]
    first: Any = dr.remote(torch.nn.Linear)(2, 2, bias=False)
    assert dr.fetch(first.bias) is None
    assert isinstance(dr.remote(torch.nn.Linear)(2, 2).bias, torch.Tensor)


def test_a_flag_decides_about_the_result() -> None:
    f: Any = dr.remote(if_wanted)
    x = torch.ones(2, device=REMOTE)
    for _ in range(2):
        assert dr.fetch(f(x, False)) is None
        assert isinstance(f(x, True), torch.Tensor)
        assert f(x, True).tolist() == [2.0, 2.0]


def test_a_result_with_another_dtype_in_an_arguments_memory_counts_its_writes() -> None:
    bits = dr.remote(lambda x: x.view(torch.int32))
    for _ in range(3):
        x, weight = torch.ones(3, device=REMOTE), torch.ones(3, device=REMOTE, requires_grad=True)
        loss = (weight * x).sum()
        bits(x).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert x.tolist() == [0, 0, 0]


def _view(x: torch.Tensor) -> Any:
    b = x * 2
    return b, b[0]


def _view_first(x: torch.Tensor) -> Any:
    b = x * 2
    return b.t(), b


def _detached(x: torch.Tensor) -> Any:
    b = x.exp()
    return b, b.detach()


def _of_another_dtype(x: torch.Tensor) -> Any:
    b = x.detach() * 2
    return b.view(torch.int32), b


def _of_the_argument(x: torch.Tensor) -> Any:
    return x, x[1]


@pytest.mark.parametrize("f", [_view, _view_first, _detached, _of_another_dtype, _of_the_argument])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_results_in_one_memory_count_their_writes_together(f: Any, grad: bool) -> None:
    remote = dr.remote(f)
    for written in (0, 1, 0, 1):
        x = torch.ones(3, 3, device=REMOTE, requires_grad=grad) * 1
        found = remote(x)
        kept = found[1 - written]
        if kept.is_floating_point():
            weight = torch.ones(kept.shape, device=REMOTE, requires_grad=True)
            loss = (weight * kept).sum()
            with torch.no_grad():
                found[written].add_(1)
            with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|inplace)"):
                loss.backward()
        assert found[0]._version == found[1]._version


@pytest.mark.parametrize("f", [_view, _view_first, _of_the_argument])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("written", [0, 1])
def test_no_gradient_is_lost_between_results_in_one_memory(f: Any, grad: bool, written: int) -> None:
    remote = dr.remote(f)
    for _ in range(3):
        x = torch.ones(3, 3, device=REMOTE, requires_grad=grad) * 1
        found = remote(x)
        # A result behaves as ever until then.
        assert found[1 - written].requires_grad == grad
        weight = torch.full((3,), 2.0, device=REMOTE, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified inplace"):
            found[written].mul_(weight)
            found[1 - written].sum().backward()


def test_an_argument_and_a_result_in_its_memory_lose_no_gradient() -> None:
    tail = dr.remote(lambda x: x[1:])
    for _ in range(3):
        x = torch.ones(3, device=REMOTE, requires_grad=True)
        y = x * 1
        tail(y).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [0, 1, 1]
        y = x * 1
        with pytest.raises(RuntimeError, match="modified inplace"):
            tail(y).mul_(2)
        found = tail(y)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified inplace"):
            found.sum()


def test_operands_in_one_memory_say_nothing_about_operands_in_two() -> None:
    f: Any = dr.remote(second)
    a, b = torch.zeros(2, device=REMOTE), torch.zeros(2, device=REMOTE)
    f(a, a)
    found = f(a, b)
    assert found._handle.storage is b._handle.storage
    f(a, a.view(2))
    assert f(a, b)._handle.storage is b._handle.storage


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_an_example_may_be_any_tree(kind: Any) -> None:
    one = torch.empty(2, device="meta")
    example = {"a": one, "b": one} if kind is dict else kind((one, one))

    def f(x: Any) -> Any:
        return {"a": x, "b": x + 1} if kind is dict else kind((x, x + 1))

    g: Any = dr.remote(f, returns=example)
    for _ in range(2):
        found = g(torch.ones(2, device=REMOTE))
        assert type(found) is kind
        assert (found["b"] if kind is dict else found[1]).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_that_cannot_be_proxies_are_objects() -> None:
    x = torch.eye(2, device=REMOTE)
    sparse: Any = dr.remote(lambda x: x.to_sparse())(x)
    assert dr.fetch(sparse).layout is torch.sparse_coo
    assert sparse.to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    both: Any = dr.remote(lambda x: (x + 1, x.to_sparse(), torch.empty(3, device="meta")))(x)
    assert both[0].sum().item() == 6.0
    assert dr.fetch(both[1]).layout is torch.sparse_coo
    assert dr.fetch(both[2]).is_meta


def test_a_name_among_the_arguments_is_no_name_of_an_argument() -> None:
    f: Any = dr.remote(lambda *args, **named: torch.ones(2) if args[0] == "a" else {"o": 1})
    assert isinstance(f(1, a=2), dr.types.RemoteObject)
    assert isinstance(f("a", 1, 2), torch.Tensor)


def test_arguments_arrive_as_they_are() -> None:
    kinds: Any = dr.remote(lambda *args: [type(arg).__name__ for arg in args], returns=object)
    assert dr.fetch(kinds(bytearray(b"x"), b"x", [1], 1 << 70)) == ["bytearray", "bytes", "list", "int"]
    twice: Any = dr.remote(lambda a, b: a is b[0], returns=object)
    one = [1]
    assert dr.fetch(twice(one, [one])) and not dr.fetch(twice(one, [[1]]))


def test_a_result_that_is_in_itself_is_an_object(mesh: dr.mesh.DeviceMesh) -> None:
    def circular(x: Any) -> Any:
        found: list[Any] = [x]
        found += [found, found]
        return found

    found: Any = dr.remote(circular)(torch.ones(2, device=REMOTE))
    assert isinstance(found, dr.types.RemoteObject)
    assert found[1][2][0].tolist() == [1.0, 1.0]
    both: Any = dr.spmd(mesh, circular)(torch.ones(2, device=mesh.device))
    assert all(isinstance(one, dr.types.RemoteObject) for one in both)
    assert dr.fetch(both[1])[1][2][0].tolist() == [1.0, 1.0]
