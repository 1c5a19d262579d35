"""Lazy modules (`nn.LazyConv2d`): parameters without a shape yet, which become remote when they get one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import parameter as _parameter
from torch.nn.parameter import is_lazy

from ..tensors.tensor import DistributedTensor

_mixin: Any = _parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_materialize: Any = _mixin.materialize


@contextmanager
def set_aside(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Keep uninitialized parameters and buffers out of a conversion, and write on each where it will live."""
    # The module's own dict, the name in it, and the uninitialized tensor, which has attributes that
    # torch.Tensor lacks.
    aside: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for owner in (part._parameters, part._buffers):
            aside += [
                (owner, name, value) for name, value in owner.items() if value is not None and is_lazy(value)
            ]
    for owner, name, value in aside:
        sample = fn(
            torch.empty(
                0, dtype=value.data.dtype, device=getattr(value, "_remote", None) or value.data.device
            )
        )
        value._remote = sample.device if isinstance(sample, DistributedTensor) else None
        if value._remote is None:
            value.data = sample
        owner[name] = None
    try:
        yield
    finally:
        for owner, name, value in aside:
            owner[name] = value


def materialize(
    self: Any,
    shape: Sequence[int],
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a parameter its shape, as torch does, also one that was sent to a worker before it had a shape."""
    remote = getattr(self, "_remote", None)
    if remote is None or device is not None:
        _materialize(self, shape, device, dtype)
        return
    fresh = torch.empty(shape, device=remote, dtype=dtype or self.data.dtype)
    if isinstance(self, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, self.requires_grad)
    torch.utils.swap_tensors(self, fresh)


def install_materialize() -> None:
    """Put `materialize` in torch's place."""
    _mixin.materialize = materialize
