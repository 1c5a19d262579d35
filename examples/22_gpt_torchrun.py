"""A GPT-style transformer in a script for torchrun, on the workers of a session, as it is.

    $ python -m distruntime run --nproc-per-node 2 examples/22_gpt_torchrun.py
    [node 0 rank 0] 2 ranks, 30432 parameters, 8 windows of 32 bytes a step
    [node 0 rank 0] step 1  loss 5.8
    [node 0 rank 0] step 10  loss 3.4
    [node 0 rank 0] step 20  loss 3.5
    [node 0 rank 0] step 30  loss 3.3

Nothing in the script knows of distruntime: `torchrun --nproc-per-node 2 examples/22_gpt_torchrun.py` does the
same. With `--workers tcp://gpu1:29400,tcp://gpu2:29400 --nproc-per-node gpu` two machines run it, with one
rank for each GPU.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 30, 4, 32, 32, 4, 1


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of this file's own bytes."""

    def __init__(self) -> None:
        self.bytes = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return len(self.bytes) - CONTEXT - 1

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.bytes[k : k + CONTEXT], self.bytes[k + 1 : k + CONTEXT + 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.reshape(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.blocks(self.tokens(tokens) + places))  # type: ignore[no-any-return]


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Text()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=0))
    if dist.get_rank() == 0:
        count, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
        print(f"{ranks} ranks, {count} parameters, {BATCH * ranks} windows of {CONTEXT} bytes a step")
    for step, (tokens, following) in zip(range(1, STEPS + 1), loader):
        logits = model(tokens.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}  loss {mean.item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
