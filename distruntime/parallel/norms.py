"""The norm of gradients that live on several places and meshes, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..mesh.line_groups import Lines
from .experts import Experts, over_members
from .stage import Stage


def clip(
    stages: Sequence[torch.nn.Module], homes: Sequence[Stage], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale stages' gradients so that their common norm is at most `max_norm`. Return the norm before."""
    gradients = [[p.grad for p in stage.parameters() if p.grad is not None] for stage in stages]
    with torch.no_grad():
        norms = [_norm(stage, norm_type) for stage, of_stage in zip(stages, gradients) if of_stage]
        if not norms:
            return torch.zeros((), device=homes[0].device)
        total = _combined([_at(norm, homes[0]) for norm in norms], norm_type)
        # torch adds the same number, so that a norm of zero divides.
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for of_stage, stage in zip(gradients, homes):
            if of_stage:
                local = [g.to_local() if isinstance(g, DTensor) else g for g in of_stage]
                torch._foreach_mul_(local, _at(factor, stage))
    return total


def _norm(stage: torch.nn.Module, norm_type: float) -> torch.Tensor:
    """Return the norm of one stage's gradients, where the stage is.

    torch computes it for plain tensors, and for DTensors of one mesh. Members have experts of their own.
    """
    along = {
        id(p): module.along
        for module in stage.modules()
        if isinstance(module, Experts)
        for p in module.parameters()
    }
    kinds: dict[Any, list[torch.Tensor]] = {}
    for p in stage.parameters():
        if (g := p.grad) is not None:
            kinds.setdefault(g.device_mesh if isinstance(g, DTensor) else along.get(id(p)), []).append(g)
    found = []
    for kind, alike in kinds.items():
        norm = torch.nn.utils.get_total_norm(alike, norm_type)
        if isinstance(kind, Lines):
            norm = over_members(kind, norm, norm_type)
        found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return _combined(found, norm_type)


def _combined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)


def _at(value: torch.Tensor, stage: Stage) -> torch.Tensor:
    """Return a number, which all members of a mesh have alike, where a stage is."""
    return stage.bring(value, "a norm")  # type: ignore[no-any-return]
