"""PyTorch's DistributedDataParallel as it is, on the members of a mesh: `dr.spmd`.

    $ python examples/20_ddp.py
    ranks [0, 1] of the mesh <distruntime.mesh.DeviceMesh (dp=2), 2 members on nodes 0, 1>
    step 1  loss 1.3690  serial 1.3690
    step 2  loss 0.9457  serial 0.9457
    step 3  loss 0.5604  serial 0.5604
    step 4  loss 0.3982  serial 0.3982
    step 5  loss 0.3607  serial 0.3607
    largest difference: losses 0.0e+00, parameters 6.0e-08

A function of `dr.spmd` runs once for each member, as a rank of `torch.distributed`, which is initialised. So
DDP reduces its buckets in C++ while its backward pass goes on. The parameters are tensors of the mesh: what
DDP trains there can be read here, by `model.state_dict()` for example. The DDP module and the optimizer stay
with their ranks, from one call to the next.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distruntime as dr

WORKERS, STEPS, BATCH = 2, 5, 32

torch.manual_seed(0)
x = torch.randn(BATCH, 16)
y = x.sin().sum(1, keepdim=True) / 2
serial = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

dr.init_master_worker(backend="zmq", world_size=WORKERS, quiet=True)
mesh = dr.init_device_mesh("cpu", (WORKERS,), mesh_dim_names=("dp",))
model = copy.deepcopy(serial).to(mesh.device)


@dr.spmd(mesh)
def setup(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), dist.get_rank()


@dr.spmd(mesh)
def step(ddp: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def main() -> None:
    ddp, optimizer, ranks = setup(model)
    print("ranks", dr.fetch(ranks), "of the mesh", mesh)
    shares = [dr.from_shards([*whole.chunk(WORKERS)], mesh) for whole in (x, y)]
    wanted = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    apart = 0.0
    for k in range(1, STEPS + 1):
        loss = step(ddp, optimizer, *shares).item()
        wanted.zero_grad()
        alone = nn.functional.mse_loss(serial(x), y)
        alone.backward()
        wanted.step()
        print(f"step {k}  loss {loss:.4f}  serial {alone.item():.4f}")
        apart = max(apart, abs(loss - alone.item()))
    trained = dr.fetch(dict(model.state_dict()))
    parameters = max(float((trained[name] - p).abs().max()) for name, p in serial.state_dict().items())
    print(f"largest difference: losses {apart:.1e}, parameters {parameters:.1e}")
    dr.shutdown()


main()
