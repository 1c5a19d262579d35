"""`cumsum`, `cumprod` and `logcumsumexp` along a negative dimension run on each shard.

If the dimension is counted from behind and is sharded, each rank's sums begin anew. With `dim=1` instead of
`dim=-1` the result is right. `torchrun --nproc-per-node 2 cumsum.py` prints, with torch 2.13.0+cpu:

    [[0.0, 1.0, 2.0, 5.0], [4.0, 9.0, 6.0, 13.0]]
    [[0.0, 1.0, 3.0, 6.0], [4.0, 9.0, 15.0, 22.0]]
"""

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)])
found, right = x.cumsum(-1).full_tensor().tolist(), x.cumsum(1).full_tensor().tolist()
if mesh.get_rank() == 0:
    print(found, right, sep="\n")
