"""Models of transformers as pipelines: a GPT-2, and a CLIP whose two towers are stages of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import distruntime as dr
from stages import four_gpus, places, same_gradients

transformers = pytest.importorskip("transformers")
__all__ = ["four_gpus"]


class First(nn.Module):
    """Embeddings, and the first blocks."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        body = model.transformer
        self.wte, self.wpe, self.h = body.wte, body.wpe, nn.ModuleList(body.h[:blocks])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return through(self.h, self.wte(tokens) + self.wpe(at))


class Last(nn.Module):
    """The other blocks, the norm and the head."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        body = model.transformer
        self.h, self.ln_f = nn.ModuleList(body.h[blocks:]), body.ln_f
        self.head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
        with torch.no_grad():
            self.head.weight.copy_(model.lm_head.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.ln_f(through(self.h, hidden)))


def through(blocks: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        found = block(hidden)
        hidden = found[0] if isinstance(found, tuple) else found
    return hidden


def next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_gpt2(schedule: str, four_gpus: None) -> None:
    config = transformers.GPT2Config(
        vocab_size=53,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(53, (8, 12))
    expected = model(tokens).logits
    serial = [First(model, 1), Last(model, 1)]
    stages = [copy.deepcopy(stage).to(place) for stage, place in zip(serial, places(schedule))]
    next_token(serial[1](serial[0](tokens)), tokens).backward()
    pipe = dr.parallel.pipeline(stages, 4, schedule, next_token)
    output = pipe.step(tokens, target=tokens)
    torch.testing.assert_close(output.cpu(), expected.detach(), atol=1e-5, rtol=1e-4)
    same_gradients(stages, serial)


class Pictures(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.project = model.vision_model, model.visual_projection

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.project(self.tower(pixel_values=pixels).pooler_output)


class Words(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.project = model.text_model, model.text_projection

    def forward(self, pictures: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pictures, self.project(self.tower(input_ids=tokens).pooler_output)


class Likeness(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.scale = model.logit_scale

    def forward(self, pictures: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        a, b = nn.functional.normalize(pictures), nn.functional.normalize(words)
        return b @ a.T * self.scale.exp()


def contrast(logits: torch.Tensor, _: None) -> torch.Tensor:
    own = torch.arange(len(logits), device=logits.device)
    return (nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)) / 2


@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble"])
def test_the_two_towers_of_a_clip(schedule: str, four_gpus: None) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 29},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    model = transformers.CLIPModel(config)
    pixels, tokens = torch.randn(8, 3, 8, 8), torch.randint(29, (8, 6))
    tokens[:, -1] = 29
    serial = [Pictures(model), Words(model), Likeness(model)]
    stages = [copy.deepcopy(stage).to(place) for stage, place in zip(serial, places(schedule))]
    for k in (0, 4):
        ours = serial[2](*serial[1](serial[0](pixels[k : k + 4]), tokens[k : k + 4]))
        whole = model(input_ids=tokens[k : k + 4], pixel_values=pixels[k : k + 4])
        torch.testing.assert_close(ours, whole.logits_per_text)
        (contrast(ours, None) / 2).backward()
    pipe = dr.parallel.pipeline(stages, 2, schedule, contrast)
    pipe.step(pixels, tokens=tokens, return_outputs=False)
    for k, (stage, own) in enumerate(zip(stages, serial)):
        for (name, p), q in zip(stage.named_parameters(), own.parameters()):
            # The patches' class embedding and others get a gradient on both sides, or on neither.
            assert (p.grad is None) == (q.grad is None), f"{k} {name}"
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad.cpu(), q.grad, atol=2e-6, rtol=1e-4)
