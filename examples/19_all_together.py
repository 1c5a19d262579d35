"""All kinds of parallelism at once: a transformer on eight members, each step of which is one program.

    $ python examples/19_all_together.py
    3 calls of the program were recorded, 7 were replayed
    loss 3.6550 -> 0.8318, serial 3.6550 -> 0.8318
    largest difference: losses 4.4e-16, parameters 4.4e-16

The members are the simulated GPUs of four workers: a pipeline of two stages, each on a mesh of 2 x 2. All
is in float64.

- "data": each row of members has a batch of its own, and `fully_shard` cuts the parameters between the rows.
- "tensor": attention and the shared expert are cut by columns and rows. Between them, each member of a row
  has a part of the sequence.
- Experts: each member holds two of a block's four, and tokens go to them and back. The members of "moe_dp"
  hold the same two, and only these add up their gradients.
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

import distruntime as dr

STEPS, ROWS, MICRO, CONTEXT, WORDS, WIDTH, HEAD = 10, 8, 2, 8, 32, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out: Tensor = self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return out


class Mixture(nn.ModuleList):
    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        parts = [torch.where(chosen == k, weights, 0).sum(-1, True) * f(x) for k, f in enumerate(self)]
        return torch.stack(parts).sum(0)


class Stage(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(first)
        mlps = (nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(5))
        self.enter = nn.Embedding(WORDS, WIDTH) if first else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.router, self.shared = Attention(), nn.Linear(WIDTH, 4), next(mlps)
        self.experts: Mixture | dr.parallel.Experts = Mixture(mlps)
        self.leave = nn.Identity() if first else nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = self.leave(x + self.shared(y) + self.experts(y, *self.router(y).softmax(-1).topk(2)))
        return out


def loss_fn(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, words)


text = (torch.arange(STEPS * ROWS * (CONTEXT + 1)) ** 2 % 31).reshape(STEPS, ROWS, CONTEXT + 1)


def cut(stage: Stage, mesh: dr.mesh.DeviceMesh) -> dr.parallel.Experts:
    """Cut a stage over the members of a mesh. Return its experts."""
    norm = tp.SequenceParallel(use_local_output=True)
    plan: dict[str, tp.ParallelStyle] = {"norm1": norm, "norm2": norm, "router": norm}
    for name, columns, rows in (("attention", "qkv", "o"), ("shared", "0", "2")):
        plan[name] = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {f"{name}.{k}": tp.ColwiseParallel() for k in columns}
        plan[f"{name}.{rows}"] = tp.RowwiseParallel(output_layouts=Shard(1))
    first = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    last = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    plan |= {"enter": first} if isinstance(stage.enter, nn.Embedding) else {"leave": last}
    experts, stage.experts = stage.experts, Mixture()
    tp.parallelize_module(stage.to(mesh.device), mesh["tensor"], plan)
    fully_shard(stage, mesh=mesh["data"])
    # All members have tokens of their own, so the experts see one dimension of data.
    members = dr.init_device_mesh(mesh.places, [("moe_dp", 2), ("moe_ep", 2)])
    stage.experts = there = dr.parallel.Experts(list(experts.children()), members)
    return there


def serial() -> tuple[list[float], dict[str, Tensor]]:
    """Train on this machine, with whole batches."""
    model = nn.Sequential(Stage(True), Stage(False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for words in text:
        loss = loss_fn(model(words[:, :-1]), words[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def parallel() -> tuple[list[float], dict[str, Tensor]]:
    """Train on eight members. Each row of members has its own half of every batch."""
    mesh = dr.init_device_mesh("cuda", [("pipe", 2), ("data", 2), ("tensor", 2)])
    start, end = (mesh.select(pipe=k) for k in range(2))
    stages = [Stage(True).double(), Stage(False).double()]
    mixtures = [cut(stages[0], start), cut(stages[1], end)]
    pipe = dr.parallel.pipeline(stages, MICRO, "1F1B", loss_fn)
    # foreach=False: torch's grouped update takes parameters that are all DTensors or none.
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9, foreach=False)

    @dr.program
    def step(words: Tensor, target: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        pipe.step(words, target=target, losses=losses, return_outputs=False)
        for experts in mixtures:
            experts.reduce_gradients(divide_by=2)  # the mean of two batches
        optimizer.step()
        return dr.lines.all_reduce(end.lines("data"), torch.stack(losses).mean(), "avg")

    losses = []
    for words in text:
        rows = [words.chunk(2)[data] for data, _ in start.coordinates()]
        x = dr.from_shards([row[:, :-1] for row in rows], start)
        losses.append(step(x, dr.from_shards([row[:, 1:] for row in rows], end)))
    print(f"{step.recordings} calls of the program were recorded, {step.replays} were replayed")
    return [loss.item() for loss in dr.fetch(losses)], dr.fetch(nn.Sequential(*stages).state_dict())


if __name__ == "__main__":
    with dr.init_master_worker(backend="zmq", world_size=4, simulate_cuda=2):
        losses, found = parallel()
    expected, wanted = serial()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, serial {expected[0]:.4f} -> {expected[-1]:.4f}")
    worst = max(abs(a - b) for a, b in zip(losses, expected))
    apart = max((found[name] - t).abs().max().item() for name, t in wanted.items())
    print(f"largest difference: losses {worst:.1e}, parameters {apart:.1e}")
    sys.exit(not max(worst, apart) < 1e-8)
