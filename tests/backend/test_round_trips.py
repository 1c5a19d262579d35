"""How often a script that uses transformers waits for the worker: where its own lines ask, nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import distruntime as dr
from agree import REMOTE

VOCABULARY, TOKENS = 99, 6


@pytest.fixture
def model(session: object) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model: GPT2LMHeadModel = GPT2LMHeadModel(config).to(REMOTE)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (4, 8)).to(REMOTE)


def waits(run: Callable[[], object]) -> Counter[str]:
    """Count the waits of `run` by the line of their cause: its file, without the folders, and its text."""
    dr.profiler.stalls(reset=True)
    run()
    return Counter({stall.line.rpartition("/")[2]: stall.count for stall in dr.profiler.stalls(reset=True)})


@pytest.mark.parametrize(("hidden", "asked"), [(None, 0), (0, 1), (3, 2)])
def test_training_waits_for_nothing_after_its_first_step(
    model: GPT2LMHeadModel, hidden: int | None, asked: int
) -> None:
    """With a mask, transformers asks in each forward pass whether it hides anything, on a GPU too.

    Where it does, transformers asks again whether it hides only what a static cache has yet to fill.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batch = ids()
    mask = None
    if hidden is not None:
        mask = torch.ones_like(batch)
        mask[0, :hidden] = 0

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = model(input_ids=batch, attention_mask=mask, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    train(1)
    found = waits(lambda: train(5))
    assert all(line.startswith("masking_utils.py:") for line in found)
    assert found.total() == 5 * asked
    assert torch.isfinite(model.lm_head.weight).all().item()


@pytest.mark.parametrize("sampled", [False, True])
def test_generate_waits_once_for_each_token(model: GPT2LMHeadModel, sampled: bool) -> None:
    """It asks whether all sequences have ended. Before the first token it looks at the tokens that it got."""
    model.eval()
    start = ids()
    settings = {"attention_mask": torch.ones_like(start), "pad_token_id": 0, "do_sample": sampled}

    def generate(tokens: int) -> None:
        model.generate(start, max_new_tokens=tokens, min_new_tokens=tokens, **settings)

    # What the first call of an operator asks a worker is asked.
    generate(2)
    few, many = waits(lambda: generate(TOKENS)), waits(lambda: generate(2 * TOKENS))
    assert all(line.startswith("utils.py:") for line in many)
    each = many - few
    assert list(each.values()) == [TOKENS] and "unfinished_sequences" in next(iter(each))
    checks = few - each
    assert max(checks.values()) == 1 and checks.total() <= 6
