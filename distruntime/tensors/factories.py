"""The tensor classes of PyTorch's RFC 241, for new tensors on the current node."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from ..errors import UsageError, without_our_frames
from ..log.current import DeviceLike, device_name
from ..log.handle import Residence
from ..session.session import active_session
from ..session.spelling import named
from .tensor import DistributedTensor


class TensorClass(Protocol):
    """Makes a tensor on the current node from sizes or from a list of data."""

    __name__: str

    def __call__(self, *args: object, device: DeviceLike | None = None) -> DistributedTensor:
        """Return a new tensor."""


def _target(device: DeviceLike | None) -> Residence:
    places = active_session().places
    if device is None:
        return places.current(like_torch=False)
    found = named(places, device)
    if found is not None:
        return found
    return places.residence(places.place(places.current().place.node, device_name(device)))


def _class(name: str, dtype: torch.dtype) -> TensorClass:
    @without_our_frames
    def make(*args: object, device: DeviceLike | None = None) -> DistributedTensor:
        place = _target(device)
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            # What torch makes at a place of the session is a proxy, here and below.
            return args[0].to(dtype).to(place.device)  # type: ignore[return-value]
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size):
            return torch.tensor(args[0], dtype=dtype, device=place.device)  # type: ignore[return-value]
        given = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        sizes = [n for n in given if isinstance(n, int) and not isinstance(n, bool)]
        if len(sizes) != len(given):
            raise UsageError(
                f"{name} takes sizes, as in {name}(20, 20), or a list of data, as in {name}([1, 2]); "
                f"got {args!r}"
            )
        return torch.empty(sizes or [0], dtype=dtype, device=place.device)  # type: ignore[return-value]

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"Return a new {dtype} tensor on the current node: of the given sizes and uninitialised, "
        "or of a list of data.\n\n"
        '`device` is -1 or "cpu" for the node\'s CPU (the default), k or "cuda:k" for a GPU. Return at once.'
    )
    return make


FloatTensor = _class("FloatTensor", torch.float32)
DoubleTensor = _class("DoubleTensor", torch.float64)
HalfTensor = _class("HalfTensor", torch.float16)
BFloat16Tensor = _class("BFloat16Tensor", torch.bfloat16)
ByteTensor = _class("ByteTensor", torch.uint8)
CharTensor = _class("CharTensor", torch.int8)
ShortTensor = _class("ShortTensor", torch.int16)
IntTensor = _class("IntTensor", torch.int32)
LongTensor = _class("LongTensor", torch.int64)
BoolTensor = _class("BoolTensor", torch.bool)

__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
]
# Completion at a prompt offers these.
__dir__ = partial(sorted, __all__)
