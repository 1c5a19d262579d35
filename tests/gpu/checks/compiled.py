"""Check 28: `torch.compile` with the backend "distruntime", plain, by Inductor and as CUDA graphs."""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from box import Box, until
from listing import check

WAYS: tuple[tuple[str, dict[str, str] | None], ...] = (
    ("compiled", None),
    ("inductor", {"compile": "inductor"}),
    ("cudagraphs", {"compile": "cudagraphs"}),
)
STEPS = 60


class _Block(nn.Module):
    """A layer of a transformer, with attention that a GPU has fused kernels for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, width // 4).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(found.reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


def _trained(box: Box, way: str, options: dict[str, str] | None, place: dr.types.Place) -> list[torch.Tensor]:
    """Train a model for some steps; return its losses, with a draw behind each step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    width = 64 if box.quick else 256
    model = nn.Sequential(_Block(width), _Block(width)).to(place)
    run: Any = model
    if way != "op by op":
        run = torch.compile(model, backend="distruntime", **({"options": options} if options else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 32, width, generator=torch.Generator().manual_seed(1)).to(place)
    dr.manual_seed(5)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (run(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    kept = []
    for _ in range(STEPS):
        # A worker that compiles beside these steps must leave the generator alone.
        kept += [step(), torch.rand(2, device=place)]
    found = dr.fetch(kept)
    if way == "inductor":
        # The next steps are not to be measured beside a compiler.
        until(
            lambda: not any(one.compiled == "compiling" for one in dr.profiler.compiled_graphs()),
            600,
            "it is compiled",
        )
        # Inductor tries several forms of a kernel when it first runs.
        step(), step()
        dr.synchronize()
    if way != "op by op":
        graphs = [f"{one.name}: {one.compiled or way}" for one in dr.profiler.compiled_graphs()]
        box.saw(f"{way}: {', '.join(graphs)}")
        if way == "cudagraphs" and box.cuda:
            # Its attention leaves a seed for the backward pass, on the CPU until the forward pass is a graph.
            box.require(all(graph.endswith(": cudagraphs") for graph in graphs), f"no CUDA graph: {graphs}")
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    dr.synchronize()
    box.saw(f"{way}: {(time.perf_counter() - began) / STEPS * 1e3:.3f} ms a step")
    return found


def _kept(options: dict[str, str] | None, place: dr.types.Place) -> list[torch.Tensor]:
    """Return what functions give that are handed their own results, under autocast, and many of them kept."""
    torch.compiler.reset()
    draw = torch.Generator().manual_seed(3)
    start, weight, narrow = (
        torch.randn(n, 64, generator=draw).div(8).to(place).requires_grad_(grad)
        for n, grad in ((32, False), (64, True), (64, True))
    )

    def step(h: torch.Tensor) -> torch.Tensor:
        # Its argument dies with the call: a worker takes it out of its hands, and a graph must not.
        return torch.tanh(h @ weight) + h / 2

    def both(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("remote", dtype=torch.bfloat16):
            wide = h @ weight
        return wide, wide.float() @ narrow

    run: list[Any] = [step, both]
    if options is not None:
        run = [torch.compile(one, backend="distruntime", options=options) for one in run]
    found = []
    for k in range(30):
        h = start * (k + 1)
        for _ in range(4):
            h = run[0](h)
        wide, out = run[1](h.detach())
        (wide.float().sum() + out.square().sum()).backward()
        # A graph's next replay writes where this result was.
        found += [h.detach(), wide.detach(), out.detach()]
    for w in (weight, narrow):
        assert w.grad is not None
        found.append(w.grad)
    return dr.fetch(found)


@check(
    28,
    "torch.compile",
    does=f"trains a transformer {STEPS} steps by torch.compile: by our backend, Inductor, CUDA graphs",
    failure=(
        "values differ: the graph computes something else than its operators do. Draws differ: what compiles "
        "beside the steps has set the generator (worker/distruntime_worker/machine/random_states.py). "
        "Otherwise look at distruntime/compiled/."
    ),
    seconds=150,
)
def compiled(box: Box) -> None:
    with box.session() as places, warnings.catch_warnings():
        # Without CUDA it warns that there is no graph.
        warnings.simplefilter("ignore")
        plain = _trained(box, "op by op", None, places[0])
        for way, options in WAYS:
            found = _trained(box, way, options, places[0])
            same = all(torch.equal(a, b) for a, b in zip(plain[1::2], found[1::2], strict=True))
            box.require(same, f"{way}: draws beside the steps differ")
            worst = max(((a - b).abs() / a.abs()).item() for a, b in zip(plain[::2], found[::2], strict=True))
            box.saw(f"{way}: losses differ by {worst:.1e} at most")
            box.require(worst <= 1e-2, f"{way}: losses differ by {worst:.1e}")
        plain = _kept(None, places[0])
        for way, options in WAYS:
            found = _kept(options or {}, places[0])
            types = [a.dtype == b.dtype for a, b in zip(plain, found, strict=True)]
            box.require(all(types), f"{way}: results under autocast have other dtypes")
            worst = max(
                ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(plain, found, strict=True)
            )
            box.saw(f"{way}: results that are handed on and kept differ by {worst:.1e} at most")
            box.require(worst <= 2e-2, f"{way}: results that are handed on and kept differ by {worst:.1e}")
