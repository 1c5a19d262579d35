"""Training steps of GPT-2 on a GPU behind a worker, against the same GPU used by another process.

`python -m benchmarks gpu` has them, and `python -m benchmarks.gpu training` and `compiled` alone.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

import distruntime as dr

from .harness import Beside, Figure, in_turn


@dataclass(frozen=True)
class Size:
    """How large everything is, and the device of this process that the worker is compared with."""

    local: str
    layers: int
    width: int
    # The batches and contexts that GPT-2 trains with.
    tokens: tuple[tuple[int, int], ...]
    steps: int
    rounds: int
    nbytes: int
    # The side of a matrix in a chain of products, and how many there are.
    side: int
    products: int


_TOKENS = ((8, 512), (8, 1024), (16, 1024))
FULL = Size("cuda", 12, 768, _TOKENS, 20, 9, 256 << 20, 1024, 100)
QUICK = Size("cuda", 12, 768, _TOKENS, 4, 3, 256 << 20, 1024, 20)
# It shows that the program runs, also without a GPU. Its numbers mean nothing.
TINY = Size("cpu", 2, 64, ((2, 16), (2, 32), (4, 32)), 2, 2, 1 << 20, 64, 5)


@cache
def _gpt2(layers: int, width: int, heads: int) -> torch.nn.Module:
    """Return a GPT-2 with the same weights in every process."""
    # It is imported only here, as it takes seconds, and other benchmarks do without it.
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    # There is no dropout, so that both sides draw nothing.
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model: torch.nn.Module = GPT2LMHeadModel(config)
    return model


# What `_make` has made in the process that it was called in: it stays there, as CUDA tensors do.
_made: dict[str, Callable[[int], Any]] = {}


def _make(name: str, make: Callable[..., Callable[[int], Any]], *arguments: object) -> None:
    """Make a function that makes steps, in place of the one that had that name."""
    _release(name)
    _made[name] = make(*arguments)


def _release(name: str) -> None:
    """Give back the memory of what has that name."""
    _made.pop(name, None)
    gc.collect()
    torch.cuda.empty_cache()


def _run(name: str, steps: int) -> Any:
    """Make steps with what has that name."""
    return _made[name](steps)


class Steps(NamedTuple):
    """The seconds of a step, the issuing thread's own ones, without what it waits for, and the last loss."""

    seconds: float
    own: float
    loss: float


def stepper(device: str, batch: int, context: int, size: Size) -> Callable[[int], Steps]:
    """Return a function that makes steps and reads the last loss: autocast to bfloat16, fused AdamW."""
    model = copy.deepcopy(_gpt2(size.layers, size.width, size.width // 64)).to(device)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50257, (batch, context), generator=draw).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run(steps: int) -> Steps:
        start, began = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            loss = step()
        own = time.thread_time() - began
        value = loss.item()
        return Steps((time.perf_counter() - start) / steps, own / steps, value)

    return run


def training(size: Size) -> Iterator[Figure]:
    """Measure the ratios of a step of GPT-2 small (124 million parameters), the loss read after the last."""
    with Beside() as beside:
        for batch, context in size.tokens:
            yield _trained(beside, batch, context, size)


def _trained(beside: Beside, batch: int, context: int, size: Size) -> Figure:
    beside.call(_make, "steps", stepper, size.local, batch, context, size)
    remote = stepper("remote", batch, context, size)
    first, local = remote(size.steps), beside.call(_run, "steps", size.steps)
    assert math.isclose(first.loss, local.loss, rel_tol=0.01), (
        f"the losses differ: {first.loss}, local {local.loss}"
    )
    own: list[float] = []

    def there() -> float:
        found = remote(size.steps)
        own.append(found.own)
        return found.seconds

    def here() -> float:
        return float(beside.call(_run, "steps", size.steps).seconds)

    ratio, ours, theirs = in_turn(there, here, size.rounds)
    note = (
        f"{ours * 1e3:.1f} ms, local {theirs * 1e3:.1f} ms, {batch * context / ours:,.0f} tokens a second; "
    )
    note += f"the master's own {min(own) * 1e3:.1f} ms"
    return Figure(
        f"GPT-2 small step, {batch} x {context}, op by op / local on the same GPU", ratio, "x", 1.05, note
    )


# How a step of GPT-2 runs on a worker: None is op by op, and the others are options of our backend.
_WAYS: tuple[tuple[str, dict[str, str] | None], ...] = (
    ("op by op", None),
    ("compiled", {}),
    ("compiled, inductor", {"compile": "inductor"}),
    ("compiled, cudagraphs", {"compile": "cudagraphs"}),
)


def compiled(size: Size) -> Iterator[Figure]:
    """Measure a step of GPT-2 with weights in bfloat16, against the same step here, plain and by Inductor.

    The tiny one has 12 layers of width 64: a GPU is done with it before Python has issued it.
    """
    remote: Any = torch.remote  # type: ignore[attr-defined]
    with Beside() as beside:
        for width, batch, context in ((64, 4, 64), (size.width, *size.tokens[0])):
            name = f"GPT-2 of width {width}, {batch} x {context}"
            shape = width, batch, context, size
            beside.call(_make, "plain", _whole, size.local, _as_it_is, *shape)
            here = _beside(beside, "plain")
            # Its first steps start the process's own use of the GPU.
            here(2)
            there: Callable[[int], float]
            for way, options in (*_WAYS, ("here, inductor", None)):
                if way == "here, inductor":
                    beside.call(_make, "inductor", _whole, size.local, torch.compile, *shape)
                    there = _beside(beside, "inductor")
                elif options is None:
                    there = _whole("remote", _as_it_is, *shape)
                else:
                    compile = partial(torch.compile, backend="distruntime", options=options)
                    there = _whole("remote", compile, *shape)
                first = there(5) * 5
                _until_compiled()
                # Inductor tries several forms of a kernel when it first runs.
                there(2)
                ratio, ours, theirs = in_turn(
                    partial(there, size.steps), partial(here, size.steps), size.rounds
                )
                # The next one is not to find the memory of this one taken, on the worker or beside it.
                del there
                torch.compiler.reset()
                gc.collect()
                remote.empty_cache()
                if way == "here, inductor":
                    beside.call(torch.compiler.reset)
                    beside.call(_release, "inductor")
                note = f"{ours * 1e3:.2f} ms, here {theirs * 1e3:.2f} ms, the first five {first:.1f} s"
                yield Figure(f"{name}, {way} / plain here", ratio, "x", None, note)


def _beside(beside: Beside, name: str) -> Callable[[int], float]:
    def run(steps: int) -> float:
        return float(beside.call(_run, name, steps))

    return run


def _as_it_is(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _until_compiled() -> None:
    """Wait until no worker compiles beside the steps any more; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while any(one.compiled == "compiling" for one in dr.profiler.compiled_graphs()):
        assert time.monotonic() < deadline, "a worker compiles for more than ten minutes"
        time.sleep(0.25)


def _whole(
    device: str,
    compile: Callable[[torch.nn.Module], Callable[..., Any]],
    width: int,
    batch: int,
    context: int,
    size: Size,
) -> Callable[[int], float]:
    """Return a function that makes some training steps, reads the last loss, and returns seconds a step."""
    model = copy.deepcopy(_gpt2(size.layers, width, max(4, width // 64))).to(torch.bfloat16).to(device)
    run = compile(model)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50257, (batch, context), generator=draw).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def work(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
        assert math.isfinite(loss.item())
        return (time.perf_counter() - began) / steps

    return work
