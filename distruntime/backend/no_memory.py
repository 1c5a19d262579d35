"""What torch's C++ asks of memory in this process: pinning, DLPack, nested tensors, storages."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..errors import NotSupportedError, drop_frames, without_our_frames
from ..session.session import active
from ..session.spelling import is_remote
from ..tensors.tensor import DistributedTensor

_pin = torch.Tensor.pin_memory
_dlpack = torch._C._to_dlpack
# It tells of this process's GPUs. Take-over puts another function here, since none is to be reached then.
has_gpu = torch.cuda.is_available


def ignored(name: str) -> None:
    """Hear of what is asked of torch and does nothing here. Take-over puts another function here."""


@functools.wraps(_pin)
def pin_memory(self: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Pin as torch does where a GPU of this process is to copy from it.

    Otherwise return the tensor as it is, also for a place: an upload does not need pinned memory. torch would
    look for memory of the device "remote", and raise.
    """
    if active and not isinstance(self, DistributedTensor):
        if not has_gpu():
            ignored("pin_memory")
            return self
        if device is None or is_remote(device):
            device = "cuda"
    return _pin(self) if device is None else _pin(self, device)


@without_our_frames
def to_dlpack(tensor: torch.Tensor) -> object:
    """Export a tensor as torch does; refuse a remote one."""
    return tensor.__dlpack__() if isinstance(tensor, DistributedTensor) else _dlpack(tensor)


def _local_only(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:  # type: ignore[explicit-any]
    @functools.wraps(make)
    @without_our_frames
    def made(*args: object, device: object = None, **kwargs: object) -> torch.Tensor:
        if is_remote(device):
            raise NotSupportedError(
                "nested tensors live here only; remote tensors are strided. "
                f'Pad them, torch.nn.utils.rnn.pad_sequence(tensors).to("{device}"), or keep a list'
            )
        return make(*args, device=device, **kwargs)

    return made


@without_our_frames
def _refuse_nested(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    raise NotSupportedError(
        "a nested tensor lives here only; remote tensors are strided. Pad it first: "
        'torch.nested.to_padded_tensor(x, 0.0).to("remote")'
    )


def install_no_memory(library: torch.library.Library) -> None:
    """Put these in torch's place."""
    # For "remote" without an index, C++ takes a type whose key has no name here (see `_Guard` in install.py).
    library.impl("_to_copy", _refuse_nested, "NestedTensorPrivateUse1")
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # type: ignore[attr-defined, assignment]
    for name in ("nested_tensor", "as_nested_tensor"):
        setattr(torch.nested, name, _local_only(getattr(torch.nested, name)))


def install_storages() -> None:
    """Have storages on the device "remote" refused, from now on; `TypedStorage` and `.to` make these too.

    torch's C++ would look for this process's allocator for the device, find none, and end the process.
    """
    make = torch.UntypedStorage.__new__

    def checked(cls: type, *args: object, **kwargs: object) -> object:
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "remote":
            try:
                raise NotSupportedError(
                    f"a storage is memory of this process, and {str(device)!r} has none here. Make a tensor: "
                    f'torch.empty(nbytes, dtype=torch.uint8, device="{device}")'
                )
            except NotSupportedError as error:
                drop_frames(error)
                raise
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = checked  # type: ignore[method-assign, assignment]
