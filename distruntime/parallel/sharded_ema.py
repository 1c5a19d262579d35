"""`dr.parallel.ShardedEMA`: the moving average of a model's parameters. Each member keeps its share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UsageError, without_our_frames
from ..mesh.mesh import DeviceMesh
from .pieces import Pieces, require_on


@final
class ShardedEMA:
    """The exponential moving average of a model's parameters, without a second copy of them at each member.

    `update` moves nothing between members. It leaves buffers alone.

    Args:
        model: its parameters are DTensors, as `fully_shard` leaves them, or all members of `mesh` hold them
            alike.
        decay: `update` sets each average to decay * average + (1 - decay) * parameter.
        mesh: the members that share the averages of parameters that are no DTensors: a mesh or a slice.

    Raises:
        UsageError: a parameter is neither a DTensor nor on the mesh, or `decay` is not between 0 and 1.
    """

    @without_our_frames
    def __init__(self, model: nn.Module, decay: float = 0.999, mesh: DeviceMesh | None = None) -> None:
        if not 0 <= decay <= 1:
            raise UsageError(f"decay is a number from 0 to 1, got {decay!r}")
        self.decay, self.updates = decay, 0
        self._named = dict(model.named_parameters())
        whole = {name: p for name, p in self._named.items() if not isinstance(p, DTensor)}
        if whole and mesh is None:
            raise UsageError(f"{next(iter(whole))} is no DTensor: name the mesh that holds it, mesh=")
        if mesh is not None:
            require_on(mesh, whole.values(), "ShardedEMA")
        self._names = list(whole)
        self._pieces = None if mesh is None else Pieces(mesh.lines(), list(whole.values()))
        with torch.no_grad():
            self._averages = dict(zip(self._named, self._shares()))

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self._named.values())
        return f"<ShardedEMA of {count:,} numbers, decay {self.decay}, {self.updates} updates>"

    def _shares(self) -> list[torch.Tensor]:
        """Return each parameter's share, new, in the order of the model."""
        own: dict[str, torch.Tensor] = {}
        for k, name in enumerate(self._names):
            assert self._pieces is not None
            own[name] = self._pieces.own([self._named[name].detach()], [k])[0]
        return [own[name] if name in own else p.detach().clone() for name, p in self._named.items()]

    @without_our_frames
    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters. Return at once."""
        self.updates += 1
        torch._foreach_lerp_(list(self._averages.values()), self._shares(), 1 - self.decay)

    @without_our_frames
    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages by the parameters' names: whole on the mesh, or as DTensors. Return at once."""
        found = dict(self._averages)
        for k, name in enumerate(self._names):
            assert self._pieces is not None
            found[name] = self._pieces.whole([self._averages[name]], [k])[0]
        return found

    @without_our_frames
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take averages that `state_dict` has returned, of a model with the same parameters. Return at once.

        Raises:
            UsageError: names are missing, or are others.
        """
        odd = sorted(set(state_dict) ^ set(self._averages))
        if odd:
            raise UsageError(f"these averages have other names than the model: {', '.join(odd[:5])}")
        for name, average in self._averages.items():
            given = state_dict[name]
            if name in self._names:
                assert self._pieces is not None
                given = self._pieces.own([given.to(self._named[name].device)], [self._names.index(name)])[0]
            average.copy_(given)

    @without_our_frames
    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write the averages into the parameters of a model of this kind on the same mesh. Return at once."""
        averages = self.state_dict()
        for name, parameter in model.named_parameters():
            if name not in averages:
                raise UsageError(f"the model has a parameter {name!r}, of which there is no average")
            parameter.copy_(averages[name])
