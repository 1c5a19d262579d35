"""What a program returns: tensors without the graph that made them."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import UsageError
from ..log.handle import Handle
from ..operators.proxies import wrap
from ..tensors.tensor import DistributedTensor

# It stands for whatever the graph would have begun with.
_leaf = torch.zeros((), requires_grad=True, device="cpu")


class _Left(torch.autograd.Function):
    """The end of a graph that stayed in a program."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, leaf: torch.Tensor, handle: Handle, name: str
    ) -> torch.Tensor:
        ctx.program = name  # type: ignore[attr-defined]
        out: torch.Tensor = wrap(DistributedTensor, handle)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> NoReturn:
        name = ctx.program  # type: ignore[attr-defined]
        raise UsageError(
            f"backward through what the program {name!r} has returned: its graph stays in the program, which "
            "is replayed as one instruction. Call backward() inside the program, and return the gradients or "
            "leave them in .grad; or return x.detach()"
        )


def given(handle: Handle, name: str, wants_grad: bool) -> DistributedTensor:
    """Return a new proxy of what a program returns. Its backward raises if the value had a graph."""
    if wants_grad and torch.is_grad_enabled():
        found: DistributedTensor = _Left.apply(_leaf, handle, name)  # type: ignore[no-untyped-call]
        return found
    plain: DistributedTensor = wrap(DistributedTensor, handle)
    return plain
