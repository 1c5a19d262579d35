"""An optimizer whose state the members of a mesh share (ZeRO-1), while each keeps all parameters.

    $ python examples/24_state_in_shares.py
    weight (8, 4), and of its momentum (4, 4) at each of 2 members
    largest difference: parameters 1.5e-08

The last dimension of the mesh shares the state out, such as the GPUs of a node. `gradients=Partial("avg")`
takes each member's own gradients and reduces each share straight to its member. `dtype=torch.float32` keeps
the shares of bfloat16 parameters as float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import distruntime as dr


class InShares:
    """An optimizer of torch's, of whose state each member of a mesh keeps its share."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        kind: type[torch.optim.Optimizer],
        mesh: dr.mesh.DeviceMesh,
        gradients: Placement | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.params, self.mesh = list(params), mesh
        self.gradients, self.dtype = gradients or Replicate(), dtype
        self.shares = [self.share(p.detach(), Replicate()) for p in self.params]
        self.optimizer = kind(self.shares, **options)

    def share(self, t: torch.Tensor, now: Placement) -> torch.Tensor:
        """Return each member's share of a tensor."""
        t, n = t.to(self.dtype or t.dtype), self.mesh.ndim
        whole = DTensor.from_local(t, self.mesh, [now] * n, run_check=False)
        return whole.redistribute(placements=[*[Replicate()] * (n - 1), Shard(0) if t.ndim else Replicate()])

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by their gradients."""
        for p, share in zip(self.params, self.shares):
            share.grad = None if p.grad is None else self.share(p.grad, self.gradients)
        self.optimizer.step()
        for p, share in zip(self.params, self.shares):
            p.copy_(share.full_tensor())


def main() -> None:
    with dr.init_master_worker(world_size=1, simulate_cuda=2, quiet=True):
        mesh = dr.init_device_mesh("cuda", (2,))
        torch.manual_seed(0)
        serial = torch.nn.Linear(4, 8)
        model = torch.nn.Linear(4, 8).to(mesh.device)
        model.load_state_dict(serial.state_dict())
        optimizer = InShares(model.parameters(), torch.optim.AdamW, mesh, lr=0.01)
        alone = torch.optim.AdamW(serial.parameters(), lr=0.01)
        for _ in range(3):
            x = torch.randn(16, 4)
            for each, where in ((model, mesh.device), (serial, "cpu")):
                each.zero_grad()
                each(x.to(where)).square().mean().backward()
            optimizer.step()
            alone.step()
        momentum = optimizer.optimizer.state[optimizer.shares[0]]["exp_avg"].to_local()
        shape, part = tuple(model.weight.shape), tuple(momentum.shape)
        print(f"weight {shape}, and of its momentum {part} at each of {mesh.size()} members")
        apart = max(
            (p.detach().cpu() - q).abs().max().item() for p, q in zip(model.parameters(), serial.parameters())
        )
        print(f"largest difference: parameters {apart:.1e}")


if __name__ == "__main__":
    main()
