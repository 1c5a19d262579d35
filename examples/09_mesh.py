"""Data parallelism on a mesh: one model, one program, and each member of the mesh has its own rows of every
batch.

    $ python examples/09_mesh.py
    <distruntime.mesh.DeviceMesh (data=2), 2 members on nodes 0, 1>
    step  2  loss 2.2767  serial 2.2767
    step  4  loss 2.2651  serial 2.2651
    step  6  loss 2.2370  serial 2.2370
    step  8  loss 2.1821  serial 2.1821
    step 10  loss 2.1552  serial 2.1552
    largest difference: losses 2.4e-07, parameters 2.2e-08

A tensor on a mesh is one proxy for as many shards as there are members, and an operator on it is one
instruction, which all members run. So the loop below is the serial one, but for two lines: the members are
given different rows, and their gradients are averaged. In 06_data_parallel.py the same is done with one model
for each worker.

`python examples/09_mesh.py 4` has four members, the simulated GPUs of two workers.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import distruntime as dr

MEMBERS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
STEPS, BATCH = 10, 64

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(data.target)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = slice(step * BATCH, (step + 1) * BATCH)
    return images[rows], labels[rows]


def serial() -> tuple[list[float], list[Tensor]]:
    """Train on this machine, with whole batches; return the losses and the parameters."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        image, label = batch(step)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def parallel(mesh: dr.mesh.DeviceMesh) -> tuple[list[float], list[list[Tensor]]]:
    """Train on a mesh; return the losses, and every parameter as each member has it."""
    everyone = mesh.lines("data")  # the group of all members along this dimension
    # Every member has the same parameters.
    model = network().to(mesh.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        image, label = (
            dr.from_shards(whole.chunk(mesh.size()), mesh) for whole in batch(step)
        )  # a chunk for each
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = dr.lines.all_reduce(everyone, p.grad, "AVG")
        optimizer.step()
        losses.append(dr.lines.all_reduce(everyone, loss.detach(), "AVG"))  # nothing is waited for
    return [loss.item() for loss in dr.fetch(losses)], [dr.shards(p.detach()) for p in model.parameters()]


if __name__ == "__main__":
    gpus = 2 if MEMBERS == 4 else 0
    with dr.init_master_worker(backend="zmq", world_size=2, simulate_cuda=gpus):
        mesh = dr.init_device_mesh("cuda" if gpus else "cpu", (MEMBERS,), mesh_dim_names=("data",))
        print(mesh)
        losses, parameters = parallel(mesh)
    expected, wanted = serial()
    for step in range(1, STEPS, 2):
        print(f"step {step + 1:2}  loss {losses[step]:.4f}  serial {expected[step]:.4f}")
    apart = max(
        (mine - theirs).abs().max().item() for shards, theirs in zip(parameters, wanted) for mine in shards
    )
    worst = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"largest difference: losses {worst:.1e}, parameters {apart:.1e}")
    sys.exit(not max(worst, apart) < 1e-5)
