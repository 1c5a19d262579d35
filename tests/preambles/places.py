import torch

import distruntime as dr

dr.init_master_worker(world_size=2)
model = torch.nn.Linear(2, 1).to("remote")
torch.save(model.state_dict(), "model.pt")
# %% the end
assert {t.place for t in (x, y, layer.weight, model.weight, loaded["weight"], torch.ones(2))} == {place}
torch.set_default_device(None)
