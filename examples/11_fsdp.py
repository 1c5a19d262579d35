"""PyTorch's own FSDP2 from one process: a Llama from `transformers`, its parameters cut over the members of a
mesh.

    $ python examples/11_fsdp.py
    <distruntime.mesh.DeviceMesh (data=2), 2 members on nodes 0, 1>
    98,624 parameters, of which each member keeps 49,312
    step 1  loss 4.8890  serial 4.8890
    step 2  loss 4.7145  serial 4.7145
    step 3  loss 4.0514  serial 4.0514
    step 4  loss 3.5102  serial 3.5102
    step 5  loss 3.2761  serial 3.2761
    largest difference: losses 8.9e-16, parameters 1.1e-14

`fully_shard` is the one of a job under torchrun. Each member keeps its part of every parameter, gradient and
optimizer state; a layer's parameters are gathered when it runs, and given back after it. Each member learns
from rows of its own, and the gradients are averaged.

In float64, as 10_tensor_parallel.py, and for its reason.

`python examples/11_fsdp.py 4` has four members, the simulated GPUs of two workers. The example needs `pip
install transformers`.
"""

import sys

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import distruntime as dr

MEMBERS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
STEPS, BATCH, CONTEXT, LEARNING_RATE = 5, 4, 32, 1e-2

config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=CONTEXT, use_cache=False,
)  # fmt: skip
text = torch.tensor(list(__doc__.encode()[: BATCH * (CONTEXT + 1)])).reshape(
    BATCH, CONTEXT + 1
)  # learns how this file begins


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.float64)


def train(model: LlamaForCausalLM, rows: Tensor) -> list[Tensor]:
    """Train a model where the rows are; return the losses. Nothing is waited for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=rows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


if __name__ == "__main__":
    gpus = 2 if MEMBERS == 4 else 0
    with dr.init_master_worker(backend="zmq", world_size=2, simulate_cuda=gpus):
        mesh = dr.init_device_mesh("cuda" if gpus else "cpu", (MEMBERS,), mesh_dim_names=("data",))
        print(mesh)
        model = llama().to(mesh.device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        kept = sum(p.to_local().numel() for p in model.parameters())
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, of which each member keeps {kept:,}"
        )
        own = train(
            model, dr.from_shards(text.chunk(MEMBERS), mesh)
        )  # on each member the loss of its own rows
        losses = [sum(loss.item() for loss in dr.shards(step)) / MEMBERS for step in own]
        parameters = [
            dr.shards(p.detach().full_tensor()) for p in model.parameters()
        ]  # in full, as each member gathers them
    model = llama()
    expected = [loss.item() for loss in train(model, text)]
    wanted = [p.detach() for p in model.parameters()]
    for step in range(STEPS):
        print(f"step {step + 1}  loss {losses[step]:.4f}  serial {expected[step]:.4f}")
    apart = max(
        (mine - theirs).abs().max().item() for copies, theirs in zip(parameters, wanted) for mine in copies
    )
    worst = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"largest difference: losses {worst:.1e}, parameters {apart:.1e}")
    sys.exit(not max(worst, apart) < 1e-5)
