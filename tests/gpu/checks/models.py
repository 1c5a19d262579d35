"""Checks 20 and 21: training, and who waits for whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import distruntime as dr
from box import Box
from listing import check


def _gpt2(dropout: float, quick: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers, width = (2, 64) if quick else (4, 256)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=4,
            vocab_size=1000,
            n_positions=128,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def _train(dropout: float, quick: bool, device: str, steps: int) -> list[float]:
    model = _gpt2(dropout, quick).to(device)
    tokens = torch.randint(0, 1000, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in dr.fetch(losses)]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _with(options: dict[str, bool], device: str, scaled: bool, steps: int = 10) -> list[float]:
    """Train a small network by AdamW with such options; with a scaler in float16 if `scaled`."""
    model = _network().to(device)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device, enabled=scaled, init_scale=256.0)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(steps):
        stepper.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=scaled):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(stepper)
        scaler.update()
        losses.append(loss.detach())
    return [loss.item() for loss in dr.fetch(losses)]


def _apart(here: list[float], there: list[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(here, there, strict=True))


@check(
    20,
    "training",
    does=(
        "trains a GPT-2 with dropout for 100 steps, and a network with foreach, fused and plain AdamW and "
        "float16"
    ),
    failure=(
        "losses differ from the same code without a worker, with the same seed. In the first step: "
        "dropout draws other numbers, look at worker/distruntime_worker/values/draws.py. Later: gradients or "
        "the optimizer; the rows without dropout tell which."
    ),
    seconds=90,
)
def training(box: Box) -> None:
    import importlib.util

    wrong = []
    adam: dict[str, dict[str, bool]] = {
        "a loop over the parameters": {"foreach": False, "fused": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    with box.session():
        for name, options in adam.items():
            for scaled in (False, True):
                if scaled and not box.cuda:
                    continue
                here = box.here(_with, options, box.local, scaled)
                apart = _apart(here, _with(options, "remote", scaled))
                what = f"AdamW, {name}{', float16 with a scaler' if scaled else ''}"
                box.saw(f"{what}: losses of 10 steps differ by {apart:.1e}")
                if apart > (1e-2 if scaled else 1e-4):
                    wrong.append(f"{what}: {apart:.1e}")
        if not box.cuda:
            box.leave_out("float16 with a scaler", "needs CUDA in this process")
        if importlib.util.find_spec("transformers") is None:
            box.leave_out("GPT-2", "needs the package transformers")
        else:
            # A device of another kind draws other numbers than this process.
            dropout = 0.1 if box.cuda or box.simulate_cuda else 0.0
            steps = 10 if box.quick else 100
            here = box.here(_train, dropout, box.quick, box.local, steps)
            there = _train(dropout, box.quick, "remote", steps)
            box.saw(
                f"GPT-2, dropout {dropout}: loss {there[0]:.4f} to {there[-1]:.4f}, here {here[0]:.4f} to "
                f"{here[-1]:.4f}"
            )
            if abs(here[0] - there[0]) > 1e-3:
                wrong.append(
                    f"GPT-2's first loss is {there[0]:.5f}, here {here[0]:.5f}: dropout draws differ"
                )
            elif _apart(here, there) > 5e-2:
                wrong.append(f"GPT-2's losses differ by {_apart(here, there):.1e} in {steps} steps")
    box.require(not wrong, "; ".join(wrong))


@check(
    21,
    "who waits for whom",
    does="trains GPT-2 124M in bfloat16 with few rounds, and compares the master's own time with a step's",
    failure=(
        "at 16 x 1024 tokens a step takes more than 1.1 times the local one. Where the master's own time is "
        "as long as the step, the GPU waits for the master; where it is shorter, something waits for the "
        "GPU: `dr.profiler.stalls()` names the lines, and `dr.nodes()` says what the worker does."
    ),
    seconds=100,
    needs=("transformers",),
)
def who_waits(box: Box) -> None:
    from benchmarks import gpu

    size = gpu.TINY if not box.cuda else gpu.QUICK
    if not box.cuda:
        box.leave_out(
            "the times", "need CUDA in this process: these are of a tiny model, to see that it runs"
        )
    with box.session():
        dr.profiler.stalls(reset=True)
        for figure in gpu.training(size):
            box.saw(f"{figure.name}: {figure.value:.2f} x, {figure.note}")
        box.saw(str(dr.profiler.stalls())[:1200] or "no line has waited for the worker")
    box.require(
        not box.cuda or figure.value < 1.1, f"{figure.name}: {figure.value:.2f} x, expected at most 1.1"
    )
