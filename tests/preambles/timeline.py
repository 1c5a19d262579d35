import torch

import distruntime as dr

dr.init_master_worker(world_size=1)
model = torch.nn.Linear(8, 4).to("remote")
batch = torch.randn(16, 8, device="remote")


def step(batch):
    return model(batch).square().mean()
