"""A convolution of a DTensor that is sharded in space returns parts as if they were the whole.

`F.conv2d` of an image that is sharded along height or width says that its result is replicated, with the
size of the whole. On each rank it is the convolution of that rank's shard alone, and `full_tensor()` has
another shape than the DTensor. Nothing warns. `torchrun --nproc-per-node 2 convolution.py` prints, with
torch 2.13.0+cpu:

    (1, 1, 8, 8) (Replicate(),) (1, 1, 8, 4)

Expected is the convolution of the whole, (1, 1, 8, 8), or an error. It is the same along height, without
padding, and with a stride.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
image, weight = torch.rand(1, 1, 8, 8), torch.rand(1, 1, 3, 3)
y = F.conv2d(
    distribute_tensor(image, mesh, [Shard(3)]), distribute_tensor(weight, mesh, [Replicate()]), padding=1
)
whole = y.full_tensor()
if mesh.get_rank() == 0:
    print(tuple(y.shape), y.placements, tuple(whole.shape))
