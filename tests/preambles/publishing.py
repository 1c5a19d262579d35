import torch

import distruntime as dr

dr.init_master_worker(world_size=2)
model = torch.nn.Linear(8, 4).to("remote")
optimizer = torch.optim.AdamW(model.parameters())
# %% the end
assert run["opt"].param_groups[0]["params"][0] is run["model"].weight and not dr.names()
