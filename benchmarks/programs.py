"""Steps recorded as programs, against the same steps here: straight-line code on a worker, and Inductor's.

Fifty steps are under way at once, and their wall time counts, with the wait for the last one. The worker's
kernels have one thread, and so have those here. Each step takes one of four batches.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import distruntime as dr

from . import floors
from .harness import Figure, in_turn, seconds

# So many steps are under way at once.
UNDER_WAY = 50
_PATCHES = 500
# So many steps after the compiler has done are compared with those here, too.
_ALIKE = 12
# Inductor is given so many seconds.
_COMPILING = 300.0

Step = Callable[..., torch.Tensor]
# The function of a step, and its batches.
Training = tuple[Step, Sequence[tuple[torch.Tensor, ...]]]


def mlp(device: str) -> Training:
    """Return the step of `benchmarks.training_step`, with four batches."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).to(device)
    batches = [(torch.randn(64, 256).to(device), torch.randint(0, 10, (64,)).to(device)) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batches


def _gpt2(device: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=128,
        vocab_size=1000,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(device)


def gpt2(device: str) -> Training:
    """Return a step of a small GPT-2 of transformers with the fused AdamW, and four batches of 4 x 64."""
    model: Any = _gpt2(device)
    batches = [(torch.randint(0, 1000, (4, 64)).to(device),) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, batches


def _under_way(step: Step, batches: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Return the seconds of a step, of 50 of which only the last one is read."""

    def run() -> None:
        for k in range(UNDER_WAY):
            loss = step(*batches[k % len(batches)])
        loss.item()

    return seconds(run) / UNDER_WAY


def _read(step: Step, batches: Sequence[tuple[torch.Tensor, ...]], count: int = UNDER_WAY) -> float:
    """Return the seconds of a step whose result is read before the next one."""

    def run() -> None:
        for k in range(count):
            step(*batches[k % len(batches)]).item()

    return seconds(run) / count


def _trained(
    name: str, make: Callable[[str], Training], bars: tuple[float, float], rounds: int
) -> list[Figure]:
    figures = []
    for compile, bar in zip((None, "inductor"), bars):
        (here, near), (there, far) = make("cpu"), make("remote")
        program = dr.program(there, compile=compile)
        # Both sides make the same steps from the same start, until the compiler has done, and twelve more.
        apart, alike, taken, deadline = 0.0, 0, 0, time.monotonic() + _COMPILING
        while alike < _ALIKE:
            assert time.monotonic() < deadline, (program.why, program.compiled)
            batch, taken = taken % 4, taken + 1
            apart = max(apart, abs(here(*near[batch]).item() - program(*far[batch]).item()))
            alike += program.replays > 0 and program.compiled != "compiling"
        how = "straight-line" if compile is None else str(program.compiled)
        ratio, ours, theirs = in_turn(
            partial(_under_way, program, far), partial(_under_way, here, near), rounds
        )
        note = f"{ours * 1e3:.2f} ms, local {theirs * 1e3:.2f} ms; losses differ by {apart:.0e}"
        figures.append(Figure(f"{name} step as a program, {how} / local", ratio, "x", bar, note))
    return figures


def patched(device: str) -> Training:
    """Return a forward pass with one activation patched, of which one number is read, and eight inputs."""
    model: Any = _gpt2(device).eval()
    batches = [(torch.randint(0, 1000, (1, 32)).to(device),) for _ in range(8)]
    patch = torch.zeros(128).to(device)

    def replaced(_module: object, _args: object, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        first = torch.cat([first[:, :4], patch.expand(1, 1, 128), first[:, 5:]], dim=1)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    model.transformer.h[0].register_forward_hook(replaced)

    @torch.no_grad()
    def score(tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(input_ids=tokens).logits
        return scores[0, -1, 7]

    return score, batches


def _asked(make: Callable[[str], Training]) -> floors.Answer:
    """Return what answers with the number that a step here gives for a batch."""
    step, batches = make("cpu")
    return lambda which: struct.pack("d", step(*batches[which[0]]).item())


def _reading(what: str, make: Callable[[str], Training], count: int, rounds: int, bar: float) -> Figure:
    """Compare steps of which each reads one number, with the same steps that another process makes.

    It makes one for each message on a bare pipe. No reading does better, since each one waits for a process.
    """
    (here, near), (there, far) = make("cpu"), make("remote")
    program = dr.program(there)
    for k in range(4):
        assert abs(program(*far[k]).item() - here(*near[k]).item()) < 1e-5
    assert program.replays, program.why
    with floors.pipe(partial(_asked, make)) as pipe:

        def asked() -> float:
            def run() -> None:
                for k in range(count):
                    pipe.ask(bytes([k % len(near)]))

            return seconds(run) / count

        asked(), _read(program, far, count)
        ratio, ours, theirs = in_turn(lambda: _read(program, far, count), asked, rounds)
    note = f"{ours * 1e3:.2f} ms, over the pipe {theirs * 1e3:.2f} ms"
    return Figure(f"{what} as a program / the same over a bare pipe", ratio, "x", bar, note)


def measure(quick: bool) -> list[Figure]:
    """Return the figures of steps with straight-line code and with Inductor, and of reads beside them."""
    rounds, few, patches = (3, 3, _PATCHES // 10) if quick else (15, 7, _PATCHES)
    with dr.init_master_worker(world_size=1, quiet=True):
        return [
            *_trained("MLP", mlp, (0.95, 0.75), rounds),
            *_trained("GPT-2", gpt2, (0.9, 0.75), rounds),
            _reading("MLP step, the loss read each time,", mlp, UNDER_WAY, rounds, 1.2),
            _reading("patched forward pass, a number of each read,", patched, patches, few, 1.2),
        ]
