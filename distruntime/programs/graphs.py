"""What a program returns: tensors without the graph that made them."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import UsageError
from ..log.handle import Handle
from ..operators.proxies import wrap, wrap_within
from ..tensors.tensor import DistributedTensor

# It stands for whatever the graph would have begun with.
_leaf = torch.zeros((), requires_grad=True, device="cpu")


class _Left(torch.autograd.Function):
    """The end of a graph that stayed in a program."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        leaf: torch.Tensor,
        handle: Handle,
        name: str,
        base: DistributedTensor | None,
    ) -> torch.Tensor:
        ctx.program = name  # type: ignore[attr-defined]
        return _plain(handle, base)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> NoReturn:
        name = ctx.program  # type: ignore[attr-defined]
        raise UsageError(
            f"backward through what the program {name!r} has returned: its graph stays in the program, which "
            "is replayed as one instruction. Call backward() inside the program, and return the gradients or "
            "leave them in .grad; or return x.detach()"
        )


def _plain(handle: Handle, base: DistributedTensor | None, view: object = None) -> DistributedTensor:
    found: DistributedTensor
    if base is None or base._handle.storage is not handle.storage:
        found = wrap(DistributedTensor, handle)
    else:
        found = wrap_within(DistributedTensor, handle, base, view)
    return found


def given(
    handle: Handle, name: str, wants_grad: bool, base: DistributedTensor | None = None, view: object = None
) -> DistributedTensor:
    """Return a new proxy of what a program returns. Its backward raises if the value had a graph.

    If it is in the memory of `base`, autograd counts the writes to both together: see `wrap_within`.
    """
    if wants_grad and torch.is_grad_enabled():
        found: DistributedTensor = _Left.apply(_leaf, handle, name, base)  # type: ignore[no-untyped-call]
        return found
    return _plain(handle, base, view)
