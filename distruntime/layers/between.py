"""What stands between layers in a `torch.nn.Sequential`: a module for each shard, another partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import primitives
from ..collectives.partition import Partition
from ..errors import UsageError, without_our_frames
from .weights import partition


class Each(torch.nn.Module):
    """Call a module with each shard by itself: `Each(torch.nn.ReLU())`.

    Args:
        module: a module without parameters and buffers that computes element by element, or within what is
            not cut.

    Raises:
        UsageError: a module that has parameters or buffers, since each place would need its own.
    """

    @without_our_frames
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if held:
            raise UsageError(
                f"Each takes a module without parameters and buffers, and {type(module).__name__} has "
                f"{', '.join(held[:3])}: use the layer of dr.nn of that name"
            )
        self.module = module

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the module returns for each shard. Return at once."""
        if isinstance(xs, torch.Tensor):
            raise UsageError("Each takes a list of shards, got one tensor: P.scatter(x) makes shards")
        return [self.module(x) for x in xs]


class Repartition(torch.nn.Module):
    """Cut a tensor in another way: `dr.primitives.repartition` as a layer.

    Args:
        P: how the inputs are partitioned.
        P_y: how the outputs are.
    """

    @without_our_frames
    def __init__(self, P: Partition, P_y: Partition) -> None:
        super().__init__()
        self.P, self.P_y = partition(P), partition(P_y, "P_y")

    @without_our_frames
    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of the same tensor over the other partition. Return at once."""
        return primitives.repartition(xs, self.P, self.P_y)

    def extra_repr(self) -> str:
        """Return what printing the layer shows of it."""
        return f"{self.P!r}, {self.P_y!r}"
