"""Models, data and a tokenizer that the scripts share: built here, so nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 99
WORDS = [f"w{k}" for k in range(VOCABULARY - 4)]


def classified() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 points of 8 numbers, and the class of each."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=drawn), torch.randint(0, 2, (64,), generator=drawn)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def images(device: str, number: int = 4, size: int = 32) -> torch.Tensor:
    return torch.rand(number, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)


def llama() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
