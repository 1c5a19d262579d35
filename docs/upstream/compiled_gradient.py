"""Two DTensors with one gradient share its memory behind a compiled backward pass.

AOTAutograd wraps what its backward graph returns at two places in a DTensor for each, and autograd takes each
for its own: writing to one `grad` changes the other. `torchrun --nproc-per-node 2 compiled_gradient.py`
prints, with torch 2.13.0+cpu:

    2.0

Expected is 1.0.
"""

import torch
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
one, other = (distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_() for _ in range(2))
torch.compile(lambda: (one + other).square().sum() / 4, backend="aot_eager")().backward()
one.grad.mul_(2)
found = other.grad.to_local()[0].item()
if mesh.get_rank() == 0:
    print(found)
