"""A graph that `torch.compile` traces under autocast, or that enters it, has the casts of the same code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from agree import REMOTE
from dynamo import DYNAMO_WARNS, TORCH

Compiler = Callable[..., Any]
BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = DYNAMO_WARNS


@pytest.fixture(autouse=True)
def _fresh(session: object) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _x() -> torch.Tensor:
    return torch.linspace(-2, 2, 40).view(5, 8).to(REMOTE)


class Nested(nn.Module):
    """A region, within it one that is off, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(REMOTE, dtype=BF16):
            y = self.a(x)
            with torch.autocast(REMOTE, enabled=False):
                z = self.b(y.float())
            with torch.autocast(REMOTE, dtype=FP16):
                w = x @ x.T
        return z + w.float().sum(1, keepdim=True)


class Listed(nn.Module):
    """Operators of each kind that autocast lists, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        half = y.to(BF16)
        found = [
            *(torch.cat([y, x], 1), torch.stack([y.float(), x]), torch.einsum("ij,kj->ik", x, x)),
            *(torch.softmax(half, -1), half.cumsum(0), half.norm(), half.prod(1), half.exp(), half.pow(2)),
            *(F.cosine_similarity(y, x), torch.dist(y.float(), x), torch.cdist(x, x), half + half),
            *(F.layer_norm(half, (8,)), torch.addcmul(x, y.float(), x), F.smooth_l1_loss(y.float(), x)),
            F.scaled_dot_product_attention(x[None, None], y[None, None].float(), x[None, None]),
        ]
        return sum((one.float().mean() for one in found), torch.zeros((), device=x.device))


class Asks(nn.Module):
    """Its Python looks at what autocast is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(REMOTE):
            return (x @ self.w).to(torch.get_autocast_dtype(REMOTE)) * 2
        return x @ self.w


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda y: self.b(self.a(y).relu()), x, use_reentrant=False)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.over(x[:, None])).relu()
        return found


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x[None])
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
    "nested": Nested,
    "each kind of operator": Listed,
    "what it asks": Asks,
    "checkpointed": Checkpointed,
    "convolved": Convolved,
    "an encoder's layer": Attends,
}


def _trained(compiler: Compiler, name: str, dtype: torch.dtype, around: bool) -> list[torch.Tensor]:
    """Return what a model gives, and its gradients, in calls with and without autocast around it."""
    torch.manual_seed(1)
    model = MODELS[name]().to(REMOTE)
    step, found, x = compiler(model), [], _x()
    for enabled in (around, around, around, around, not around, around):
        model.zero_grad()
        with torch.autocast(REMOTE, dtype=dtype, enabled=enabled):
            out = step(x)
            loss = F.mse_loss(out, torch.zeros_like(out))
        loss.backward()
        assert loss.isfinite()
        found += [out.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return dr.fetch(found)


def _plain(function: Any) -> Any:
    return function


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="distruntime")


def _agree(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert [t.dtype for t in one] == [t.dtype for t in other]
    assert [k for k, (a, b) in enumerate(zip(one, other)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_has_the_same_casts(name: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        # Nothing runs operator by operator.
        warnings.simplefilter("error")
        found = _trained(_compiled, name, dtype, around=name != "nested")
    _agree(found, _trained(_plain, name, dtype, around=name != "nested"))
    assert any(one.replays for one in dr.profiler.compiled_graphs())


def test_the_workers_compiler_keeps_the_casts() -> None:
    found = _trained(torch.compile, "layers", BF16, around=True)
    expected = _trained(_plain, "layers", BF16, around=True)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_too(mode: Callable[[], Any]) -> None:
    model = MODELS["layers"]().to(REMOTE)
    step = _compiled(model)
    for dtype in (BF16, BF16, FP16, FP16, FP16, None, BF16):
        with mode(), torch.autocast(REMOTE, dtype=dtype, enabled=dtype is not None):
            one, other = step(_x()), model(_x())
        assert one.dtype == other.dtype == (dtype or torch.float32)
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.skipif(
    TORCH < (2, 13), reason="torch's dispatcher fails by an assertion of its own for this kernel and a fake"
)
def test_a_kernel_that_is_lowered_from_within_is_lowered_in_a_graph() -> None:
    model = Attends().to(REMOTE).eval()
    with torch.inference_mode(), torch.autocast(REMOTE, dtype=BF16):
        one, other = _compiled(model)(_x()), model(_x())
    assert one.dtype == other.dtype == BF16
    # The whole layer is lowered, and the kernel lowers its products alone.
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0.05, atol=0.1)


def test_a_scaler_skips_the_same_steps() -> None:
    def losses(compiler: Compiler) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = MODELS["layers"]().to(REMOTE)
        step, found = compiler(model), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        # The first scales overflow in 16 bits.
        scaler = torch.amp.GradScaler(REMOTE, init_scale=2.0**24)
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast(REMOTE, dtype=FP16):
                loss = step(_x()).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found += [loss.detach(), torch.tensor(scaler.get_scale())]
        return dr.fetch(found)

    _agree(losses(_compiled), losses(_plain))


def test_a_backward_pass_under_autocast_runs_in_the_dtypes_of_its_graph() -> None:
    """torch's documentation asks for a backward pass outside of autocast."""
    model = MODELS["layers"]().to(REMOTE)
    step, found = _compiled(model), []
    for enabled in (True, True, True, False, False):
        model.zero_grad()
        loss = step(_x()).sum()
        with torch.autocast(REMOTE, dtype=BF16, enabled=enabled):
            loss.backward()
        found.append(dr.fetch([p.grad for p in model.parameters() if p.grad is not None]))
    for other in found[1:]:
        _agree(found[0], other)


@pytest.mark.filterwarnings("ignore:a graph that torch.compile has traced runs operator by operator")
def test_a_backward_graph_that_runs_plainly_does_so_too() -> None:
    """A gradient of a number of this process comes here, so nothing of its backward graph is recorded."""
    step, found, w = _compiled(lambda x, w, rate: (x @ w * rate).sum()), [], torch.randn(8, 8)
    for enabled in (True, True, True, False, False):
        x, there, rate = _x(), w.to(REMOTE).requires_grad_(), torch.tensor(0.3, requires_grad=True)
        loss = step(x, there, rate)
        with torch.autocast(REMOTE, dtype=BF16, enabled=enabled):
            loss.backward()
        assert there.grad is not None and rate.grad is not None
        found.append([there.grad.cpu(), rate.grad])
    for other in found[1:]:
        _agree(found[0], other)


def test_local_tensors_of_a_graph_are_left_alone() -> None:
    step = _compiled(lambda x: (x @ x.T, torch.ones(3, 3) @ torch.ones(3, 3)))
    with torch.autocast(REMOTE, dtype=BF16):
        there, here = step(_x())
    assert (there.dtype, here.dtype) == (BF16, torch.float32)


def test_a_graph_chooses_the_kernel_of_attention_that_a_call_would() -> None:
    """No call has asked for these sizes before, so nothing remembers what torch chose."""
    q = torch.randn(2, 3, 37, 12).to(REMOTE)
    found = _compiled(lambda x: F.scaled_dot_product_attention(x, x, x))(q)
    assert torch.equal(found.cpu(), F.scaled_dot_product_attention(q, q, q).cpu())
