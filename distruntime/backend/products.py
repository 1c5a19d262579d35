"""Products of matrices as one instruction: linear layers, `matmul` and `einsum`.

torch makes them of views, a product and more views, and autograd has a node for each. Here one node stands
for those of a linear layer or of a `matmul`, and its backward pass is one instruction, too. The worker takes
both apart as torch does, so results and gradients are torch's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from ..errors import drop_frames
from ..log.tape import recorded
from ..operators.dispatch import dispatch
from ..tensors.tensor import DistributedTensor
from .formulas import Kernel, formula

_aten = torch.ops.aten
LINEAR, MATMUL, EINSUM = _aten.linear.default, _aten.matmul.default, _aten.einsum.default
ADDMM = _aten.addmm.default
_Optional: TypeAlias = "torch.Tensor | None"
# What torch calls a kernel with may be another tensor. `_fit` looks.
_Proxy: TypeAlias = DistributedTensor
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_graphs: Callable[[], bool] = torch._C.is_grad_enabled

# The worker has the kernels: see its `values/products.py`. The functions below, on `meta` tensors, say what
# they return. They also compute gradients that want gradients themselves.
_library = torch.library.Library("distruntime", "FRAGMENT")
_library.define(
    "linear_backward(Tensor grad, Tensor? input, Tensor? weight, bool bias) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "matmul_backward(Tensor grad, Tensor? self, Tensor? other, bool folds, bool columns, bool bias) -> "
    "(Tensor, Tensor, Tensor)"
)


def _fit(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a product of two tensors may be one instruction: both are remote, and nobody looks within."""
    return (
        type(a) is DistributedTensor is type(b)
        # Wrong dtypes are told at once, by the products that the formula is made of.
        and (dtype := a._handle.spec.dtype) is b._handle.spec.dtype
        and dtype.is_floating_point
        # These look at each operator of the formula.
        and not _modes()
        and forward_ad._current_level < 0
    )


def einsum(equation: str, operands: Sequence[torch.Tensor], **kwargs: object) -> object:
    """Issue an einsum of several operands, without a graph, as one instruction instead of 12."""
    try:
        if (
            # An einsum of one operand may be a view of it, which autograd must know.
            len(operands) < 2
            or torch.is_grad_enabled()
            or not all(_fit(operands[0], other) for other in operands[1:])
        ):
            return _einsum(equation, operands, **kwargs)
        return dispatch(DistributedTensor, EINSUM, (), (equation, operands), kwargs)
    except BaseException as error:
        drop_frames(error)
        raise


_einsum = formula(EINSUM)


def _is_recorded() -> bool:
    # A compiler of the worker fuses the formula's operators, and a program's parts are made of them.
    return bool(recorded.name or recorded.traced)


class _Context(FunctionCtx):
    saved_tensors: tuple[_Optional, _Optional]
    needs_input_grad: tuple[bool, ...]
    folds: bool
    columns: bool


def _quick(grad: torch.Tensor) -> bool:
    """Whether the backward of a product is one instruction: nobody wants its own gradient, or its parts."""
    return type(grad) is DistributedTensor and not _graphs() and not _modes() and not _is_recorded()


# -- linear layers -------------------------------------------------------------------------------------------

_linear = formula(LINEAR)


def linear(x: _Proxy, weight: _Proxy, bias: _Proxy | None = None) -> object:
    """Call a linear layer: one instruction instead of 4, and one for its gradients instead of 8."""
    try:
        if not _fit(x, weight) or not (bias is None or _fit(x, bias)):
            return _linear(x, weight, bias)
        if _graphs():
            layout = weight._handle.spec
            size = layout.size
            if (
                len(size) != 2
                or layout.stride != (size[1], 1)
                or (bias is not None and bias._handle.spec.size != size[:1])
                or x.dim() < 2
                or x.numel() < 2
                or not size[0]
                or not x.is_contiguous()
                or _is_recorded()
            ):
                return _linear(x, weight, bias)
            if x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
                return Linear.apply(bias, x, weight)  # type: ignore[attr-defined]
        return dispatch(DistributedTensor, LINEAR, (), (x, weight, bias))
    except BaseException as error:
        drop_frames(error)
        raise


class Linear(_SingleLevelFunction):
    """The node of a linear layer. Its operands are in the order of torch's node: hooks run by it."""

    @staticmethod
    def forward(ctx: _Context, bias: _Optional, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Issue it."""
        _, of_x, of_weight = ctx.needs_input_grad
        # Like torch's nodes it saves what a wanted gradient is made of, and nothing else.
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        found: torch.Tensor = dispatch(DistributedTensor, LINEAR, (), (x, weight, bias))
        return found

    @staticmethod
    def backward(ctx: _Context, grad: _Optional) -> tuple[_Optional, _Optional, _Optional]:
        """Issue the gradients."""
        x, weight = ctx.saved_tensors
        if grad is None:
            return None, None, None
        of_bias = ctx.needs_input_grad[0]
        if _quick(grad):
            args = grad, x, weight, of_bias
            found: tuple[_Optional, ...] = dispatch(DistributedTensor, _LINEAR_BACKWARD, (), args)
            return found[2], found[0], found[1]
        first, second, third = _linear_gradients(grad, x, weight, of_bias)
        return third, first, second


def _linear_gradients(
    grad: torch.Tensor, x: _Optional, weight: _Optional, bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        None if weight is None else rows.mm(weight).view(*grad.shape[:-1], weight.shape[1]),
        None if x is None else rows.t().mm(x.reshape(-1, x.shape[-1])),
        rows.sum(0) if bias else None,
    )


_library.impl("linear_backward", _linear_gradients, "Meta")
_LINEAR_BACKWARD = torch.ops.distruntime.linear_backward.default

# -- products of more than two dimensions --------------------------------------------------------------------

_matmul = formula(MATMUL)


def matmul(a: _Proxy, b: _Proxy) -> object:
    """Multiply: one instruction instead of 6, and one for the gradients instead of 8."""
    try:
        if not _fit(a, b):
            return _matmul(a, b)
        folds = False
        if _graphs():
            left, right = a._handle.spec.size, b._handle.spec.size
            folds = len(right) == 2
            if (
                len(left) < 3
                # torch folds what is contiguous: one product of all rows.
                or (not a.is_contiguous() if folds else left[:-2] != right[:-2])
                or a.numel() < 2
                or not b.numel()
                or _is_recorded()
            ):
                return _matmul(a, b)
            if a.requires_grad or b.requires_grad:
                return Matmul.apply(b, a, folds)  # type: ignore[attr-defined]
        return dispatch(DistributedTensor, MATMUL, (), (a, b))
    except BaseException as error:
        drop_frames(error)
        raise


class Matmul(_SingleLevelFunction):
    """The node of a product. The second operand comes first: torch's nodes run its hooks before."""

    @staticmethod
    def forward(ctx: _Context, b: torch.Tensor, a: torch.Tensor, folds: bool) -> torch.Tensor:
        """Issue it."""
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(a if wanted[0] else None, b if wanted[1] else None)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.folds = folds
        # torch's node keeps the order of the strides in the gradient of what it folds.
        ctx.columns = folds and b.stride() == (1, b.shape[0])
        found: torch.Tensor = dispatch(DistributedTensor, MATMUL, (), (a, b))
        return found

    @staticmethod
    def backward(ctx: _Context, grad: _Optional) -> tuple[_Optional, _Optional, None]:
        """Issue the gradients."""
        a, b = ctx.saved_tensors
        if grad is None:
            return None, None, None
        first, second, _ = _backward_of_product(grad, a, b, ctx.folds, ctx.columns, False)
        return second, first, None


def _backward_of_product(
    grad: torch.Tensor, a: _Optional, b: _Optional, folds: bool, columns: bool, bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    args = grad, a, b, folds, columns, bias
    if _quick(grad):
        found: tuple[_Optional, _Optional, _Optional] = dispatch(
            DistributedTensor, _MATMUL_BACKWARD, (), args
        )
        return found
    return _product_gradients(*args)


def _product_gradients(
    grad: torch.Tensor, a: _Optional, b: _Optional, folds: bool, columns: bool, bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    first = second = None
    if not folds:
        return (
            None if b is None else grad.matmul(b.transpose(-1, -2)),
            None if a is None else a.transpose(-1, -2).matmul(grad),
            None,
        )
    rows = grad.reshape(-1, grad.shape[-1])
    if b is not None:
        first = rows.mm(b.t()).view(*grad.shape[:-1], b.shape[0])
    if a is not None:
        factor = a.reshape(-1, a.shape[-1])
        second = rows.t().mm(factor).t() if columns else factor.t().mm(rows)
    return first, second, rows.sum(0) if bias else None


_library.impl("matmul_backward", _product_gradients, "Meta")
_MATMUL_BACKWARD = torch.ops.distruntime.matmul_backward.default

# -- a product and a sum -------------------------------------------------------------------------------------

# This is no composite: torch's own node makes what is not ours.
_addmm: Kernel = partial(ADDMM._op_dk, torch._C.DispatchKey.Autograd)


def addmm(bias: _Proxy, a: _Proxy, b: _Proxy, **factors: complex) -> object:
    """Multiply matrices and add a row: one instruction for the gradients instead of 5."""
    try:
        if (
            not factors
            and _graphs()
            and _fit(a, b)
            and _fit(a, bias)
            and a.dim() == 2 == b.dim()
            and bias._handle.spec.size == b._handle.spec.size[1:]
            and a.numel() > 1
            and b.numel()
            and a.is_contiguous()
            and b.is_contiguous()
            and (bias.requires_grad or a.requires_grad or b.requires_grad)
            and not _is_recorded()
        ):
            return Addmm.apply(bias, a, b)  # type: ignore[attr-defined]
        return _addmm(bias, a, b, **factors)
    except BaseException as error:
        drop_frames(error)
        raise


class Addmm(_SingleLevelFunction):
    """The node of a product and a sum."""

    @staticmethod
    def forward(ctx: _Context, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Issue it."""
        _, of_a, of_b = ctx.needs_input_grad
        ctx.save_for_backward(a if of_b else None, b if of_a else None)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        found: torch.Tensor = dispatch(DistributedTensor, ADDMM, (), (bias, a, b))
        return found

    @staticmethod
    def backward(ctx: _Context, grad: _Optional) -> tuple[_Optional, _Optional, _Optional]:
        """Issue the gradients."""
        a, b = ctx.saved_tensors
        if grad is None:
            return None, None, None
        first, second, third = _backward_of_product(grad, a, b, True, False, ctx.needs_input_grad[0])
        return third, first, second
