"""`torch.accelerator` in a session: its functions answer as those of `torch.remote` do.

torch's own ask C++ for devices and allocators of this process. `is_available()` stays torch's own, and so is
False where this process has no GPU: loaders and optimizers of local tensors ask it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..log.current import asked_by_fakes
from ..session.session import active
from .device_module import RemoteModule, Where

# The names in torch.accelerator, and those of the functions of torch.remote that answer.
_ANSWERS = {
    "synchronize": "synchronize",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "current_stream": "current_stream",
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
}
_Function = Callable[..., object]  # type: ignore[explicit-any]


def _remote() -> bool:
    if not active or active[0].closed is not None or asked_by_fakes.get():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "remote"


def _answering(own: _Function, remote: _Function) -> _Function:
    @functools.wraps(own)
    def answer(*args: object, **kwargs: object) -> object:
        return remote(*args, **kwargs) if _remote() else own(*args, **kwargs)

    return answer


def _memory_stats(module: RemoteModule, device: Where = None) -> OrderedDict[str, int]:
    """Return the figures that there are, under torch's names."""
    return OrderedDict(
        {
            "allocated_bytes.all.current": module.memory_allocated(device),
            "allocated_bytes.all.peak": module.max_memory_allocated(device),
            "reserved_bytes.all.current": module.memory_reserved(device),
            "reserved_bytes.all.peak": module.max_memory_reserved(device),
        }
    )


def _module_of(own: _Function, remote: RemoteModule) -> _Function:
    """Return torch's `get_device_module`, which without a device asks C++ for this process's accelerator."""

    @functools.wraps(own)
    def get_device_module(device: torch.device | str | None = None) -> object:
        return remote if device is None and _remote() else own(device)

    return get_device_module


def install_accelerator(module: RemoteModule) -> None:
    """Put these in torch's place."""
    theirs = torch.accelerator
    for name, answer in _ANSWERS.items():
        setattr(theirs, name, _answering(getattr(theirs, name), getattr(module, answer)))
    theirs.memory_stats = _answering(  # type: ignore[assignment]
        theirs.memory_stats, functools.partial(_memory_stats, module)
    )
    torch.get_device_module = _module_of(torch.get_device_module, module)  # type: ignore[assignment]
    own = theirs.device_index

    def device_index(device: int | None, /) -> AbstractContextManager[None]:
        if not _remote():
            return own(device)
        return nullcontext() if device is None else module.device(device)

    theirs.device_index = device_index  # type: ignore[assignment, misc]
