"""A toy model under DistributedDataParallel, in the style of PyTorch's DDP tutorial."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


def demo_basic() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    print(f"Start running basic DDP example on rank {rank}.")
    model = ToyModel().to(device)
    ddp_model = DDP(model, device_ids=[device.index] if cuda else None)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10).to(device))
    loss_fn(outputs, torch.randn(20, 5).to(device)).backward()
    optimizer.step()
    whole = [torch.empty_like(model.net1.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, model.net1.weight.detach())
    assert all(torch.equal(whole[0], other) for other in whole)
    dist.destroy_process_group()
    print(f"Finished running basic DDP example on rank {rank}.")


if __name__ == "__main__":
    demo_basic()
