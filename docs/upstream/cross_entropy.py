"""The mean of a cross entropy is wrong if ranks ignore different numbers of targets.

`F.cross_entropy` of DTensors that are sharded by batch takes the average of the ranks' means. If some
targets are `ignore_index`, the ranks' means have different weights. `torchrun --nproc-per-node 2
cross_entropy.py` prints, with torch 2.13.0+cpu:

    2.4526724815368652 2.4218130111694336

Expected are equal numbers.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, target = torch.randn(4, 6), torch.tensor([1, 2, 3, -100])
loss = F.cross_entropy(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(target, mesh, [Shard(0)]))
found, serial = loss.full_tensor().item(), F.cross_entropy(x, target).item()
if mesh.get_rank() == 0:
    print(found, serial)
