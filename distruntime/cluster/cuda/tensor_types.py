"""The old names of types: `torch.cuda.FloatTensor` and the like."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import without_our_frames
from ...tensors.tensor import DistributedTensor
from .places import current_place, place_of
from .replaced import Function

TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "CharTensor"),
    *("ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


class _Type(type):
    """The kind of `torch.cuda.FloatTensor` and the like, with which old scripts make tensors."""

    dtype: torch.dtype

    @without_our_frames
    def __call__(cls, *args: Any) -> torch.Tensor:  # type: ignore[explicit-any]
        place = current_place()
        if all(isinstance(size, int) for size in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device=place)
        if isinstance(args[0], DistributedTensor):
            return args[0].to(place, dtype=cls.dtype)
        local: torch.Tensor = getattr(torch, cls.__name__)(*args)
        return local.to(place)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DistributedTensor) and instance.dtype is cls.dtype


def type_named(name: str) -> _Type:
    made = _Type(name, (), {"__module__": "torch.cuda"})
    made.dtype = getattr(torch, name).dtype
    return made


def _dtype_there(kind: object) -> torch.dtype | None:
    """Return the dtype of a type of tensors on "cuda", by its class or its name; None for any other."""
    if isinstance(kind, str) and kind.startswith(("torch.cuda.", "torch.remote.")):
        local = getattr(torch, kind.rpartition(".")[2], None)
        dtype: torch.dtype | None = getattr(local, "dtype", None)
        return dtype
    return kind.dtype if isinstance(kind, _Type) else None


def typed(own: Function) -> Function:
    @functools.wraps(own)
    @without_our_frames
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[explicit-any]
        dtype = _dtype_there(args[0] if args else kwargs.get("dtype"))
        if dtype is None:
            return own(self, *args, **kwargs)
        return self.to(self.device if isinstance(self, DistributedTensor) else place_of(None), dtype=dtype)

    return call


def default_type(own: Function) -> Function:
    there = [False]

    @functools.wraps(own)
    def call(kind: object, /) -> None:
        dtype = _dtype_there(kind)
        if dtype is not None:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda")
        else:
            own(kind)
            if there[0]:
                torch.set_default_device(None)
        there[0] = dtype is not None

    return call
