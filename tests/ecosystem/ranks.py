"""Libraries that ask for their rank, as they are in `dr.spmd`: two members here against one process.

Each member takes half of a batch, so the mean over the members is that of one process on the whole batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distruntime as dr
from cases import case
from small import classified, classifier

RANKS, BATCH = 2, 8


def over_members(train: Callable[[int], tuple[torch.Tensor, list[float]]]) -> dict[str, object]:
    """Train twice in the same processes; return what a member has of it."""
    mesh = dr.init_device_mesh("cpu", (RANKS,))
    function = dr.spmd(mesh, train, timeout=300)
    found: dict[str, object] = {}
    for number in ("first", "second"):
        weight, losses = function(BATCH // RANKS)
        found[number] = weight, dr.fetch(losses)[0]
    return found


def in_one_process(train: Callable[[int], tuple[torch.Tensor, list[float]]]) -> dict[str, object]:
    return {number: train(BATCH) for number in ("first", "second")}


def with_accelerate(batch: int) -> tuple[torch.Tensor, list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: nn.Module = classifier()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(*classified()), batch_size=batch)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weight = accelerator.unwrap_model(model)[0].weight.detach()
    # It ends torch.distributed's group, and the next call begins with a new one.
    accelerator.end_training()
    return weight, losses


def with_lightning(batch: int) -> tuple[torch.Tensor, list[float]]:
    # Lightning imports torchvision if it is installed, and this process may be a member's.
    import torchvision_operators

    torchvision_operators.load()
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = TensorDataset(*classified())
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp" if dist.is_initialized() else "auto",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            # Its own sampler would shuffle, and one process would see the points in another order.
            use_distributed_sampler=False,
        )
        model = Classifier()
        sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
        trainer.fit(model, DataLoader(data, batch_size=batch, sampler=sampler))
    return model.model[0].weight.detach(), [float(trainer.callback_metrics["loss"])]


@case("accelerate", "two ranks in dr.spmd, twice: prepare, clip, reduce, end_training")
def accelerate_ranks(device: str) -> dict[str, object]:
    return in_one_process(with_accelerate) if device == "cpu" else over_members(with_accelerate)


@case("lightning", 'two ranks in dr.spmd, twice: Trainer(strategy="ddp")')
def lightning_ranks(device: str) -> dict[str, object]:
    return in_one_process(with_lightning) if device == "cpu" else over_members(with_lightning)
