"""The gradients of products: what torch's own nodes compute, in one instruction.

A gradient is wanted where what it is made of is given. Autograd's nodes for the views, the product and the
sum of a linear layer, and for those of a `matmul`, do the same steps on the same layouts. So the results are
equal to the last bit.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

_Optional: TypeAlias = "torch.Tensor | None"


def linear_backward(
    grad: torch.Tensor, x: _Optional, weight: _Optional, bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    """Return the gradients of a linear layer's input, weight and bias."""
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        None if weight is None else rows.mm(weight).view(*grad.shape[:-1], weight.shape[1]),
        None if x is None else rows.t().mm(x.reshape(-1, x.shape[-1])),
        rows.sum(0) if bias else None,
    )


def matmul_backward(
    grad: torch.Tensor, a: _Optional, b: _Optional, folds: bool, columns: bool, bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    """Return the gradients of the two operands of a product, and of a row that is added to each of its rows.

    `folds` says that the second operand has two dimensions, and `columns` that its columns lie together.
    """
    first = second = None
    if folds:
        rows = grad.reshape(-1, grad.shape[-1])
        if b is not None:
            first = rows.mm(b.t()).view(*grad.shape[:-1], b.shape[0])
        if a is not None:
            factor = a.reshape(-1, a.shape[-1])
            second = rows.t().mm(factor).t() if columns else factor.t().mm(rows)
        return first, second, rows.sum(0) if bias else None
    batches = grad.reshape(-1, *grad.shape[-2:])
    if b is not None:
        product = batches.bmm(b.reshape(-1, *b.shape[-2:]).transpose(1, 2))
        first = product.view(*grad.shape[:-1], b.shape[-2])
    if a is not None:
        product = a.reshape(-1, *a.shape[-2:]).transpose(1, 2).bmm(batches)
        second = product.view(*grad.shape[:-2], a.shape[-1], grad.shape[-1])
    return first, second, None
