"""A training step of a 3-layer MLP (batch 64, hidden 256) with autograd and SGD, op by op on a worker,
against the same step here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch

import distruntime as dr

from . import floors
from .harness import Figure, in_turn, seconds

STEPS = 200
_SETTLED = 150


def stepper(device: str) -> Callable[[], torch.Tensor]:
    """Return a function that makes one step and returns the loss, on `device`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    ).to(device)
    x, y = torch.randn(64, 256).to(device), torch.randint(0, 10, (64,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _asked() -> floors.Answer:
    """Return what answers with the loss of a step here: no system of two processes does less."""
    step = stepper("cpu")
    return lambda _: struct.pack("d", step().item())


def measure(quick: bool) -> list[Figure]:
    """Return the figures: the loss read at the end, and read after every step."""
    steps, rounds = (STEPS // 10, 3) if quick else (STEPS, 9)
    with dr.init_master_worker(world_size=1, quiet=True):
        local, remote = stepper("cpu"), stepper("remote")

        def at_the_end(step: Callable[[], torch.Tensor]) -> float:
            def run() -> None:
                for _ in range(steps):
                    loss = step()
                loss.item()

            return seconds(run) / steps

        def each(once: Callable[[], object]) -> float:
            # After other work it takes the system so many steps to give both processes a core each.
            seconds(once, _SETTLED)
            return seconds(once, steps)

        def read_of(read: Callable[[torch.Tensor], object]) -> None:
            read(remote())

        at_the_end(remote), at_the_end(local)
        ratio, ours, theirs = in_turn(lambda: at_the_end(remote), lambda: at_the_end(local), rounds)
        note = f"{ours * 1e3:.2f} ms, local {theirs * 1e3:.2f} ms"
        figures = [Figure("training step / local", ratio, "x", 1.5, note)]
        # A read waits for what it reads. The loss is there before the backward pass has begun, and a tensor
        # that is made of it after the step is there after the step.
        reads: list[tuple[str, float | None, Callable[[torch.Tensor], object]]] = [
            ("loss.item()", 1.5, lambda loss: loss.item()),
            ("loss.detach().item()", None, lambda loss: loss.detach().item()),
        ]
        with floors.pipe(_asked) as pipe:
            for what, limit, read in reads:
                ratio, ours, theirs = in_turn(
                    functools.partial(each, functools.partial(read_of, read)),
                    functools.partial(each, pipe.ask),
                    rounds,
                )
                note = f"{ours * 1e3:.2f} ms, over the pipe {theirs * 1e3:.2f} ms"
                name = f"the same, {what} after each step / the same step over a bare pipe"
                figures.append(Figure(name, ratio, "x", limit, note))
    return figures
