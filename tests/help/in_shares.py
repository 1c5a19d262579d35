"""The optimizer whose state the members of a mesh share, as docs/meshes.md has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import distruntime as dr

__all__ = ["InShares", "Partial"]


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
            p.copy_(share.full_tensor())  # type: ignore[attr-defined]
