"""Gradients of five mean losses of sharded DTensors are too large by the number of ranks.

`mse_loss`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss` and `binary_cross_entropy` of DTensors that
are sharded have gradients that are too large by the number of ranks, if `reduction="mean"`. Values are
right, and `l1_loss` is right. Nothing warns. `torchrun --nproc-per-node 2 mean_losses.py` prints, with torch
2.13.0+cpu:

    mse_loss 2.0
    smooth_l1_loss 2.0
    huber_loss 2.0
    soft_margin_loss 2.0
    binary_cross_entropy 2.0
    l1_loss 1.0

The cause: the operators of the backward pass, such as `aten.mse_loss_backward`, run on each rank's shard as
they are. With "mean" they divide by the number of elements that they see, which is that of a shard. Their
rule has to divide by the number of elements of the whole, for example by their decomposition.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
a, b = torch.rand(6, 5) * 0.8 + 0.1, torch.rand(6, 5) * 0.8 + 0.1
for loss in (
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.l1_loss,
):
    x = a.clone().requires_grad_()
    loss(x, b).backward()
    y = distribute_tensor(a, mesh, [Shard(0)]).requires_grad_()
    loss(y, distribute_tensor(b, mesh, [Shard(0)])).backward()
    ratio = (y.grad.full_tensor() / x.grad).mean().item()
    if mesh.get_rank() == 0:
        print(loss.__name__, ratio)
