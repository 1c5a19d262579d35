"""Lightning's Trainer() without a word about devices: fit, validate the best checkpoint, go on from it."""

import argparse
import json
import tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32-true")
options = parser.parse_args()


class LitDigits(L.LightningModule):
    def __init__(self, hidden=32, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.history = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        self.history.append(loss.detach().float())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


L.seed_everything(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.Generator().manual_seed(0)
train_loader = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=64, shuffle=True, generator=order)
val_loader = DataLoader(TensorDataset(x[800:1000], y[800:1000]), batch_size=100)
folder = tempfile.mkdtemp()


def make_trainer(epochs):
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True)
    return L.Trainer(
        max_epochs=epochs,
        precision=options.precision,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


model = LitDigits()
trainer = make_trainer(2)
trainer.fit(model, train_loader, val_loader)
metrics = trainer.validate(model, val_loader, ckpt_path="best", verbose=False)[0]
loaded = LitDigits.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
again = LitDigits()
resumed = make_trainer(3)
resumed.fit(again, train_loader, val_loader, ckpt_path=trainer.checkpoint_callback.last_model_path)
where = str(again.history[-1].device)
numbers = {
    "losses": torch.stack(model.history).tolist(),
    "resumed": torch.stack(again.history).tolist(),
    "metrics": [metrics["val_loss"], metrics["val_acc"]],
    "loaded": loaded.net[0].weight.sum().item(),
}
print(json.dumps({**numbers, "where": where}))
