"""A loop with accelerate, as its examples write it: fp16 on a GPU, state saved and loaded."""

import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(42)
accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no")
device = accelerator.device
drawn = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=drawn)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=drawn)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

losses = []
for epoch in range(4):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.print(f"epoch {epoch}: {losses[-1]:.4f}")

folder = tempfile.mkdtemp()
accelerator.save_state(folder)
accelerator.load_state(folder)
model.eval()
correct = 0
with torch.no_grad():
    for inputs, targets in loader:
        predictions = model(inputs).argmax(dim=-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        correct += (predictions == targets).sum().item()
where = str(next(accelerator.unwrap_model(model).parameters()).device)
print(json.dumps({"losses": losses, "correct": correct, "where": where}))
