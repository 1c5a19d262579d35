"""PyTorch's own tensor parallelism from one process: a Llama from `transformers`, its layers cut over the
members of a mesh.

    $ python examples/10_tensor_parallel.py
    <distruntime.mesh.DeviceMesh (tp=2), 2 members on nodes 0, 1>
    queries of a layer: (64, 64), of which each member has (32, 64)
    step 1  loss 4.8932  serial 4.8932
    step 2  loss 4.6468  serial 4.6468
    step 3  loss 3.8321  serial 3.8321
    step 4  loss 3.4329  serial 3.4329
    step 5  loss 3.1265  serial 3.1265
    largest difference: losses 4.4e-16, parameters 4.8e-14

`parallelize_module` and its plan are those of a job under torchrun. There, each rank runs the script; here
the script runs once, and each of its operators on all members, every collective included. It has no rank, and
nothing in it asks for one.

In float64, so that "equal" means something: AdamW divides a gradient by its own size, and so makes whole
steps of rounding errors where a gradient is next to nothing. Sums that are cut up round otherwise: in float32
the losses agree to 1e-06, the parameters to 1e-04 only.

`python examples/10_tensor_parallel.py 4` has four members, the simulated GPUs of two workers. The example
needs `pip install transformers`.
"""

import sys

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import distruntime as dr

MEMBERS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
STEPS, BATCH, CONTEXT, LAYERS, LEARNING_RATE = 5, 4, 32, 2, 1e-2

config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=CONTEXT, use_cache=False,
)  # fmt: skip


text = torch.tensor(list(__doc__.encode()[: BATCH * (CONTEXT + 1)])).reshape(
    BATCH, CONTEXT + 1
)  # learns how this file begins


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.float64)


def train(model: LlamaForCausalLM, device: torch.device | str) -> list[Tensor]:
    """Train a model, wherever it is; return the losses. Nothing is waited for."""
    # foreach=False: torch's grouped update takes parameters that are all DTensors or none, and the norms' are
    # none.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    rows = text.to(device)
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=rows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def plan() -> dict[str, ParallelStyle]:
    """The first matrices of attention and MLP are cut by columns, the last ones by rows, so only their sums
    travel.
    """
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for k in range(LAYERS):
        layer = f"model.layers.{k}."
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            styles[layer + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            styles[layer + name] = RowwiseParallel()
    return styles  # the norms are in no plan: every member has all of them


def whole(p: Tensor) -> list[Tensor]:
    """Return a parameter in full, as each member has it."""
    return dr.shards(p.full_tensor() if isinstance(p, DTensor) else p)


if __name__ == "__main__":
    gpus = 2 if MEMBERS == 4 else 0
    with dr.init_master_worker(backend="zmq", world_size=2, simulate_cuda=gpus):
        mesh = dr.init_device_mesh("cuda" if gpus else "cpu", (MEMBERS,), mesh_dim_names=("tp",))
        print(mesh)
        model = llama().to(mesh.device)
        parallelize_module(model, mesh, plan())
        query = model.model.layers[0].self_attn.q_proj.weight
        print(
            f"queries of a layer: {tuple(query.shape)}, of which each member has "
            f"{tuple(query.to_local().shape)}"
        )
        losses = [loss.item() for loss in dr.fetch(train(model, mesh.device))]
        parameters = [whole(p.detach()) for p in model.parameters()]
    model = llama()
    expected = [loss.item() for loss in train(model, "cpu")]
    wanted = [p.detach() for p in model.parameters()]
    for step in range(STEPS):
        print(f"step {step + 1}  loss {losses[step]:.4f}  serial {expected[step]:.4f}")
    apart = max(
        (mine - theirs).abs().max().item() for copies, theirs in zip(parameters, wanted) for mine in copies
    )
    worst = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"largest difference: losses {worst:.1e}, parameters {apart:.1e}")
    sys.exit(not max(worst, apart) < 1e-5)
