"""nnsight: read and change the activations of a transformer on the GPU, and patch one run into another."""

import json

import torch
from nnsight import NNsight
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=60, n_positions=32))
model = NNsight(gpt2.eval().to(device))
clean = torch.arange(10, device=device)[None]
corrupted = clean.clone()
corrupted[0, 3] = 40

with model.trace(clean):
    first = model.transformer.h[0].output[0].save()
    second = model.transformer.h[1].output[0].save()
    clean_logits = model.output.logits.save()

with model.trace(corrupted):
    corrupted_logits = model.output.logits.save()

patched = []
for layer, hidden in enumerate([first, second]):
    with model.trace(corrupted):
        model.transformer.h[layer].output[0][:] = hidden
        logits = model.output.logits.save()
    patched.append((logits[0, -1, 3] - corrupted_logits[0, -1, 3]).item())

with model.trace(clean):
    model.transformer.h[0].mlp.output[:] = 0
    ablated = model.output.logits.save()

found = {"hidden": second.norm().item(), "clean": clean_logits[0, -1].tolist(), "patched": patched}
print(json.dumps({**found, "ablated": ablated[0, -1].tolist(), "where": str(clean_logits.device)}))
