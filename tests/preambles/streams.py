import torch

import distruntime as dr

dr.init_master_worker(world_size=2, simulate_cuda=1)
model = torch.nn.Linear(256, 8).to(dr.place(1, "cuda:0"))
other = dr.Stream(0)
