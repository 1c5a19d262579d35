"""Gradients through functions and objects on workers: equal to those here, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distruntime as dr
from agree import REMOTE

pytestmark = pytest.mark.usefixtures("session")


class Losses:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


def in_an_object(x: Any) -> Any:
    return Losses((x * 2).sum())


def items(x: Any) -> Any:
    for k in range(2):
        yield (x * k).sum()


def beside_an_object(x: Any) -> Any:
    return {(0, 1): x * 3}, x * 2


def with_its_own_backward(x: Any) -> Any:
    (x * 2).sum().backward()
    return x.grad.sum()


@pytest.fixture
def x() -> Any:
    return torch.ones(3, device=REMOTE, requires_grad=True)


def test_a_gradient_reaches_the_tensor_beside_an_object_that_holds_one(x: Any) -> None:
    f: Any = dr.remote(beside_an_object)
    for expected in (2.0, 4.0):
        f(x)[1].sum().backward()
        assert x.grad.tolist() == [expected] * 3


def test_a_gradient_that_an_object_keeps_is_an_error_and_not_lost(x: Any) -> None:
    f: Any = dr.remote(in_an_object)
    # The first call asks what it returns, and the second knows.
    for _ in range(2):
        f(x).loss.backward()
        with pytest.raises(dr.errors.NotSupportedError, match=r"in_an_object has kept in an object"):
            dr.synchronize()
    for loss in dr.remote(items)(x):
        loss.backward()
        with pytest.raises(dr.errors.NotSupportedError, match=r"items has kept in an object"):
            dr.synchronize()


def test_a_body_may_take_gradients_itself_at_every_call(x: Any) -> None:
    f: Any = dr.remote(with_its_own_backward)
    assert [f(x).item() for _ in range(3)] == [6.0] * 3


def test_gradients_cannot_be_differentiated_again_and_that_is_no_secret(x: Any) -> None:
    f: Any = dr.remote(lambda x: x**3)
    (found,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    assert found.tolist() == [3.0] * 3
    with pytest.raises(dr.errors.NotSupportedError, match="cannot be differentiated again"):
        (found.sum() + x.sum()).backward()


def test_an_example_without_grad_does_not_drop_gradients(x: Any) -> None:
    f: Any = dr.remote(lambda x: x * 2, returns=torch.empty(3, device="meta"))
    with pytest.raises(dr.errors.UsageError, match="that requires grad where"):
        f(x).tolist()
    with torch.no_grad():
        assert f(x).tolist() == [2.0] * 3
    g: Any = f.options(returns=torch.empty(3, device="meta", requires_grad=True))
    (g(x).sum() + x.sum()).backward()
    assert x.grad.tolist() == [3.0] * 3


def test_on_a_mesh_gradients_come_back_to_the_members() -> None:
    mesh = dr.init_device_mesh("cpu", (2,))
    x = dr.from_shards([torch.ones(2, device=dr.place(k)) * (k + 1) for k in range(2)], mesh)
    x.requires_grad_()
    f: Any = dr.remote(lambda t: (t * t, t.long(), t.sum()))
    for expected in ([3.0, 5.0], [6.0, 10.0]):
        square, number, total = f(x)
        assert not number.requires_grad
        (square.sum() + total).backward()
        assert x.grad is not None
        assert [x.grad.member(k)[0].item() for k in range(2)] == expected


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x, lambda x: x.view(3, 1).T])
def test_a_write_through_a_result_is_noticed_where_the_operand_was_saved(x: Any, part: Any) -> None:
    f: Any = dr.remote(part)
    # The first call asks what it returns, and the second knows.
    for _ in range(2):
        saved = x * 1
        loss = (saved * saved).sum()
        found = f(saved.detach())
        found.add_(5)
        assert torch.equal(found.cpu(), part(saved.detach().cpu()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_second_backward_needs_a_graph_that_was_kept(x: Any) -> None:
    f: Any = dr.remote(lambda t: t * t)
    # The first call asks what it returns, and the second knows.
    for expected in (4.0, 8.0):
        y = f(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert x.grad.tolist() == [expected] * 3
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.sum().backward()
