"""Lazy modules (`nn.LazyConv2d`): parameters without a shape yet, which become remote when they get one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeGuard

import torch
from torch.nn import parameter as _parameter
from torch.nn.parameter import is_lazy

from ..tensors.parameters import without_shape
from ..tensors.subclasses import origin_of
from ..tensors.tensor import DistributedTensor


class _Uninitialized(Protocol):
    """A parameter or buffer without a shape, and where it will live if that is a worker."""

    data: torch.Tensor
    _remote: torch.device | None


# torch's module does not list it among its names.
_mixin = _parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_materialize: Callable[
    [torch.Tensor, Sequence[int], torch.device | str | int | None, torch.dtype | None], None
] = _mixin.materialize


def _is_uninitialized(value: object) -> TypeGuard[_Uninitialized]:
    return isinstance(value, torch.Tensor) and is_lazy(value)


@contextmanager
def set_aside(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Keep uninitialized parameters and buffers out of a conversion, and write on each where it will live."""
    # Each entry has the module's own dict, the name in it, and the uninitialized tensor.
    aside: list[tuple[dict[str, object], str, _Uninitialized]] = []
    for part in module.modules():
        # Only `None`, or what was there, is put into either.
        owners: list[dict[str, object]] = [part._parameters, part._buffers]  # type: ignore[list-item]
        for owner in owners:
            aside += [(owner, name, value) for name, value in owner.items() if _is_uninitialized(value)]
    for owner, name, value in aside:
        sample = fn(
            torch.empty(
                0, dtype=value.data.dtype, device=getattr(value, "_remote", None) or value.data.device
            )
        )
        value._remote = sample.device if isinstance(sample, DistributedTensor) else None
        if isinstance(value, DistributedTensor) and value._remote is None:
            # It was made on a worker, and leaves it before it has a shape.
            kind = origin_of(type(value))
            torch.utils.swap_tensors(value, without_shape(kind, value.requires_grad, sample))
            owner[name] = None
            continue
        # What has no shape yet stays where it is. It takes the dtype, `.half()`, with it.
        value.data = (
            sample if value._remote is None else torch.empty(0, dtype=sample.dtype, device=value.data.device)
        )
        owner[name] = None
    try:
        yield
    finally:
        for owner, name, value in aside:
            owner[name] = value


def materialize(
    self: torch.Tensor,
    shape: Sequence[int],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a parameter its shape, as torch does, also one that was sent to a worker before it had a shape."""
    born_there = isinstance(self, DistributedTensor)
    remote = self.device if born_there else getattr(self, "_remote", None)
    if remote is None or (device is not None and not born_there):
        _materialize(self, shape, device, dtype)
        return
    remote = remote if device is None else device
    fresh = torch.empty(shape, device=remote, dtype=dtype or self.data.dtype)
    if isinstance(self, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, self.requires_grad)
    torch.utils.swap_tensors(self, fresh)


def install_materialize() -> None:
    """Put `materialize` in torch's place."""
    _mixin.materialize = materialize
