"""What issuing a training step of a model costs this thread, against the same step here.

The models have 12 layers, and tiny widths: their kernels take little, and what is left is the price of
dispatching. On a GPU whose kernels are quick, a step takes what issuing it takes.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

import distruntime as dr

from .harness import Figure, in_turn

_BAR = 2.2
Batch = dict[str, torch.Tensor]


def _models() -> dict[str, tuple[Callable[[], torch.nn.Module], Batch]]:
    import transformers as t

    ids, labels = torch.arange(32).reshape(2, 16), torch.tensor([0, 1])
    small = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    text, pixels = {"input_ids": ids}, torch.ones(2, 3, 32, 32)
    return {
        "GPT-2": (
            lambda: t.GPT2LMHeadModel(
                t.GPT2Config(
                    n_layer=12,
                    n_head=4,
                    n_embd=64,
                    vocab_size=100,
                    n_positions=32,
                    resid_pdrop=0,
                    embd_pdrop=0,
                    attn_pdrop=0,
                )
            ),
            {**text, "labels": ids},
        ),
        "Llama": (
            lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, num_key_value_heads=2, vocab_size=100)),
            {**text, "labels": ids},
        ),
        "BERT": (
            lambda: t.BertForSequenceClassification(
                t.BertConfig(**small, vocab_size=100, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
            ),
            {**text, "labels": labels},
        ),
        "ViT": (
            lambda: t.ViTForImageClassification(
                t.ViTConfig(**small, image_size=32, patch_size=8, hidden_dropout_prob=0)
            ),
            {"pixel_values": pixels, "labels": labels},
        ),
        "ResNet-50": (
            lambda: t.ResNetForImageClassification(
                t.ResNetConfig(
                    embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[3, 4, 6, 3], num_labels=2
                )
            ),
            {"pixel_values": pixels, "labels": labels},
        ),
    }


def _stepper(
    make: Callable[[], torch.nn.Module], batch: Batch, device: str, compiled: bool = False
) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = make().train().to(device)
    run = torch.compile(model, backend="distruntime") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = {name: t.to(device) for name, t in batch.items()}

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = run(**inputs).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def _thread(step: Callable[[], torch.Tensor], steps: int) -> float:
    start = time.thread_time()
    for _ in range(steps):
        step()
    spent = (time.thread_time() - start) / steps
    # Otherwise the window would fill.
    dr.synchronize()
    return spent


def _whole(step: Callable[[], torch.Tensor], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    loss.item()
    return (time.perf_counter() - start) / steps


def measure(quick: bool) -> list[Figure]:
    """Return the figures of each model: its first step, and issuing a later one; one worker, started here."""
    steps, rounds = (1, 2) if quick else (4, 7)
    figures = []

    def against(
        name: str,
        timed: Callable[[Callable[[], torch.Tensor], int], float],
        there: Callable[[], torch.Tensor],
        here: Callable[[], torch.Tensor],
        bar: float | None = None,
    ) -> None:
        """Add the figure of one step against the other, in turn."""
        ratio, ours, theirs = in_turn(partial(timed, there, steps), partial(timed, here, steps), rounds)
        note = f"{ours * 1e3:.1f} ms, local {theirs * 1e3:.1f} ms"
        figures.append(Figure(name, ratio, "x", bar, note))

    with warnings.catch_warnings(), dr.init_master_worker(world_size=1, quiet=True):
        warnings.simplefilter("ignore")
        for name, (make, batch) in _models().items():
            here, there = _stepper(make, batch, "cpu"), _stepper(make, batch, "remote")
            local, remote = _whole(here, 1), _whole(there, 1)
            note = f"{remote * 1e3:.0f} ms, local {local * 1e3:.0f} ms"
            figures.append(Figure(f"first step of {name} / local", remote / local, "x", 2.5, note))
            for step in (here, there):
                _thread(step, 2)
            gc.collect()
            against(f"issuing a step of {name} / the local step", _thread, there, here, _BAR)
            graphs = _stepper(make, batch, "remote", compiled=True)
            # It is traced, then its operators are known, then it is recorded.
            _thread(graphs, 4)
            against(f"the same by torch.compile, {name}", _thread, graphs, here)
            against(f"the whole step by torch.compile, {name}", _whole, graphs, here)
    return figures
