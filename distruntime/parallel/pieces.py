"""Tensors that all members of a line hold alike, cut into pieces: one for each member, padded to one size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch.distributed.tensor import DTensor

from ..errors import NotSupportedError, UsageError
from ..mesh import lines as collectives
from ..mesh.line_groups import Lines
from ..mesh.mesh import DeviceMesh
from ..tensors.tensor import DistributedTensor


@final
class Pieces:
    """How a list of tensors is cut over the members of each line.

    Member k of n has the k-th n-th of each tensor's numbers. The last pieces end with zeros where n does not
    divide the tensor. A tensor without dimensions is one number, and every member has it: an optimizer's
    state of it has no dimensions either, so nobody could tell what of that is cut. One collective moves the
    pieces of all tensors of one dtype.
    """

    def __init__(self, lines: Lines, like: Sequence[torch.Tensor]) -> None:
        self._lines, self._shapes = lines, [tensor.shape for tensor in like]
        self._rank = lines.ranks().reshape(1)
        self.lengths = [-(-shape.numel() // lines.size) for shape in self._shapes]

    def own(self, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> list[torch.Tensor]:
        """Return each member's pieces, copies of them. `at` says which of the tensors these are."""
        rows = self._rows(tensors, at).index_select(0, self._rank)[0]
        return self._split(rows, at)

    def reduced(self, tensors: Sequence[torch.Tensor], at: Sequence[int], op: str) -> list[torch.Tensor]:
        """Return each member's pieces of the reduction of what the members of its line have."""
        return self._split(collectives.reduce_scatter(self._lines, self._rows(tensors, at), op)[0], at)

    def whole(self, pieces: Sequence[torch.Tensor], at: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors whose pieces the members have, whole at each member."""
        rows = collectives.all_gather(self._lines, torch.cat([piece.reshape(-1) for piece in pieces])[None])
        parts = rows.split([self.lengths[k] for k in at], 1)
        return [
            part.reshape(-1)[: self._shapes[k].numel()].view(self._shapes[k])
            for part, k in zip(parts, at, strict=True)
        ]

    def _rows(self, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> torch.Tensor:
        """Return a matrix with a row for each member."""
        rows = []
        for tensor, k in zip(tensors, at, strict=True):
            if not self._shapes[k]:
                rows.append(tensor.expand(self._lines.size, 1))
                continue
            lacking = self.lengths[k] * self._lines.size - tensor.numel()
            flat = (
                torch.nn.functional.pad(tensor.reshape(-1), (0, lacking)) if lacking else tensor.reshape(-1)
            )
            rows.append(flat.view(self._lines.size, self.lengths[k]))
        return torch.cat(rows, 1)

    def _split(self, row: torch.Tensor, at: Sequence[int]) -> list[torch.Tensor]:
        parts = row.split([self.lengths[k] for k in at])
        return [(part if self._shapes[k] else part[0]).clone() for part, k in zip(parts, at, strict=True)]


def require_on(mesh: DeviceMesh, parameters: Iterable[torch.Tensor], who: str) -> None:
    """Raise unless all members of a mesh hold these parameters whole. `who` asks for that."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            raise NotSupportedError(
                f"{who} takes parameters that all members hold whole, got a DTensor: fully_shard and "
                "parallelize_module shard an optimizer's state with the parameters, so take the optimizer "
                "itself"
            )
        if not isinstance(parameter, DistributedTensor) or parameter.device != mesh.device:
            where = parameter.place if isinstance(parameter, DistributedTensor) else parameter.device
            raise UsageError(f"{who} needs parameters on its mesh, got one on {where}: model.to(mesh.device)")
