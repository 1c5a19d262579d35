from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distruntime as dr

Path("train.py").write_text(
    "import os, sys\nassert os.environ['WORLD_SIZE'] == '2' and sys.argv[1:] == ['--epochs', '3']\n",
    encoding="utf-8",
)
dr.init_master_worker(world_size=2)
# %% def setup(model):
assert y.tolist() == [4.0] * 3 and dr.fetch(ranks) == [0, 1]
model = torch.nn.Linear(8, 4).to(mesh.device)
batches = [torch.randn(16, 8).to(mesh.device) for _ in range(3)]
# %% python -m distruntime run --nproc-per-node 2 train.py --epochs 3
assert loss.item() > 0
dr.shutdown()
