"""What issuing a call of each kind costs the thread that issues it, against `x + y`.

A model is made of calls of many kinds, and the dearest of them decide what a step costs. Thread time counts,
so neither the worker nor the sender of the log is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F

import distruntime as dr

from .harness import Figure, in_turn

# A call with one result may cost so many times `x + y`, each further result so much more.
_ONE, _SEVERAL, _FURTHER = 1.3, 2.5, 0.3

Calls = dict[str, tuple[float, Callable[[], object]]]


def calls(device: str) -> Calls:
    """Return the calls by name, each with its bar, on tensors of a device."""

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, device=device)

    still = torch.no_grad()
    x, y, q = ones(8, 16), ones(8, 16), ones(1, 2, 8, 8)
    g, w, b = (ones(*size).requires_grad_() for size in ((8, 16), (16, 16), (16,)))
    words, queries = ones(10, 16).requires_grad_(), ones(1, 2, 8, 8).requires_grad_()
    h, i, total = g * 1, torch.arange(8, device=device), ones(8, 16)
    mask = torch.ones(8, 16, dtype=torch.bool, device=device)
    norm, linear = torch.nn.LayerNorm(16).to(device), torch.nn.Linear(16, 16).to(device)
    row, weight, sequence = b.detach(), w.detach(), ones(2, 8, 16)
    many, number = [ones(4) for _ in range(8)], count()
    # A module and a node of autograd cost here, too, what they cost a local tensor.
    return {
        "x * 2.0": (_ONE, lambda: x * 2.0),
        "x > 0": (_ONE, lambda: x > 0),
        "x * k, k counts": (_ONE, lambda: x * next(number)),
        "i == k, k counts": (_ONE, lambda: i == next(number)),
        "x.sum()": (_ONE, lambda: x.sum()),
        "x.softmax(-1)": (_ONE, lambda: x.softmax(-1)),
        "x.clone()": (_ONE, lambda: x.clone()),
        "x.cumsum(0)": (_ONE, lambda: x.cumsum(0)),
        "x.triu()": (_ONE, lambda: x.triu()),
        "torch.where(mask, x, y)": (_ONE, lambda: torch.where(mask, x, y)),
        "torch.cat([x, y])": (_ONE, lambda: torch.cat([x, y])),
        "x.view(16, 8)": (_ONE, lambda: x.view(16, 8)),
        "x[0]": (_ONE, lambda: x[0]),
        "x[2:4]": (_ONE, lambda: x[2:4]),
        "x[:, None]": (_ONE, lambda: x[:, None]),
        "x.detach()": (_ONE, lambda: x.detach()),
        "row.expand(8, 16)": (_ONE, lambda: row.expand(8, 16)),
        "q.permute(0, 2, 1, 3)": (_ONE, lambda: q.permute(0, 2, 1, 3)),
        "x[i]": (_SEVERAL, lambda: x[i]),
        "x.add_(y)": (_ONE, lambda: total.add_(y)),
        "x.to(bfloat16)": (_SEVERAL, lambda: x.to(torch.bfloat16)),
        "g + y, with grad": (_SEVERAL, lambda: g + y),
        "h.transpose(0, 1), with grad": (_SEVERAL, lambda: h.transpose(0, 1)),
        "F.gelu, with grad": (_SEVERAL, lambda: F.gelu(g)),
        "g.mean(), with grad": (_SEVERAL, lambda: g.mean()),
        "F.linear, with grad": (_SEVERAL, lambda: F.linear(g, w, b)),
        "nn.Linear": (_SEVERAL, lambda: linear(x)),
        "F.embedding, with grad": (_SEVERAL, lambda: F.embedding(i, words)),
        "x.chunk(2, 1)": (_SEVERAL + _FURTHER, lambda: x.chunk(2, 1)),
        "h.split(4, 1), with grad": (_SEVERAL + 3 * _FURTHER, lambda: h.split(4, 1)),
        "x.topk(2)": (_SEVERAL + _FURTHER, lambda: x.topk(2)),
        "x.max(0)": (_SEVERAL + _FURTHER, lambda: x.max(0)),
        "x.unbind(), 8 rows": (_SEVERAL + 7 * _FURTHER, lambda: x.unbind()),
        "nn.LayerNorm, with grad": (_SEVERAL + 2 * _FURTHER, lambda: norm(g)),
        "attention": (_SEVERAL + _FURTHER, lambda: F.scaled_dot_product_attention(q, q, q)),
        "attention, with grad": (
            _SEVERAL + _FURTHER,
            lambda: F.scaled_dot_product_attention(queries, queries, queries, is_causal=True),
        ),
        "F.dropout, with grad": (_SEVERAL + _FURTHER, lambda: F.dropout(g, 0.1)),
        "F.cross_entropy, with grad": (_SEVERAL + _FURTHER, lambda: F.cross_entropy(g, i)),
        "_foreach_add_ of 8": (_SEVERAL, lambda: torch._foreach_add_(many, 1.0)),
        "_foreach_mul of 8": (_SEVERAL + 7 * _FURTHER, lambda: torch._foreach_mul(many, 2.0)),
        "q @ q, 4 dimensions, no_grad": (_SEVERAL, still(lambda: q @ q)),
        "einsum, no_grad": (_SEVERAL, still(lambda: torch.einsum("ij,kj->ik", x, y))),
        "q @ q, 4 dimensions, with grad": (_SEVERAL, lambda: queries @ queries),
        "F.linear of 3 dimensions, no_grad": (_SEVERAL, still(lambda: F.linear(sequence, weight, row))),
        "torch.zeros(8)": (_SEVERAL, lambda: torch.zeros(8, device=device)),
        "torch.full((), 2.0)": (_SEVERAL, lambda: torch.full((), 2.0, device=device)),
        "torch.full((8,), k), k counts": (_SEVERAL, lambda: torch.full((8,), next(number), device=device)),
        "torch.arange(8)": (_SEVERAL, lambda: torch.arange(8, device=device)),
        "torch.randn(8)": (_SEVERAL, lambda: torch.randn(8, device=device)),
        "torch.empty(8)": (_SEVERAL, lambda: torch.empty(8, device=device)),
        "torch.zeros_like(x)": (_SEVERAL, lambda: torch.zeros_like(x)),
        "x.new_zeros(3)": (_SEVERAL, lambda: x.new_zeros(3)),
        "torch.tensor(2.0)": (_SEVERAL, lambda: torch.tensor(2.0, device=device)),
        "torch.tensor([1, 2])": (_SEVERAL, lambda: torch.tensor([1, 2], device=device)),
        "torch.ones(4).to(device)": (_SEVERAL, lambda: torch.ones(4).to(device)),
    }


def _cost(call: Callable[[], object], count: int) -> float:
    """Return the thread's seconds of one call."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


def measure(quick: bool) -> list[Figure]:
    """Return a figure for each kind of call; one worker, started here."""
    # The two take turns every fraction of a millisecond: a core's neighbour changes its speed by the half.
    each, rounds = 25, 12 if quick else 60
    with dr.init_master_worker(world_size=1, quiet=True):
        here, there = calls("cpu"), calls("remote")
        x, y = torch.ones(8, 16, device="remote"), torch.ones(8, 16, device="remote")

        def addition() -> object:
            return x + y

        figures = []
        for name, (bar, call) in there.items():
            for known in (call, here[name][1], addition):
                _cost(known, 10)
            dr.synchronize()
            ratio, ours, one = in_turn(partial(_one, call, each), partial(_cost, addition, each), rounds)
            local = min(_cost(here[name][1], each) for _ in range(rounds))
            note = f"{ours * 1e6:.1f} us, x + y {one * 1e6:.1f} us, local {local * 1e6:.1f} us"
            figures.append(Figure(f"{name} / x + y", ratio, "x", bar, note))
    return figures


def _one(call: Callable[[], object], count: int) -> float:
    # The window would fill.
    dr.synchronize()
    return _cost(call, count)
