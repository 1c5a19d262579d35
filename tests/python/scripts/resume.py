"""A Trainer with snapshots, in the style of PyTorch's tutorial of fault-tolerant training.

With --kill-at it kills its last rank in that epoch, unless it has resumed.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MyTrainDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(size, 20, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum().reshape(1)


class Trainer:
    def __init__(self, model: torch.nn.Module, snapshot_path: Path) -> None:
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.model, self.epochs_run, self.snapshot_path = model, 0, snapshot_path
        if snapshot_path.exists():
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")
        self.ddp = DDP(self.model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-2)
        self.data = DataLoader(
            dataset := MyTrainDataset(64), batch_size=8, sampler=DistributedSampler(dataset)
        )

    def train(self, epochs: int, kill_at: int) -> None:
        resumed = self.epochs_run > 0
        for epoch in range(self.epochs_run, epochs):
            assert isinstance(self.data.sampler, DistributedSampler)
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                self.optimizer.zero_grad()
                loss = F.mse_loss(self.ddp(source), targets)
                loss.backward()
                self.optimizer.step()
            print(f"[rank{self.global_rank}] Epoch {epoch} | Steps: {len(self.data)}")
            if epoch == kill_at and not resumed and self.global_rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            # Nobody saves what not all have reached.
            dist.barrier()
            if self.global_rank == 0:
                torch.save(
                    {"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch + 1}, self.snapshot_path
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(torch.nn.Linear(20, 1), args.snapshot).train(args.total_epochs, args.kill_at)
    dist.destroy_process_group()
