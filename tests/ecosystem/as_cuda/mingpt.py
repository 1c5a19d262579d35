"""In the style of minGPT: a trainer class with callbacks, a config, and a model that learns to sort."""

import json
import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler


class SortDataset(Dataset):
    def __init__(self, length=6, digits=3):
        self.length, self.digits = length, digits

    def __len__(self):
        return 500

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        given = torch.randint(self.digits, (self.length,), generator=drawn)
        whole = torch.cat((given, torch.sort(given)[0]))
        x, y = whole[:-1].clone(), whole[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Block(nn.Module):
    def __init__(self, size, heads, block_size, dropout):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn_drop, self.resid_drop = nn.Dropout(dropout), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        self.register_buffer("bias", mask)

    def attend(self, x):
        b, t, c = x.size()
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in self.c_attn(x).chunk(3, 2)
        )
        att = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        return self.resid_drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=3, block_size=11, size=24, heads=3, layers=2, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, size), nn.Embedding(block_size, size)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(size, heads, block_size, dropout) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(size), nn.Linear(size, vocab, bias=False)

    def forward(self, idx, targets=None):
        device = idx.device
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=device).unsqueeze(0)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            _, idx_next = torch.topk(F.softmax(logits[:, -1, :], dim=-1), k=1, dim=-1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


class Trainer:
    def __init__(self, model, train_dataset, device="auto", batch_size=16, max_iters=40, seed=3407):
        self.model, self.train_dataset = model, train_dataset
        self.batch_size, self.max_iters, self.seed = batch_size, max_iters, seed
        self.callbacks = defaultdict(list)
        if device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            self.device = device
        self.model = self.model.to(self.device)
        print("running on device", self.device)
        self.iter_num = 0
        self.iter_time = 0.0
        self.iter_dt = 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        drawn = torch.Generator().manual_seed(self.seed)
        loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(
                self.train_dataset, replacement=True, num_samples=int(1e10), generator=drawn
            ),
            shuffle=False,
            pin_memory=True,
            batch_size=self.batch_size,
            num_workers=1,
            generator=drawn,
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        self.model.train()
        torch.manual_seed(self.seed)
        data_iter = iter(loader)
        while self.iter_num < self.max_iters:
            batch = [t.to(self.device) for t in next(data_iter)]
            x, y = batch
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt, self.iter_time = tnow - self.iter_time, tnow


torch.manual_seed(3407)
torch.cuda.manual_seed_all(3407)
trainer = Trainer(GPT(), SortDataset())
seen = []


def batch_end_callback(trainer):
    if trainer.iter_num % 10 == 0:
        seen.append(trainer.loss.item())
        print(f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: loss {seen[-1]:.5f}")


trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()

trainer.model.eval()
inp = torch.tensor([[0, 0, 2, 1, 0, 1]], dtype=torch.long).to(trainer.device)
assert inp[0].nelement() == 6
with torch.no_grad():
    cat = trainer.model.generate(inp, 6)
sol_candidate = cat[:, 6:]
print("predicted sorted:", sol_candidate)
where = str(next(trainer.model.parameters()).device)
print(json.dumps({"losses": seen, "sorted": sol_candidate[0].tolist(), "where": where}))
