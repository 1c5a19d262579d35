"""PyTorch's FSDP2 as a script of ranks has it, on the members of a mesh, with a checkpoint of its shards.

    $ python examples/21_fsdp_ranks.py
    rank 0 has 561 of 1116 parameters
    epoch 1  loss 0.0664
    epoch 2  loss 0.0121
    epoch 3  loss 0.0024
    loaded again: equal on all ranks

`dr.spmd` runs a function once for each member, as a rank of `torch.distributed`. `fully_shard`, an optimizer
and `torch.distributed.checkpoint` are those of a job under torchrun, and the sharded model stays with its
ranks between the calls. `examples/11_fsdp.py` is the other way: one program without ranks, each of whose
operators runs on all members.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import distruntime as dr

dr.init_master_worker(backend="zmq", world_size=2, quiet=True)
mesh = dr.init_device_mesh("cpu", (2,))


@dr.spmd(mesh)
def setup() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 6), nn.Linear(6, 1, bias=False))
    whole = sum(p.numel() for p in model.parameters())
    own = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=own)
    fully_shard(model, mesh=own)
    local = sum(p.to_local().numel() for p in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), whole, local


@dr.spmd(mesh)
def epoch(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@dr.spmd(mesh)
def save(model: nn.Module, folder: str) -> Any:
    """Write each rank's shards, read them again, and compare."""
    state: dict[str, Any] = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=folder)
    again = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
    dcp.load(again, checkpoint_id=folder)
    return all(torch.equal(state[key].to_local(), again["model"][key].to_local()) for key in state)


def main() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 16)
    y = x.cos().sum(1, keepdim=True) / 8
    shares = [dr.from_shards([*whole.chunk(2)], mesh) for whole in (x, y)]
    model, optimizer, whole, local = setup()
    print(f"rank 0 has {dr.fetch(local)[0]} of {dr.fetch(whole)[0]} parameters")
    for k in range(1, 4):
        print(f"epoch {k}  loss {epoch(model, optimizer, *shares).item():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        good = all(dr.fetch(save(model, folder)))
    print("loaded again:", "equal on all ranks" if good else "not equal")
    dr.shutdown()


main()
