"""`fill_` of a DTensor that is a sum fills each rank's term.

`fill_` leaves the placement `Partial(sum)`, so the values are too large by the number of ranks. torch's C++
computes `1 - x` by it in `F.cosine_embedding_loss`, which is wrong for features that are sharded. `torchrun
--nproc-per-node 2 fill.py` prints, with torch 2.13.0+cpu:

    (Partial(sum),) [2.0, 2.0, 2.0, 2.0]

Expected is a result of ones.
"""

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
total = x.sum(1).fill_(1.0)
placements, whole = total.placements, total.full_tensor().tolist()
if mesh.get_rank() == 0:
    print(placements, whole)
