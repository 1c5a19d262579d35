"""A GPU behind a worker, against the same GPU used by this process: a GPT-2 training step op by op, large
copies, and streams that overlap.

Run it alone, `python -m benchmarks gpu`; without a GPU it says so and measures nothing. The worker is started
here and shares the GPU with this process, and the two sides work in turn, never at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch

import distruntime as dr

from .harness import Figure, in_turn, seconds

BATCH, CONTEXT = 8, 512
STEPS = 20
NBYTES = 256 << 20


def measure(quick: bool) -> list[Figure]:
    """Return the figures; none where there is no GPU."""
    if not torch.cuda.is_available():
        print("no GPU: nothing measured", flush=True)
        return []
    with dr.init_master_worker(world_size=1, quiet=True):
        assert dr.zeros(1).place == dr.place(0, "cuda:0")
        return [*training(quick), *copies(quick), *overlap(quick)]


def stepper(device: str, model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    """Return a function that makes one step and returns the loss: autocast to bfloat16, fused AdamW."""
    model.to(device)
    tokens = torch.randint(0, 50257, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training(quick: bool) -> list[Figure]:
    """Return the ratio of a step of GPT-2 small (124 million parameters), 8 x 512 tokens, the loss read after
    the last.
    """
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
    )  # only here, as it takes seconds, and other benchmarks do without it

    model = GPT2LMHeadModel(
        GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # no dropout, so that both sides draw nothing
    steps, rounds = (STEPS // 5, 3) if quick else (STEPS, 9)
    local, remote = stepper("cuda", copy.deepcopy(model)), stepper("remote", model)

    def run(step: Callable[[], torch.Tensor]) -> float:
        def work() -> None:
            for _ in range(steps):
                loss = step()
            losses[step] = loss.item()

        return seconds(work) / steps

    losses: dict[Callable[[], torch.Tensor], float] = {}
    run(remote), run(local)
    assert math.isclose(losses[remote], losses[local], rel_tol=0.01), (
        f"the losses differ: {losses[remote]}, local {losses[local]}"
    )
    ratio, ours, theirs = in_turn(lambda: run(remote), lambda: run(local), rounds)
    note = f"{ours * 1e3:.1f} ms, local {theirs * 1e3:.1f} ms, {BATCH * CONTEXT / ours:,.0f} tokens a second"
    return [Figure("GPT-2 small step, op by op / local on the same GPU", ratio, "x", 1.05, note)]


def copies(quick: bool) -> list[Figure]:
    """Return the rates of 256 MiB to the GPU and back, against this process's own copies from and to pinned
    memory.
    """
    rounds = 3 if quick else 11
    tensor = torch.randn(NBYTES // 4)
    pinned, there = tensor.pin_memory(), tensor.to("cuda")
    remote = [tensor.to("remote")]

    def up() -> float:
        def run() -> None:
            remote[:] = [tensor.to("remote")]
            remote[0][-1].item()  # has the GPU seen it, and not only the worker

        return seconds(run)

    def local(target: torch.Tensor, source: torch.Tensor) -> Callable[[], float]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return lambda: seconds(run)

    def down() -> float:
        return seconds(lambda: remote[0].cpu())

    figures = []
    for name, ours, theirs in (("up", up, local(there, pinned)), ("down", down, local(pinned, there))):
        for _ in range(3):
            ours(), theirs()
        ratio, other, mine = in_turn(theirs, ours, rounds)  # seconds of theirs over ours: a ratio of rates
        note = f"{NBYTES / mine / 2**30:.2f} GiB/s, pinned {NBYTES / other / 2**30:.2f}"
        figures.append(
            Figure(
                f"256 MiB {name}, GPU of a worker / local copy of pinned memory",
                ratio,
                "x",
                None,
                note,
                most=False,
            )
        )
    assert torch.equal(remote[0].cpu(), tensor)
    return figures


def overlap(quick: bool) -> list[Figure]:
    """Return the ratios of two chains of products on one stream and on two, and of a chain with a 256 MiB
    download beside it.
    """
    rounds, products = (3, 20) if quick else (9, 100)
    one, two = dr.Stream(0, "cuda:0"), dr.Stream(0, "cuda:0")
    a, large = torch.randn(1024, 1024, device=one.device) / 32, torch.randn(NBYTES // 4, device=one.device)

    def chain(stream: dr.Stream) -> torch.Tensor:
        with dr.stream(stream):
            x = a
            for _ in range(products):
                x = x @ a
        return x

    def chains(*streams: dr.Stream) -> float:
        def run() -> None:
            kept = [chain(stream) for stream in streams]
            dr.synchronize()
            del kept

        return seconds(run)

    def download() -> float:
        with dr.stream(two):
            return seconds(lambda: large.cpu())

    def both() -> float:
        def run() -> None:
            x = chain(one)
            with dr.stream(two):
                large.cpu()
            dr.synchronize()
            del x

        return seconds(run)

    chains(one, two), download(), both()
    ratio, alone, together = in_turn(lambda: chains(one, one), lambda: chains(one, two), rounds)
    note = f"{alone * 1e3:.1f} ms, {together * 1e3:.1f} ms"
    figures = [
        Figure(
            "GPU: two chains of products (1024 x 1024), on one stream / on two",
            ratio,
            "x",
            None,
            note,
            most=False,
        )
    ]
    ratio, total, longer = in_turn(both, lambda: max(chains(one), download()), rounds)
    note = f"{total * 1e3:.1f} ms, the longer alone {longer * 1e3:.1f} ms"
    return [
        *figures,
        Figure(
            "GPU: a chain of products with a 256 MiB download beside it / the longer", ratio, "x", 1.3, note
        ),
    ]
