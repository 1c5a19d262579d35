import torch

import distruntime as dr

dr.init_master_worker(world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to("remote")
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = torch.nn.functional.mse_loss
batches = [(torch.randn(16, 8).to("remote"), torch.randn(16, 4).to("remote")) for _ in range(10)]
# %% the end
assert loss.item() > 0
