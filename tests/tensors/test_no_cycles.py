"""With the garbage collector off, everything that is let go of is freed on the worker: a reference cycle here
is memory there.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import distruntime as dr
from distruntime.session.session import Session
from distruntime.wire.messages import AskMemory


def _held(session: Session) -> int:
    """Return how many values the worker of node 0 holds, after everything issued so far, frees included."""
    dr.synchronize(0)
    asked = session.ask(session.nodes[0], AskMemory)
    assert session.result(asked, 30)
    return int(asked.value[0])


def _uploads(x: torch.Tensor) -> None:
    torch.randn(7).to("remote")
    torch.randn(1 << 18).to("remote").cpu()
    torch.randn(5).dist_send()  # type: ignore[attr-defined]
    torch.tensor([1.0, 2.0], device="remote")
    x + torch.tensor(2.0)
    x[torch.tensor([0, 1])]


def _many_results(x: torch.Tensor) -> None:
    x.max(0), x.split(1), x.unbind(0), torch.linalg.svd(x), x.sort(), torch.var_mean(x)
    torch._foreach_add([x, x], 1.0)


def _in_place(x: torch.Tensor) -> None:
    y = x.clone()
    y.add_(1).t_().resize_(2, 2).zero_()
    torch.add(x, x, out=torch.empty(0, device="remote"))
    torch._foreach_mul_([y, x.clone()], 2.0)
    y[0] = 5.0
    y.data = x


def _depends_on_data(x: torch.Tensor) -> None:
    x.nonzero(), x[x > 0], torch.unique(x), torch.equal(x, x), x.tolist(), bool((x > 0).all())


def _training(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2)).to(
        "remote"
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    copy.deepcopy(model).load_state_dict(model.state_dict())
    model.double().cpu()


def _composites(x: torch.Tensor) -> None:
    q = torch.randn(1, 2, 4, 8, device="remote", requires_grad=True)
    nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    nn.LSTM(3, 4).to("remote")(x[None])[0].sum().backward()


def _reads(x: torch.Tensor) -> None:
    future = dr.fetch_async({"a": x * 2, "b": [x + 1, x + 2]})
    future.result()
    dr.fetch(nn.Linear(2, 2).to("remote").state_dict())
    repr(x * 3), f"{x.sum():.2f}", dr.nodes()


def _errors(x: torch.Tensor) -> None:
    for wrong in (
        lambda: x @ torch.ones(7, 7, device="remote"),
        lambda: x + torch.ones(3, 3),
        lambda: x.numpy(),
        lambda: x.to("remote:99"),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    with pytest.raises(IndexError):
        (x[torch.tensor([99])] + 1).cpu()


@pytest.mark.parametrize(
    "use",
    [_uploads, _many_results, _in_place, _depends_on_data, _training, _composites, _reads, _errors],
    ids=lambda use: use.__name__[1:],
)
def test_nothing_is_held(session: Session, use: Callable[[Any], None]) -> None:
    x = torch.randn(3, 3, device="remote")
    use(x)  # what is cached on first use is not what is looked for
    gc.collect()
    gc.disable()
    try:
        before = _held(session)
        for _ in range(3):
            use(x)
        assert _held(session) == before
    finally:
        gc.enable()
