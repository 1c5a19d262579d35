"""Means of losses are the average of the ranks' means, where shards have different sizes.

With three rows on two ranks, the row of the second rank counts as much as both of the first one. Nothing
warns. `torchrun --nproc-per-node 2 uneven_means.py` prints, with torch 2.13.0+cpu:

    mse_loss 0.7688533067703247 0.8449575901031494
    binary_cross_entropy_with_logits 0.6678630113601685 0.6948056817054749

Expected are equal numbers.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, y = torch.randn(3, 6), torch.rand(3, 6)
for loss in (F.mse_loss, F.binary_cross_entropy_with_logits):
    found = loss(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))).full_tensor().item()
    if mesh.get_rank() == 0:
        print(loss.__name__, found, loss(x, y).item())
