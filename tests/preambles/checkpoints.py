import torch

import distruntime as dr

dr.init_master_worker(world_size=1)
model = torch.nn.Linear(2, 1).to("remote")
optimizer = torch.optim.AdamW(model.parameters())
step = 7
# %% dr.init_master_worker(world_size=2, simulate_cuda=2)
dr.shutdown()
# %% the end
assert "model.weight.member0" in tensors
mesh, make_on = three, make


def make():
    return make_on(mesh)


trained = dr.run_with_restarts(train, checkpoint="run8")
assert trained.weight.device_mesh == three
