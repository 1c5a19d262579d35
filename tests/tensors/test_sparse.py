"""Sparse gradients of embeddings on a worker: training with them gives the numbers of training here."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, SparseAdam

import distruntime as dr
from agree import REMOTE, agrees, check
from distruntime.tensors.sparse import SparseTensor

# SparseAdam and Adagrad make sparse tensors, of which torch says that it checks nothing of them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

Parameters = Iterable[torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Parameters], Any]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD in a loop": lambda p: SGD(p, lr=0.1, foreach=False),
    "SparseAdam": lambda p: SparseAdam(list(p), lr=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
}
BATCHES = ([1, 4, 1, 0], [2, 4, 5, 5], [3, 3, 3, 3])


def of_rows(device: str) -> Any:
    """Return the weight of an embedding, with the gradient of two rows, one of them twice."""
    table = nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(torch.arange(18.0).view(6, 3) / 7)
    table.to(device)
    table(torch.tensor([1, 4, 1], device=device)).square().sum().backward()
    return table.weight


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"max_norm": 0.5}], ids=str)
@agrees
def test_an_embedding_trains(device: str, name: str, options: dict[str, Any]) -> Any:
    table = nn.Embedding(6, 3, sparse=True, **options).to(device)
    head = nn.Linear(3, 2).to(device)
    optimizers = OPTIMIZERS[name](table.parameters()), SGD(head.parameters(), lr=0.1)
    losses, grads = [], []
    for batch in BATCHES:
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The second pass adds its gradient to that of the first.
        for index in (batch, batch[:2]):
            losses.append(head(table(torch.tensor(index, device=device))).square().sum())
            losses[-1].backward()
        assert table.weight.grad is not None and table.weight.grad.layout is torch.sparse_coo
        # On an accelerator torch computes some steps in the gradient itself.
        grads.append(table.weight.grad.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    return losses, grads, table.weight, head.weight


@pytest.mark.parametrize("options", [{}, {"mode": "sum"}, {"mode": "sum", "padding_idx": 1}], ids=str)
@pytest.mark.parametrize("name", ["SGD", "SparseAdam"])
@agrees
def test_bags_train(device: str, name: str, options: dict[str, Any]) -> Any:
    """So do those of dlrm, whose tables are sums over bags."""
    table = nn.EmbeddingBag(6, 3, sparse=True, **options).to(device)
    optimizer = OPTIMIZERS[name](table.parameters())
    for batch in BATCHES:
        optimizer.zero_grad()
        index, offsets = torch.tensor(batch, device=device), torch.tensor([0, 1, 1], device=device)
        weights = torch.tensor([0.5, 1.0, 2.0, 0.25], device=device) if options == {"mode": "sum"} else None
        table(index, offsets, per_sample_weights=weights).square().sum().backward()
        optimizer.step()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    return table.weight, table.weight.grad.to_dense()


# What code does with such a gradient; each gives a dense tensor of the worker, or raises.
USES: dict[str, Callable[[Any], Any]] = {
    "to_dense": lambda p: p.grad.to_dense(),
    "its parts": lambda p: (p.grad._indices(), p.grad._values()),
    "added up": lambda p: (p.grad.coalesce().indices(), p.grad.coalesce().values()),
    "added up already": lambda p: p.grad.coalesce().coalesce().to_dense(),
    "the parts of one that is not": lambda p: p.grad.values(),
    "numbers": lambda p: (
        p.grad.sum(),
        p.grad._nnz(),
        p.grad.sparse_dim(),
        p.grad.dense_dim(),
        p.grad.is_coalesced(),
        tuple(p.grad.shape),
    ),
    "scaled": lambda p: (2 * p.grad / 3 - p.grad).to_dense(),
    "scaled in place": lambda p: p.grad.mul_(3).neg_().div_(2).to_dense(),
    "powers": lambda p: (p.grad.pow(2).to_dense(), p.grad.abs().sqrt().to_dense()),
    "no power": lambda p: p.grad.pow(0),
    "from a dense one": lambda p: (torch.ones_like(p) - p.grad, torch.ones_like(p) + p.grad),
    "to a sparse one": lambda p: p.grad + torch.ones_like(p),
    "a norm": lambda p: p.grad.norm(),
    "clipped by a norm": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "clipped by value": lambda p: nn.utils.clip_grad_value_(p, 1.0),
    "several": lambda p: torch._foreach_add_([p.data], [p.grad], alpha=-0.1)[0],
    "zeros": lambda p: (torch.zeros_like(p.grad).to_dense(), p.grad.zero_().to_dense()),
    "in place": lambda p: p.grad.add_(p.grad.clone()).sub_(p.grad, alpha=0.5).to_dense(),
    "copied": lambda p: torch.zeros_like(p.grad).copy_(p.grad).to_dense(),
    "of the values": lambda p: p.grad._values().mul_(2) is not None and p.grad.to_dense(),
    "another dtype": lambda p: p.grad.half().to(torch.float64).to_dense(),
    "masked": lambda p: p.detach().sparse_mask(p.grad.coalesce()).values(),
    "set": lambda p: setattr(p, "grad", p.grad.coalesce()) or p.grad.values(),
    "with a dense one": lambda p: p[:1].sum().backward() or p.grad,
    "made": lambda p: torch.sparse_coo_tensor(
        torch.tensor([[0, 2], [1, 2]]), torch.tensor([1.0, 2.0], device=p.device), (3, 4)
    ).to_dense(),
    "by a hook": lambda p: (
        (
            p.register_hook(lambda grad: grad * 2)
            and nn.functional.embedding(torch.tensor([0, 0], device=p.device), p, sparse=True)
            .sum()
            .backward()
        )
        or p.grad.to_dense()
    ),
    "not kept": lambda p: torch.autograd.grad(
        nn.functional.embedding(torch.tensor([0, 0], device=p.device), p, sparse=True).sum(), p
    )[0].to_dense(),
}
REFUSED = (
    *("the parts of one that is not", "no power", "to a sparse one"),
    *("clipped by a norm", "clipped by value"),
)


@pytest.mark.parametrize("name", USES)
def test_what_code_does_with_a_sparse_gradient(session: object, name: str) -> None:
    """What torch refuses is refused, by the same class of error."""
    worked = check(lambda: USES[name](of_rows("cpu")), lambda: USES[name](of_rows(REMOTE)))
    assert worked is not (name in REFUSED)


def test_a_scaler_scales_and_skips(session: object) -> None:
    found = []
    for device in ("cpu", REMOTE):
        weight = nn.Parameter(torch.ones(4, 2, device=device))
        optimizer, scaler = SGD([weight], lr=0.1), torch.amp.GradScaler(device, init_scale=8.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            rows = nn.functional.embedding(torch.tensor([1, 1], device=device), weight, sparse=True)
            scaler.scale(rows.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((weight.detach().cpu(), scaler.get_scale()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_gradients_that_are_gathered_for_long_do_not_grow(session: object) -> None:
    table = nn.Embedding(4, 2, sparse=True, device=REMOTE)
    for _ in range(20):
        table(torch.tensor([1, 2, 3], device=REMOTE)).sum().backward()
    grad = table.weight.grad
    assert grad is not None and grad._nnz() <= 8 and grad.to_dense().tolist()[1:] == [[20.0, 20.0]] * 3


def test_it_comes_here_goes_elsewhere_and_into_files(session: object) -> None:
    weight, here = of_rows(REMOTE), of_rows("cpu").grad
    grad = weight.grad
    assert isinstance(grad, SparseTensor) and grad.device == weight.device and grad.place == dr.place(0)
    for local in (grad.cpu(), dr.fetch({"a": grad})["a"], dr.fetch(grad)):
        assert local.is_sparse and torch.equal(local.to_dense(), here.to_dense())
    for there in (grad.to(dr.place(1, "cpu")), here.to(REMOTE).to("remote:1")):
        assert there.place == dr.place(1) and torch.equal(there.to_dense().cpu(), here.to_dense())
    assert copy.deepcopy(grad).to_dense().tolist() == here.to_dense().tolist()
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    for where in ("cpu", REMOTE):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["grad"]
        assert (
            loaded.is_sparse
            and loaded.device.type == where
            and loaded.to_dense().tolist() == here.to_dense().tolist()
        )
    with pytest.raises(dr.errors.NotSupportedError, match=r"dr\.fetch"):
        pickle.dumps(grad)
    assert "layout=torch.sparse_coo" in repr(grad) and "node 0" in repr(grad)
    assert grad.type() == "torch.remote.sparse.FloatTensor" and not grad.is_cuda


@pytest.mark.parametrize(
    "wrong",
    [lambda g: g[1], lambda g: g @ g, lambda g: g * torch.ones(6, 3, device=REMOTE), lambda g: g.mean()],
)
def test_what_it_cannot_do_says_what_can(session: object, wrong: Callable[[Any], Any]) -> None:
    with pytest.raises(
        dr.errors.NotSupportedError, match=r"x\.to_dense\(\) is a dense one there, and x\.cpu\(\)"
    ):
        wrong(of_rows(REMOTE).grad)


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "spmm": lambda a, w: torch.spmm(a, w),
    "at": lambda a, w: a @ w,
    "sparse.mm": lambda a, w: torch.sparse.mm(a, w),
    "mv": lambda a, w: torch.mv(a, w[:, 0]),
    "transposed": lambda a, w: a.t() @ (a @ w),
    "addmm": lambda a, w: torch.addmm(torch.ones_like(w), a, w, beta=2, alpha=3),
    "sparse.addmm": lambda a, w: torch.sparse.addmm(torch.ones_like(w), a, w, beta=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
@agrees
def test_a_sparse_matrix_multiplies_a_dense_one(device: str, name: str) -> Any:
    indices = torch.tensor([[0, 1, 2, 2, 2], [1, 0, 0, 2, 2]])
    matrix = torch.sparse_coo_tensor(indices, torch.arange(1.0, 6.0), (3, 3)).to(device)
    dense = torch.arange(6.0).view(3, 2).to(device).requires_grad_()
    found = PRODUCTS[name](matrix, dense)
    found.square().sum().backward()
    return found, dense.grad


def test_shapes_that_do_not_fit_are_named(session: object) -> None:
    matrix = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (3, 3)).to(REMOTE)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x3 and 2x2\)"):
        torch.spmm(matrix, torch.ones(2, 2, device=REMOTE))


def entries(device: str, values: torch.Tensor, at: tuple[int, ...] = (0, 2)) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([list(at)]), values, (3,)).to(device)


SUMS: dict[str, Callable[[str], Any]] = {
    "promotes": lambda d: torch.ones(3, dtype=torch.int64, device=d) + entries(d, torch.tensor([0.5, 1.0])),
    "promotes in half": lambda d: (
        torch.zeros(3, dtype=torch.half, device=d) + entries(d, torch.tensor([1e6, 1.0]))
    ),
    "keeps its dtype": lambda d: (
        entries(d, torch.ones(2)).add_(entries(d, torch.ones(2).double())).to_dense()
    ),
    "rounds sums": lambda d: torch.div(
        entries(d, torch.tensor([3.0, 3.0]), (1, 1)), 2, rounding_mode="floor"
    ).to_dense(),
}


@pytest.mark.parametrize("name", SUMS)
@agrees
def test_dtypes_and_rounding_are_torchs(device: str, name: str) -> Any:
    return SUMS[name](device)


def test_what_it_was_made_of_stays_as_it_is(session: object) -> None:
    values = torch.ones(2, device=REMOTE)
    made = torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=REMOTE), values, (3,))
    made.mul_(10)
    made.add_(made)
    assert values.tolist() == [1.0, 1.0] and made.to_dense().tolist() == [20.0, 0.0, 20.0]
    matrix = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2)).to(REMOTE)
    turned = matrix.t()
    matrix.mul_(5)
    assert turned.to_dense().tolist() == [[0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=str)
def test_a_product_under_autocast_has_its_dtype(session: object, lower: torch.dtype | None) -> None:
    indices, values = torch.tensor([[0, 1, 2], [1, 0, 2]]), torch.tensor([1 / 3, 2.0, 3.0])
    found = []
    for device in ("cpu", REMOTE):
        matrix = torch.sparse_coo_tensor(indices, values, (3, 3)).to(device)
        with torch.autocast(device, dtype=lower, enabled=lower is not None):
            found.append((matrix @ torch.full((3, 2), 1 / 7, device=device)).cpu())
    torch.testing.assert_close(*found, rtol=0.02, atol=0.0)


def test_two_dtypes_are_not_multiplied_nor_written(session: object) -> None:
    with pytest.raises(RuntimeError, match="Can't convert result type Float to output Long in add operation"):
        torch.ones(3, dtype=torch.int64, device=REMOTE).sub_(entries(REMOTE, torch.ones(2)))
    matrix = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2)).to(REMOTE)
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        torch.mm(matrix, torch.ones(2, 2, dtype=torch.float64, device=REMOTE))


def test_a_program_may_make_it_and_let_it_go(session: object) -> None:
    def trained(device: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True).to(device)
        optimizer = SGD(table.parameters(), lr=0.1)

        def step(index: torch.Tensor) -> torch.Tensor:
            loss = table(index).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = step if device == "cpu" else dr.program(step)
        losses = [run(torch.tensor(batch, device=device)).item() for batch in BATCHES * 2]
        assert device == "cpu" or run.replays > 0  # type: ignore[attr-defined]
        return losses, table.weight.detach().cpu()

    here, there = trained("cpu"), trained(REMOTE)
    assert here[0] == pytest.approx(there[0], abs=1e-6)
    torch.testing.assert_close(here[1], there[1])


def test_a_default_device_moves_no_part_of_it(session: object) -> None:
    grad = of_rows("remote:1").grad
    with torch.device(REMOTE):
        for one, place in ((copy.deepcopy(grad), "remote:1"), (grad.cpu(), "cpu"), (grad * 2, "remote:1")):
            assert one.is_sparse and str(one.device) == place
        again = grad.new(grad._indices(), grad._values(), grad.shape)
        assert str(again.device) == "remote:1"
    assert grad.cpu().to_dense()[4].tolist() == of_rows("cpu").grad.to_dense()[4].tolist()
