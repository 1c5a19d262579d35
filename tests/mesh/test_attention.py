"""Attention over a sequence that a line cuts: values and gradients are those of the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
)
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module

import distruntime as dr
from meshes import make, two_workers

__all__ = ["two_workers"]


def cut(x: torch.Tensor, members: int, balanced: bool) -> list[torch.Tensor]:
    """Return each member's part of the positions."""
    if not balanced:
        return list(x.chunk(members, -2))
    pieces = x.chunk(2 * members, -2)
    return [torch.cat([pieces[k], pieces[-1 - k]], -2) for k in range(members)]


def joined(parts: Sequence[torch.Tensor], balanced: bool) -> torch.Tensor:
    if not balanced:
        return torch.cat(list(parts), -2)
    halves = [part.chunk(2, -2) for part in parts]
    return torch.cat([*(half[0] for half in halves), *(half[1] for half in halves[::-1])], -2)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_values_and_gradients(
    two_workers: None, members: int, causal: bool, balanced: bool, heads: tuple[int, int]
) -> None:
    mesh = make(str(members))
    many, few = heads
    wholes = [
        torch.randn(2, count, 16, width, dtype=torch.float64, requires_grad=True)
        for count, width in ((many, 6), (few, 6), (few, 5))
    ]
    parts = [dr.from_shards(cut(x.detach(), members, balanced), mesh).requires_grad_() for x in wholes]
    options = {"is_causal": causal, "enable_gqa": many != few, "scale": None if members == 2 else 0.7}
    out = dr.lines.attention(mesh.lines(), *parts, balanced=balanced, **options)  # type: ignore[arg-type]
    wanted = F.scaled_dot_product_attention(*wholes, **options)  # type: ignore[arg-type]
    (out**2).sum().backward()
    (wanted**2).sum().backward()
    found = joined(dr.shards(out.detach()), balanced)
    torch.testing.assert_close(found, wanted.detach(), atol=1e-12, rtol=1e-12)
    for part, whole in zip(parts, wholes):
        assert part.grad is not None
        torch.testing.assert_close(joined(dr.shards(part.grad), balanced), whole.grad, atol=1e-12, rtol=1e-12)


def test_each_line_has_a_sequence_of_its_own(two_workers: None) -> None:
    mesh = make("2x2")
    wholes = [torch.randn(2, 3, 1, 8, 4) for _ in "qkv"]
    parts = []
    for of_lines in wholes:
        rows = [cut(x, 2, True) for x in of_lines]
        parts.append(dr.from_shards([rows[k][rank] for k, rank in mesh.coordinates()], mesh))
    out = dr.shards(dr.lines.attention(mesh.lines(1), *parts, is_causal=True, balanced=True))
    for k in (0, 1):
        wanted = F.scaled_dot_product_attention(*(x[k] for x in wholes), is_causal=True)
        torch.testing.assert_close(joined(out[2 * k : 2 * k + 2], True), wanted)


def test_half_precision_is_summed_up_in_single(two_workers: None) -> None:
    mesh = make("2")
    wholes = [torch.randn(1, 2, 32, 8, dtype=torch.bfloat16) for _ in "qkv"]
    parts = [dr.from_shards(cut(x, 2, True), mesh).requires_grad_() for x in wholes]
    out = dr.lines.attention(mesh.lines(), *parts, is_causal=True, balanced=True)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and parts[0].grad is not None
    wanted = F.scaled_dot_product_attention(*(x.float() for x in wholes), is_causal=True)
    torch.testing.assert_close(joined(dr.shards(out.detach()), True).float(), wanted, atol=2e-2, rtol=2e-2)


def test_in_a_program(two_workers: None) -> None:
    mesh = make("2")
    lines = mesh.lines()

    @dr.program
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dr.lines.attention(lines, q, k, v, is_causal=True, balanced=True)
        (grad,) = torch.autograd.grad(out.square().sum(), k)
        return grad

    for _ in range(4):
        wholes = [torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
        parts = [dr.from_shards(cut(x.detach(), 2, True), mesh).requires_grad_() for x in wholes]
        found = joined(dr.shards(step(*parts)), True)
        F.scaled_dot_product_attention(*wholes, is_causal=True).square().sum().backward()
        torch.testing.assert_close(found, wholes[1].grad, atol=1e-12, rtol=1e-12)
    assert step.replays and not step.why


def test_what_is_refused(two_workers: None) -> None:
    mesh = make("2")
    lines = mesh.lines()
    q, odd, wide = (torch.randn(1, 2, *shape).to(mesh.device) for shape in ((4, 6), (3, 6), (4, 5)))
    with pytest.raises(dr.errors.UsageError, match=r"\(\.\.\., heads, positions, features\), got"):
        dr.lines.attention(lines, q, wide, wide)
    with pytest.raises(dr.errors.UsageError, match="as many keys as queries"):
        dr.lines.attention(lines, q, odd, odd, is_causal=True)
    with pytest.raises(dr.errors.UsageError, match="3 positions are odd"):
        dr.lines.attention(lines, odd, odd, odd, is_causal=True, balanced=True)
    with pytest.raises(dr.errors.UsageError, match="2 heads of queries and 1 of keys"):
        dr.lines.attention(lines, q, q[:, :1], q[:, :1])
    with pytest.raises(dr.errors.PlacementError):
        dr.lines.attention(lines, q, torch.randn(1, 2, 4, 6), q)


# -- torch's own context parallelism -------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Model(nn.Module):
    """A small decoder: the positions' embeddings are a buffer, which is cut with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
        self.double()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + positions
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["2", "4", "2x2"])
def test_torchs_context_parallel_trains_as_serial(two_workers: None, name: str) -> None:
    mesh = make(name)
    along = mesh["tp"] if name == "2x2" else mesh
    torch.manual_seed(0)
    serial = Model()
    model = copy.deepcopy(serial).to(mesh.device)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (serial, model))
    text, places = torch.randint(11, (2, 17)), torch.randn(16, 8, dtype=torch.float64)
    for _ in range(3):
        a.zero_grad()
        wanted = F.cross_entropy(serial(text[:, :-1], places).mT, text[:, 1:])
        wanted.backward()
        a.step()
        b.zero_grad()
        given = [t.to(mesh.device) for t in (text[:, :-1], text[:, 1:], places)]
        with context_parallel(along, buffers=given, buffer_seq_dims=[1, 1, 0]):
            assert given[0].shape == (2, 16 // along.size())
            logits = model(given[0], given[2])
            loss = F.cross_entropy(logits.mT, given[1])
            loss.backward()
            (whole,) = context_parallel_unshard(along, [logits.detach()], [1])
        assert torch.equal(given[0].cpu(), text[:, :-1])
        for p in model.parameters():
            p.grad = dr.lines.all_reduce(mesh.lines(), p.grad, "avg")  # type: ignore[arg-type]
        b.step()
        mean = dr.lines.all_reduce(along.lines(), loss.detach(), "avg")
        torch.testing.assert_close(mean.cpu(), wanted.detach(), atol=1e-12, rtol=1e-12)
    assert whole.shape == (2, 16, 11)
    for p, q in zip(model.parameters(), serial.parameters()):
        for mine in dr.shards(p.detach()):
            torch.testing.assert_close(mine, q.detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_plan_for_a_module(two_workers: None, balanced: bool, causal: bool) -> None:
    mesh = make("4")
    wholes = [torch.randn(1, 2, 16, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    order = _HeadTailLoadBalancer(16, 4, mesh.device) if balanced else None
    parts = _context_parallel_shard(mesh, [x.detach().to(mesh.device) for x in wholes], [2] * 3, order)
    parts = [part.requires_grad_() for part in parts]
    plan = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
    module = parallelize_module(Attention(), mesh, plan)
    _enable_context_parallel_dispatcher()
    try:
        out = module(*parts, causal)
    finally:
        _disable_context_parallel_dispatcher()
    (out**2).sum().backward()
    wanted = F.scaled_dot_product_attention(*wholes, is_causal=causal)
    (wanted**2).sum().backward()
    torch.testing.assert_close(joined(dr.shards(out.detach()), balanced), wanted.detach())
    for part, whole in zip(parts, wholes):
        torch.testing.assert_close(joined(dr.shards(part.grad), balanced), whole.grad)


def test_what_context_parallel_refuses(two_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make("2")
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(dr.errors.PlacementError, match=r"cuts its buffers in place.*\n?.* is on cpu"):
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            pass
    there = x.to(mesh.device)
    with context_parallel(mesh, buffers=[there], buffer_seq_dims=[2]):
        with pytest.raises(dr.errors.NotSupportedError, match=r"no mask and no dropout, got dropout_p=0\.5"):
            F.scaled_dot_product_attention(there, there, there, dropout_p=0.5, is_causal=True)
    # A later torch may have moved what decides; each part alone would be a wrong value.
    with monkeypatch.context() as patch, pytest.raises(dr.errors.NotSupportedError, match="not the one"):
        patch.delattr(_attention, "_sdpa_handler")
        context_parallel(mesh, buffers=[there], buffer_seq_dims=[2])
    # Elsewhere torch's own function is as it was.
    torch.testing.assert_close(
        F.scaled_dot_product_attention(there, there, there, is_causal=True).cpu(),
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
    )
