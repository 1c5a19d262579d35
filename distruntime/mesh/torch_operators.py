"""Operators for which torch's DTensor has wrong rules: means of losses, convolutions,
dimensions that are counted from behind.

Each is torch's own mistake, also under torchrun. Here an operator on a mesh's DTensors is computed in another
way. DTensors on other meshes are as torch has them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor
import torch.distributed.tensor.parallel.loss
from torch._decomp import decomposition_table

from ..tensors.uneven import UnevenTensor
from .each_member import home_of

_tensor: Any = torch.distributed.tensor
_parallel_loss: Any = torch.distributed.tensor.parallel.loss
_aten: Any = torch.ops.aten
Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

# torch runs these kernels on each shard as they are. With "mean" they divide by the size of a shard, and then
# the gradients are too large by the number of members. The formulas ask for the size of the whole.
_OF_THE_WHOLE = (
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.binary_cross_entropy_backward.default,
    _aten.soft_margin_loss_backward.default,
)
# torch takes the mean of the shards' means, which is another one where the shards have different sizes.
_MEANS = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.huber_loss.default,
    _aten.binary_cross_entropy.default,
    _aten.binary_cross_entropy_with_logits.default,
    _aten.soft_margin_loss.default,
)


# The values of ATen's enumeration of reductions.
_NONE, _MEAN, _SUM = 0, 1, 2


def prepare(handlers: dict[Any, Handler]) -> None:
    """Put these operators among the handlers of DTensor's dispatcher.

    Raises `AttributeError` for what torch has moved.
    """
    ours: dict[Any, Callable[..., Any]] = {op: _by_formula for op in _OF_THE_WHOLE}
    ours.update({op: _mean for op in _MEANS})
    ours[_aten.nll_loss_forward.default] = ours[_aten.nll_loss2d_forward.default] = _nll_loss
    ours[_aten.convolution.default] = _convolution
    ours[_aten.convolution_backward.default] = _convolution_backward
    for op in (_aten.cumsum, _aten.cumprod, _aten.logcumsumexp):
        ours[op.default] = _scan
    for op in (_aten.any.default, _aten.any.dim, _aten.any.dims):
        ours[op] = _any
    ours[_aten.select_backward.default] = _select_backward
    ours[_aten.fill_.Scalar] = _fill
    ours[_aten._adaptive_avg_pool2d_backward.default] = _pool_backward
    for op in (*_OF_THE_WHOLE, *_MEANS):
        if op not in decomposition_table:
            raise AttributeError(f"torch._decomp has no formula of {op}")
    for op, compute in ours.items():
        handlers[op] = _of_meshes(handlers.get(op), compute)
    kept = dict(handlers)
    kind: Any = type(_tensor.DTensor._op_dispatcher)
    kind._custom_op_handlers = property(_handlers, _set_handlers)
    # Up to torch 2.11 DTensor has no strategy for it, and redistributing below autograd needs one. From 2.15
    # on it has both of another kind.
    strategies = _tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    known = strategies.get(_aten.detach.default)
    if known is not None:
        strategies.setdefault(_aten.detach_.default, known)
    _parallel_loss._disable_custom_loss_ops = _giving_back(_parallel_loss._disable_custom_loss_ops, kept)


def _giving_back(disable: Callable[[], None], kept: dict[Any, Handler]) -> Callable[[], None]:
    """Put our handlers back at the end of `loss_parallel`, which removes the handlers of its operators."""

    @functools.wraps(disable)
    def choose() -> None:
        disable()
        handlers = _tensor.DTensor._op_dispatcher._custom_op_handlers
        handlers.update({op: handler for op, handler in kept.items() if op not in handlers})

    return choose


def _of_meshes(own: Handler | None, compute: Callable[..., Any]) -> Handler:
    """Return what computes an operator of DTensors on one mesh of ours, and leaves others to torch."""

    def choose(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors: list[Any] = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        if not all(
            isinstance(t, _tensor.DTensor)
            and home_of(t._local_tensor) is not None
            and t.device_mesh == tensors[0].device_mesh
            for t in tensors
        ):
            return own(func, args, kwargs) if own is not None else as_torch(func, args, kwargs)
        with torch.no_grad():
            return compute(func, *args, **kwargs)

    return choose


class _AsTorch(threading.local):
    """The operators that this thread computes in torch's way."""

    ops: tuple[Any, ...] = ()


_as_torch = _AsTorch()
_TABLE = "_custom_op_handlers"


def _handlers(dispatcher: Any) -> dict[Any, Handler]:
    """The handlers of DTensor's dispatcher, as the calling thread is to see them.

    Other threads need them meanwhile, so none is taken out. And `context_parallel` puts another table there.
    """
    table: dict[Any, Handler] = vars(dispatcher)[_TABLE]
    if not _as_torch.ops:
        return table
    return {op: handler for op, handler in table.items() if op not in _as_torch.ops}


def _set_handlers(dispatcher: Any, table: dict[Any, Handler]) -> None:
    vars(dispatcher)[_TABLE] = table


def as_torch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute an operator of DTensors as torch does without a handler."""
    before = _as_torch.ops
    _as_torch.ops = (*before, func)
    try:
        return func(*args, **kwargs)
    finally:
        _as_torch.ops = before


def _by_formula(func: Any, *args: Any, **kwargs: Any) -> Any:
    return decomposition_table[func](*args, **kwargs)


def _mean(func: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(getattr(t, "_local_tensor", None), UnevenTensor) for t in args):
        return _by_formula(func, *args, **kwargs)
    return as_torch(func, args, kwargs)


def _local(t: Any, layout: Sequence[Any]) -> Any:
    return None if t is None else t.redistribute(t.device_mesh, layout)._local_tensor


def _as_dtensor(local: Any, mesh: Any, layout: Sequence[Any]) -> Any:
    return None if local is None else _tensor.DTensor.from_local(local, mesh, layout, run_check=False)


def _cut_beside(placements: Sequence[Any], *gathered: int) -> list[Any]:
    """Return the layout in which these dimensions are gathered, and what is Partial is summed."""
    return [
        p if type(p) is _tensor.Shard and p.dim not in gathered else _tensor.Replicate() for p in placements
    ]


def _by_image(placements: Sequence[Any]) -> list[Any]:
    """Return the layout in which the first dimension alone is cut, where it is."""
    return [p if type(p) is _tensor.Shard and p.dim == 0 else _tensor.Replicate() for p in placements]


def _summed_over(layout: Sequence[Any]) -> list[Any]:
    """Return the layout of what each member has computed of its own part, and of which the sum is wanted."""
    return [_tensor.Partial() if p.is_shard() else p for p in layout]


def _nll_loss(func: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """The loss of classes.

    torch takes the average of the shards' means, although each has its own number of targets that count.
    """
    mesh, whole = x.device_mesh, [_tensor.Replicate()] * x.device_mesh.ndim
    classes = min(x.ndim, 2) - 1
    layout = _cut_beside(x.placements, classes) if classes else whole
    # A target has no dimension of classes.
    rows = [_tensor.Shard(p.dim - (p.dim > classes)) if p.is_shard() else p for p in layout]
    local = [_local(x, layout), _local(target, rows), _local(weight, whole)]
    found, count = func(*local, _SUM if reduction == _MEAN else reduction, ignore_index)
    if reduction == _NONE:
        return _as_dtensor(found, mesh, rows), _as_dtensor(count, mesh, whole)
    total, counted = (_as_dtensor(t, mesh, _summed_over(layout)) for t in (found, count))
    if reduction == _SUM:
        return total, counted
    total, counted = total.redistribute(mesh, whole), counted.redistribute(mesh, whole)
    return total / counted, counted


def _convolution(func: Any, x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    """Each member convolves images of its own.

    torch's handler convolves the shards as they are, however they are cut.
    """
    layout = _by_image(x.placements)
    whole = [_tensor.Replicate()] * x.device_mesh.ndim
    found = func(_local(x, layout), _local(weight, whole), _local(bias, whole), *options)
    return _as_dtensor(found, x.device_mesh, layout)


def _convolution_backward(func: Any, grad: Any, x: Any, weight: Any, *options: Any) -> Any:
    mesh = x.device_mesh
    layout = _by_image(x.placements)
    whole = [_tensor.Replicate()] * mesh.ndim
    of_x, of_weight, of_bias = func(_local(grad, layout), _local(x, layout), _local(weight, whole), *options)
    of_x = _as_dtensor(of_x, mesh, layout)
    if of_x is not None:
        # It is cut as the images are, which torch's rule promises.
        of_x = of_x.redistribute(mesh, _cut_beside(x.placements))
    summed = _summed_over(layout)
    return of_x, _as_dtensor(of_weight, mesh, summed), _as_dtensor(of_bias, mesh, summed)


def _pool_backward(func: Any, grad: Any, x: Any) -> Any:
    """The gradient of an adaptive pool. torch takes the height of a single image for its channels."""
    layout = _cut_beside(x.placements, x.ndim - 2, x.ndim - 1)
    return _as_dtensor(func(_local(grad, layout), _local(x, layout)), x.device_mesh, layout)


def _scan(func: Any, x: Any, dim: int, **options: Any) -> Any:
    """Running sums. torch gathers the dimension only if it is not counted from behind."""
    layout = _cut_beside(x.placements, dim % max(x.ndim, 1))
    return _as_dtensor(func(_local(x, layout), dim, **options), x.device_mesh, layout)


def _any(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Whether anything is true. torch leaves a sum of bools, and what multiplies it counts each member."""
    mesh, given = x.device_mesh, [dim] if isinstance(dim, int) else dim
    over = {d % max(x.ndim, 1) for d in given} if given else set(range(x.ndim))
    layout = _cut_beside(x.placements)
    found = func(*(_local(x, layout), *(() if dim is None else (dim, keepdim))))
    partial = [_tensor.Partial("max") if p.is_shard() and p.dim in over else p for p in layout]
    if not keepdim:
        partial = [
            _tensor.Shard(p.dim - sum(d < p.dim for d in over)) if p.is_shard() else p for p in partial
        ]
    whole = [_tensor.Replicate() if p.is_partial() else p for p in partial]
    # Some data channels cannot reduce bools.
    counted = _as_dtensor(found.to(torch.uint8), mesh, partial).redistribute(mesh, whole)
    return counted.to(found.dtype)


def _select_backward(func: Any, grad: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    """The gradient of one index. torch moves the cut dimensions wrongly if it is counted from behind."""
    mesh, dim = grad.device_mesh, dim % len(sizes)
    layout = _cut_beside(grad.placements)
    moved = [_tensor.Shard(p.dim + (p.dim >= dim)) if p.is_shard() else p for p in layout]
    local = _local(grad, layout)
    own = [*local.shape[:dim], sizes[dim], *local.shape[dim:]]
    return _as_dtensor(func(local, own, dim, index), mesh, moved)


def _fill(func: Any, x: Any, value: Any) -> Any:
    """Give all numbers of a tensor one value. Where it is a sum, torch gives each of its terms that value.

    torch's C++ computes 1 - x so, as in a cosine loss.
    """
    mesh, local = x.device_mesh, x._local_tensor
    summed = [mesh.coordinate(k) for k, p in enumerate(x.placements) if p.is_partial("sum")]
    func(local, value)
    if summed:
        local.masked_fill_(sum(summed) > 0, 0)
    return x
