"""Composites are one instruction where autograd records nothing, and torch's formula elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import distruntime as dr
from agree import REMOTE, agrees, tensor
from counting import instructions
from distruntime.session.session import Session

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without a bias": lambda x, w, b: F.linear(x, w),
    "linear of three dimensions": lambda x, w, b: F.linear(x.expand(2, *x.shape), w, b),
    "a product of vectors": lambda x, w, b: x[0] @ x[1],
    "a product of four dimensions": lambda x, w, b: x.expand(2, 3, *x.shape) @ w.t(),
    "einsum": lambda x, w, b: torch.einsum("ij,kj->ik", x, w),
    "einsum of three": lambda x, w, b: torch.einsum("ij,kj,k->ik", x, w, b),
}


def operands(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(*size, dtype=dtype).to(device) for size in ((4, 5), (6, 5), (6,))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_values_are_equal_to_the_last_bit(
    session: Session, name: str, dtype: torch.dtype, mode: Callable[[], Any]
) -> None:
    with mode():
        local = CALLS[name](*operands("cpu", dtype))
        for _ in range(2):
            remote = CALLS[name](*operands(REMOTE, dtype))
            assert torch.equal(remote.cpu(), local) and remote.stride() == local.stride()


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda x, w, b: F.linear(x, w, b), 1),
        (lambda x, w, b: x @ w.t(), 2),
        (lambda x, w, b: torch.einsum("ij,kj->ik", x, w), 1),
    ],
)
def test_one_instruction_without_gradients(
    session: Session, call: Callable[..., torch.Tensor], count: int
) -> None:
    given = [t.requires_grad_() for t in operands(REMOTE)]
    with torch.no_grad():
        call(*given)
        # The prediction is confirmed: from here on the hot path has it.
        dr.synchronize()
        assert instructions(session, lambda: call(*given)) == count


def test_gradients_are_as_before(session: Session) -> None:
    found = []
    for device in ("cpu", REMOTE):
        x, w, b = (t.requires_grad_() for t in operands(device))
        loss = (F.linear(x, w, b) @ torch.einsum("ij,kj->ki", x, w)).square().sum()
        loss.backward()
        found.append([t.grad.cpu() for t in (x, w, b) if t.grad is not None])
    assert len(found[1]) == 3 and all(torch.equal(a, b) for a, b in zip(*found))


def test_who_looks_at_operators_sees_those_of_the_formula(session: Session) -> None:
    x, w, b = operands(REMOTE)
    with torch.no_grad():
        graph = make_fx(F.linear)(x, w, b).graph
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert names == ["aten.t.default", "aten.addmm.default"]
        with FlopCounterMode(display=False) as counter:
            F.linear(x, w, b)
        assert counter.get_total_flops() == 2 * 4 * 5 * 6


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_derivatives_are_there_without_gradients(session: Session) -> None:
    with torch.no_grad():
        x, w, b = operands(REMOTE)
        remote = torch.func.jvp(lambda t: F.linear(t, w, b), (x,), (torch.ones_like(x),))[1]
        x, w, b = operands("cpu")
        local = torch.func.jvp(lambda t: F.linear(t, w, b), (x,), (torch.ones_like(x),))[1]
    assert torch.equal(remote.cpu(), local)


def test_vmap_without_gradients(session: Session) -> None:
    x, w, b = operands(REMOTE)
    with torch.no_grad():
        found = torch.vmap(lambda row: F.linear(row, w, b))(x)
        assert torch.allclose(found.cpu(), F.linear(x, w, b).cpu(), atol=1e-6)


def test_shapes_that_do_not_fit_are_refused_in_torchs_words(session: Session) -> None:
    said = []
    for device in ("cpu", REMOTE):
        x, w, _ = operands(device)
        with torch.no_grad(), pytest.raises(RuntimeError) as caught:
            F.linear(x, w.t())
        said.append(str(caught.value))
    assert said[1].startswith(said[0])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bool, torch.bool)])
def test_wrong_dtypes_are_told_at_once(session: Session, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for call in (F.linear, torch.matmul, lambda x, w: torch.einsum("ij,kj->ik", x, w)):
        said = []
        for device in ("cpu", REMOTE):
            x, w = (torch.ones(4, 4, dtype=dtype, device=device) for dtype in dtypes)
            with torch.no_grad(), pytest.raises(RuntimeError) as caught:
                call(x, w)
            said.append(str(caught.value).splitlines()[0])
        assert said[1].startswith(said[0])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "einsum that transposes": lambda x: torch.einsum("ij->ji", x),
    "einsum that does nothing": lambda x: torch.einsum("ij->ij", x),
    "einsum of a diagonal": lambda x: torch.einsum("ii->i", x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "meshgrid of one": lambda x: torch.meshgrid(x.view(-1), indexing="ij")[0],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1])[1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_no_schema_names_sees_what_is_written(
    session: Session, name: str, mode: Callable[[], Any]
) -> None:
    found = []
    with mode():
        for device in ("cpu", REMOTE):
            for _ in range(2):
                x = torch.arange(4.0).reshape(2, 2).to(device)
                view = VIEWS[name](x)
                x.copy_(torch.full((2, 2), 9.0))
                x[0, 0] = 7
            found.append(view.cpu())
    assert torch.equal(*found)


OF_PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "inner": torch.inner,
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, x]),
    "matrix_power": lambda x, w: torch.linalg.matrix_power(x, 3),
    "cov": lambda x, w: torch.cov(x),
    "a GRU cell": lambda x, w: torch.nn.GRUCell(4, 4).to(x.device)(x),
    "linear": F.linear,
    "matmul": lambda x, w: x.expand(2, 2, 4, 4) @ w,
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_autocast_lowers_what_composites_are_made_of(
    session: Session, name: str, mode: Callable[[], Any]
) -> None:
    found = []
    for device, kind in (("cpu", "cpu"), (REMOTE, "remote")):
        torch.manual_seed(0)
        x, w = (torch.randn(4, 4).to(device) for _ in range(2))
        with mode():
            # A call outside of autocast is remembered, and must not be found inside.
            plain = OF_PRODUCTS[name](x, w)
            torch.manual_seed(0)
            with torch.autocast(kind, dtype=torch.bfloat16):
                lowered = OF_PRODUCTS[name](x, w)
        found.append((plain.dtype, lowered.dtype, lowered.float().cpu()))
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


def test_what_returns_its_operands_in_a_list_is_issued(session: Session) -> None:
    x = torch.arange(4.0, device=REMOTE)
    with torch.inference_mode():
        for _ in range(2):
            one, two = torch.broadcast_tensors(x, x + 1)
            assert one.tolist() == [0, 1, 2, 3] and two.tolist() == [1, 2, 3, 4]


# -- one_hot --------------------------------------------------------------------------------------------


def classes(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


ONE_HOT: dict[str, Callable[[str], torch.Tensor]] = {
    "with its number": lambda d: F.one_hot(classes(d, 3, 4, 1, 0), 6),
    "without": lambda d: F.one_hot(classes(d, 3, 4, 1, 0)),
    "a number": lambda d: F.one_hot(classes(d, 2)[0], 3),
    "turned": lambda d: F.one_hot(torch.arange(6, device=d).view(2, 3).t(), 6),
    "of nothing": lambda d: F.one_hot(torch.ones(4, 0, dtype=torch.int64, device=d), 10),
    "vmap": lambda d: torch.vmap(lambda x: F.one_hot(x, 4))(classes(d, 3, 1, 0)),
    "make_fx": lambda d: make_fx(lambda x: F.one_hot(x, 4))(classes(d, 3))(classes(d, 1)),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", [name for name in ONE_HOT if name != "make_fx"])
def test_one_hot_is_as_here(session: Session, name: str, mode: Callable[[], Any]) -> None:
    with mode():
        local, remote = ONE_HOT[name]("cpu"), ONE_HOT[name](REMOTE)
    assert torch.equal(remote.cpu(), local) and remote.dtype == local.dtype
    # In inference mode the first result has the strides of torch's formula (docs/limits.md).
    assert remote.stride() == local.stride() or name == "vmap" or mode is torch.inference_mode


def test_one_hot_is_traced(session: Session) -> None:
    assert ONE_HOT["make_fx"](REMOTE).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda d: F.one_hot(classes(d, 3, 4), 3),
        lambda d: F.one_hot(classes(d, 3, -1), 4),
        lambda d: F.one_hot(classes(d, 3, -1)),
        lambda d: F.one_hot(classes(d, 3), 0),
        lambda d: F.one_hot(classes(d, 3), -2),
        lambda d: F.one_hot(torch.ones(0, dtype=torch.int64, device=d)),
        lambda d: F.one_hot(torch.ones(0, dtype=torch.int64, device=d), 0),
        lambda d: F.one_hot(classes(d, 3).int(), 4),
    ],
)
def test_a_class_that_is_out_of_range_is_no_row_of_zeros(
    session: Session, call: Callable[[str], torch.Tensor]
) -> None:
    with pytest.raises(RuntimeError) as here:
        call("cpu")
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(here.value))}"):
        call(REMOTE).cpu()


@pytest.mark.parametrize("kind", ["empty", "of the right size", "a part of a larger one"])
@pytest.mark.parametrize("how", [{}, {"tol": 1e-3}, {"rtol": 0.1}, {"hermitian": True}], ids=str)
@agrees
def test_the_rank_of_a_matrix_is_written_into_out(device: str, how: dict[str, Any], kind: str) -> Any:
    """torch's formula for a tensor subclass makes the result anew, and `out` stayed as it was."""
    x = tensor(device, 2, 5, 5)
    x = x @ x.mT
    whole = torch.full((0,) if kind == "empty" else (2, 2), 7, device=device)
    out = whole if kind == "empty" else whole[0] if kind == "of the right size" else whole[:, 1]
    found = torch.linalg.matrix_rank(x, **how, out=out)
    assert found is out
    return found, whole


def test_a_rank_is_not_written_as_a_truth_value(session: Session) -> None:
    said = []
    for device in ("cpu", REMOTE):
        out = torch.empty(0, dtype=torch.bool, device=device)
        with pytest.raises(RuntimeError) as refused:
            torch.linalg.matrix_rank(torch.eye(2, device=device), out=out)
        said.append(str(refused.value))
    assert said[0] == said[1]


SIZES = [((2, 3, 4), (4, 5)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5)), ((3, 4), (4, 5))]


@pytest.mark.parametrize("kind", ["empty", "whole", "every other"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@agrees
def test_a_product_is_written_into_out(device: str, sizes: tuple[tuple[int, ...], ...], kind: str) -> Any:
    """torch's formula asked whether a view has the memory of `out`, and wrote one of another shape."""
    a, b = tensor(device, *sizes[0]), tensor(device, *sizes[1], seed=1)
    size = (a @ b).shape
    whole = torch.zeros({"empty": (0,), "every other": (*size, 2)}.get(kind, size), device=device)
    out = whole[..., 0] if kind == "every other" else whole
    version = out._version
    found = torch.matmul(a, b, out=out)
    assert found is out and out._version > version
    return out, whole


@pytest.mark.parametrize("device", ["cpu", REMOTE])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_not_written_where_torch_refuses(
    session: Session, device: str, sizes: tuple[tuple[int, ...], ...]
) -> None:
    a, b = tensor(device, *sizes[0], grad=True), tensor(device, *sizes[1], seed=1)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.matmul(a, b, out=torch.empty(0, device=device))


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_a_recurrent_layer_is_traced_by_aot_autograd(session: Session, kind: type[torch.nn.Module]) -> None:
    """The tensors of its trace are functional ones, and none of them is at a place."""
    layer, x = kind(4, 3).to(REMOTE), tensor(REMOTE, 5, 2, 4)
    weights = dict(layer.named_parameters())

    def run(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(layer, weights, (x,))[0]
        return found

    traced = aot_function(run, nop)(weights, x)
    torch.testing.assert_close(traced.cpu(), run(weights, x).cpu())
    slopes, wanted = (
        torch.autograd.grad(found.sum(), [*weights.values()]) for found in (traced, run(weights, x))
    )
    for slope, want in zip(slopes, wanted):
        torch.testing.assert_close(slope.cpu(), want.cpu())
