"""Libraries of models, and of what reads and writes them."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import nn

from cases import HALF, case
from small import VOCABULARY, classifier, llama, tokenizer


@case("transformers", "a model's training steps, save_pretrained, from_pretrained(device_map=)")
def causal_model(device: str) -> dict[str, object]:
    from transformers import AutoModelForCausalLM

    model = llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(3, VOCABULARY, (4, 16)).to(device)
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
        return {"losses": torch.stack(losses), "logits": loaded(tokens).logits}


@case("transformers", "generate: greedy, sampling, beams")
def generate(device: str) -> dict[str, object]:
    model = llama().to(device).eval()
    tokens = torch.arange(3, 13).view(2, 5).to(device)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    torch.manual_seed(0)
    ways = {"greedy": {"do_sample": False}, "sample": {"do_sample": True}, "beams": {"num_beams": 3}}
    return {
        name: model.generate(tokens, attention_mask=mask, max_new_tokens=6, **way)
        for name, way in ways.items()
    }


@case("transformers", 'pipeline("text-generation", device=)')
def text_pipeline(device: str) -> dict[str, object]:
    from transformers import pipeline

    generator = pipeline("text-generation", model=llama().eval(), tokenizer=tokenizer(), device=device)
    found = generator(["w1 w2 w3", "w7 w8"], max_new_tokens=5, do_sample=False)
    return {
        "texts": [answer[0]["generated_text"] for answer in found],
        "weight": generator.model.lm_head.weight,
    }


@case("sentence-transformers", "encode and similarity")
def sentences(device: str) -> dict[str, object]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as parts
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = SentenceTransformer(modules=[parts.Transformer(folder), parts.Pooling(32)], device=device)
    found = model.encode(["w1 w2", "w3"], convert_to_tensor=True)
    return {"vectors": found, "similarity": model.similarity(found, found)}


@case("x-transformers", "an autoregressive decoder: train and generate")
def x_transformers(device: str) -> dict[str, object]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=1, heads=2, rotary_pos_emb=True)
    inner = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    model = AutoregressiveWrapper(inner).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.arange(40).view(2, 20).to(device)
    losses = []
    for _ in range(4):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "generated": model.generate(tokens[:, :3], 5, temperature=0.0)}


@case("safetensors", "save_model, load_model, load_file and safe_open with device=")
def safetensors(device: str) -> dict[str, object]:
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model, save_model

    model = classifier().to(device)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "net.safetensors")
        save_model(model, path)
        loaded = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
        load_model(loaded, path, device=device)
        with safe_open(path, framework="pt", device=device) as file:
            weight = file.get_tensor("0.weight")
        return {"state": dict(load_file(path, device=device)), "weight": weight, "model": loaded[2].weight}


@case("torchao", "int8 weight-only quantization of a model")
def torchao(device: str) -> dict[str, object]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device).eval()
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        return {"out": model(torch.linspace(-1, 1, 64).view(2, 32).to(device))}


@case("torchao", "AdamW8bit, which compiles its step with fullgraph=True", tolerance=HALF)
def torchao_optimizer(device: str) -> dict[str, object]:
    from torchao.optim import AdamW8bit

    model, x = nn.Linear(256, 64).to(device), torch.ones(2, 256).to(device)
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "weight": model.weight}


@case("transformers", 'from_pretrained(device_map="auto"), and model.device')
def auto_device_map(device: str) -> dict[str, object]:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto").eval()
    tokens = torch.arange(3, 13).view(2, 5).to(model.device)
    with torch.no_grad():
        return {"logits": model(tokens).logits}


@case("einops", "rearrange, reduce, repeat, einsum and a layer")
def einops(device: str) -> dict[str, object]:
    from einops import einsum, rearrange, reduce, repeat
    from einops.layers.torch import Rearrange

    x = torch.arange(24.0).view(2, 3, 4).to(device)
    return {
        "rearranged": rearrange(x, "b c (h w) -> b h w c", h=2),
        "reduced": reduce(x, "b c w -> b c", "mean"),
        "repeated": repeat(x, "b c w -> b (c 2) w"),
        "einsum": einsum(x, x, "b i w, b j w -> b i j"),
        "layer": nn.Sequential(Rearrange("b c w -> b (c w)"), nn.Linear(12, 2)).to(device)(x),
    }


@case("opt_einsum", "contract, and an expression that is used again")
def opt_einsum(device: str) -> dict[str, object]:
    from opt_einsum import contract, contract_expression

    a, b, c = (torch.randn(4, 4).to(device) for _ in range(3))
    expression = contract_expression("ij,jk,kl->il", a.shape, b.shape, c.shape)
    return {"contracted": contract("ij,jk,kl->il", a, b, c), "expression": expression(a, b, c)}
