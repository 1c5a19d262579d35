"""Check 26: a training step as a program, as straight-line code and as a CUDA graph."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distruntime as dr
from box import Box
from listing import check

WAYS = ("eager", "a program", "cudagraphs")


def _made(way: str, place: dr.types.Place, width: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 10))
    model = model.to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if way == "eager":
        return model, step
    return model, dr.program(step, compile="cudagraphs" if way == "cudagraphs" else None)


@check(
    26,
    "programs",
    does="trains a network with dropout 40 steps as it is, as a program, and as a CUDA graph, and compares",
    failure=(
        "values differ: the graph reads other memory than the step does, or draws other numbers. "
        '"no CUDA graph" with a reason: what it says could not be captured. Look at '
        "worker/distruntime_worker/programs/cuda_graphs.py."
    ),
    seconds=60,
)
def programs(box: Box) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    width = 64 if box.quick else 1024
    with box.session() as places, warnings.catch_warnings():
        # Without CUDA it warns that there is no graph.
        warnings.simplefilter("ignore")
        draw = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(n, width, generator=draw), torch.randint(0, 10, (n,), generator=draw))
            for n in (64, 64, 64, 48)
        ]
        batches = [(x.to(places[0]), y.to(places[0])) for x, y in data]
        for way in WAYS:
            model, step = _made(way, places[0], width)
            dr.manual_seed(5)
            losses = [step(*batches[k % 4]) for k in range(40)]
            found[way] = dr.fetch([*losses, *model.parameters()])
            began = time.perf_counter()
            for _ in range(100):
                step(*batches[0])
            dr.synchronize()
            box.saw(f"{way}: {(time.perf_counter() - began) * 10:.3f} ms a step")
            if way != "eager":
                box.saw(f"{way}: {step.replays} replays, {step.why or 'the last call too'}; {step.compiled}")
                box.require(step.replays > 100, f"{way} was recorded again and again: {step.why}")
        for way in WAYS[1:]:
            worst = max(
                ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
                for a, b in zip(found["eager"], found[way], strict=True)
            )
            box.saw(f"{way}: differs from eager by {worst:.1e} of the largest number at most")
            box.require(worst <= 1e-4, f"{way} differs from eager by {worst:.1e}")
        wanted = "cudagraphs" if box.cuda else "no CUDA graph"
        box.require(step.compiled.startswith(wanted), f"the program runs as {step.compiled!r}")
