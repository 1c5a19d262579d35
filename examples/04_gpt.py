"""Train a small GPT-2 from `transformers` on a worker, byte by byte, on the standard library's own source,
and let it write.

    $ python examples/04_gpt.py
    462,336 parameters on node 0 cpu, 160,030 bytes to learn from
    step  50  loss 2.23
    step 100  loss 2.05
    step 150  loss 1.70
    step 200  loss 1.60
    step 250  loss 1.47
        def sut.pars of thars opt acker act ions = self._option):

The model, the optimizer and the schedule are the libraries' own; what makes them remote is one .to("remote").
The example needs `pip install transformers`.
"""

import argparse
import inspect
import optparse

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import distruntime as dr

STEPS, BATCH, CONTEXT, LEARNING_RATE = 250, 16, 64, 7e-3
LAYERS, HEADS, WIDTH = 2, 4, 128
PROMPT, WRITTEN = "    def ", 160

source = "".join(inspect.getsource(module) for module in (argparse, optparse))
text = torch.tensor(list(source.encode()))  # one token is one byte
config = GPT2Config(
    vocab_size=256, n_positions=256, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, initializer_range=0.08,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip

with dr.init_master_worker(backend="zmq"):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to("remote")
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {model.lm_head.weight.place}, "
        f"{len(text):,} bytes to learn from"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.1)
    text = text.to("remote")  # the whole text lives there; a batch is a few integers away

    for step in range(1, STEPS + 1):
        batch = text[torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
        loss = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss:.2f}")  # shows the loss, so it waits for it

    prompt = torch.tensor([list(PROMPT.encode())], device="remote")
    written = model.eval().generate(
        prompt, max_new_tokens=WRITTEN, do_sample=True, top_k=5, attention_mask=torch.ones_like(prompt)
    )
    print(bytes(written[0].tolist()).decode(errors="replace"))
