"""The skeleton of PyTorch's ImageNet example: synthetic images, meters that are reduced, a validation."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="PyTorch ImageNet-style training")
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--lr", default=0.1, type=float)


class AverageMeter:
    def __init__(self, name: str) -> None:
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = float(total[0]), int(total[1])

    @property
    def avg(self) -> float:
        return self.sum / self.count


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    noise = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(noise + labels.reshape(-1, 1, 1, 1), labels)


def main() -> None:
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method="env://")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model = nn.parallel.DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    train = images(64, 1)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank)
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.workers)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch, target in loader:
            loss = criterion(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        top1 = validate(model, DataLoader(images(32, 2), args.batch_size))
        if rank == 0:
            print(f"Epoch: [{epoch}] Acc@1 {top1:.2f}")
    assert top1 > 0.7
    dist.destroy_process_group()


def validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    top1 = AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for batch, target in loader:
            top1.update((model(batch).argmax(1) == target).float().mean().item(), len(target))
    top1.all_reduce()
    return top1.avg


if __name__ == "__main__":
    main()
