"""Architectures from `transformers`, small enough for a test, built from configs: nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# transformers reads the environment when it is imported.
import transformers

VOCABULARY = 99
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Small(NamedTuple):
    build: Callable[[], Any]
    generates: bool
    batch: Callable[[], dict[str, torch.Tensor]]


def _ids(*shape: int, seed: int = 0, high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(seed))


def _causal() -> dict[str, torch.Tensor]:
    ids = _ids(2, 12)
    mask = torch.ones_like(ids)
    # It is padded on the left, as generation wants it.
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _masked() -> dict[str, torch.Tensor]:
    return {**_causal(), "labels": _ids(2, 12, seed=1)}


def _pictures() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        "labels": _ids(2, high=10),
    }


def _pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(2, 10), "labels": _ids(2, 7, seed=1)}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_TEXT, **_ENDS, num_key_value_heads=2, max_position_embeddings=64)
    )


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT, max_position_embeddings=64))


def _vit() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=10)
    )


def _t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, eos_token_id=2, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "gpt2": Small(_gpt2, True, _causal),
    "llama": Small(_llama, True, _causal),
    "bert": Small(_bert, False, _masked),
    "vit": Small(_vit, False, _pictures),
    "t5": Small(_t5, True, _pairs),
}
