"""What the accelerators of this machine are, and what memory they have: their own, and the host's that they
read and write by themselves.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from .accelerator import MPS, asynchronous, in_use, module

log = logging.getLogger("distruntime.worker")

# Torch's texts call a dtype so.
_SAID = {"float64": ("float64", "Double", "double", "fp64"), "bfloat16": ("bfloat16", "BFloat16")}


class Properties(NamedTuple):
    """What a device is. A text is "" and a number is 0 where its kind does not say."""

    name: str
    total: int
    major: int
    minor: int
    processors: int
    uuid: str
    # The device computes in float64.
    doubles: bool


def properties(device: torch.device) -> Properties:
    """Return what a device is. This opens no context on it."""
    of_kind = module(device)
    if device.type == MPS:
        name = getattr(torch.backends.mps, "get_name", lambda: "")() or "Apple GPU"
        cores = getattr(torch.backends.mps, "get_core_count", lambda: 0)()
        return Properties(name, torch.mps.recommended_max_memory(), 0, 0, cores, "", False)
    read = getattr(of_kind, "get_device_properties", None)
    found = read(device) if read is not None else None

    def number(*names: str) -> int:
        return next((int(getattr(found, name)) for name in names if hasattr(found, name)), 0)

    return Properties(
        str(getattr(found, "name", "") or device.type),
        number("total_memory"),
        number("major"),
        number("minor"),
        number("multi_processor_count", "gpu_subslice_count"),
        str(getattr(found, "uuid", "") or ""),
        bool(getattr(found, "has_fp64", True)),
    )


def lacks(device: torch.device, found: Properties) -> list[str]:
    """Return the dtypes that a device with these properties cannot compute in, as far as torch says so."""
    # `torch.cuda.is_bf16_supported` says from when on NVIDIA's devices do not emulate it.
    old = device.type == "cuda" and not torch.version.hip and 0 < found.major < 8
    return [*([] if found.doubles else ["float64"]), *(["bfloat16"] if old else [])]


def lacking(devices: Iterable[torch.device], said: str) -> str:
    """Return which of these devices lacks a dtype that an error's text names; "" if none does."""
    for device in devices:
        if asynchronous(device):
            for dtype in lacks(device, properties(device)):
                if any(word in said for word in _SAID[dtype]):
                    return f"{device} does not compute in {dtype}"
    return ""


def capability(found: Properties) -> str:
    """Return the compute capability, as "9.0", where the kind has such."""
    return f"{found.major}.{found.minor}" if found.major else ""


def memory(device: torch.device, found: Properties) -> tuple[int, int]:
    """Return total and free bytes of a device whose properties are `found`.

    The driver tells the free memory within a context only. So a device that is not in use is asked by another
    way, or counts as free where there is no such way.
    """
    of_kind = module(device)
    if device.type == MPS:
        return found.total, max(0, found.total - torch.mps.driver_allocated_memory())
    if device in in_use():
        try:
            free, total = torch.accelerator.get_memory_info(device)
            return total, free
        except RuntimeError as error:
            _unless_lost(error)
            return found.total, found.total - _figure(device, "memory_reserved")
    if not _has_library(device.type):
        return found.total, found.total
    try:
        return found.total, max(0, found.total - int(of_kind.device_memory_used(device)))
    # The libraries that tell it have errors without another base. Some devices cannot tell (MIG's parts), and
    # the greeting must go on.
    except Exception as error:
        log.debug("%s does not tell its free memory: %s", device, error)
        return found.total, found.total


def allocated(device: torch.device) -> list[int]:
    """Return [allocated, most allocated, reserved, most reserved] bytes of torch's allocator on a device."""
    if device.type == MPS:
        held, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return [held, held, reserved, reserved]
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return [_figure(device, name) for name in names]


def reset_peak(device: torch.device) -> None:
    """Let the peaks of `allocated` begin anew."""
    if device.type != MPS:
        torch.accelerator.reset_peak_memory_stats(device)


def empty_cache() -> None:
    """Give back what torch's allocators hold for nobody, of the devices in use and of pinned memory."""
    devices = in_use()
    if not devices:
        return
    of_kind = module(devices[0])
    # An allocator that `torch.accelerator` does not know has its own.
    (getattr(of_kind, "empty_cache", None) or torch.accelerator.empty_cache)()
    empty_pinned()


def keep_guard() -> None:
    """Have torch make its stand-in for CUDA's devices now, in the thread that lives longest.

    A torch that is built for CUDA makes it on a machine without a GPU, in the first thread that traces with
    fake tensors. It ends with that thread, and whoever traces later reads it still: torch 2.11 then ends the
    process by SIGSEGV.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def forget_workspaces() -> None:
    """Let cuBLAS give its workspaces back to torch's allocator: 32 MiB for each stream on a GPU of 2024."""
    if any(device.type == "cuda" for device in in_use()):
        torch._C._cuda_clearCublasWorkspaces()


def busy(device: torch.device) -> float | None:
    """Return how much of the last second a device ran kernels, in percent; None where nobody knows."""
    if not _has_library(device.type):
        return None
    try:
        return float(module(device).utilization(device))
    # The library's errors have no other base, and the reader must go on: some devices cannot tell, such as
    # parts of one (MIG).
    except Exception as error:
        log.debug("%s does not tell how busy it is: %s", device, error)
        return None


def _has_library(kind: str) -> bool:
    """Whether torch can ask about devices without a context: not every machine has the Python package that it
    asks.
    """
    if not hasattr(torch.get_device_module(kind), "device_memory_used"):
        return False
    package = {"cuda": "amdsmi" if torch.version.hip else "pynvml", "xpu": "pyzes"}.get(kind)
    return package is None or importlib.util.find_spec(package) is not None


def _figure(device: torch.device, name: str) -> int:
    try:
        return int(getattr(torch.accelerator, name)(device))
    except RuntimeError as error:
        # The allocator of this kind keeps no figures.
        _unless_lost(error)
        return 0


def _unless_lost(error: RuntimeError) -> None:
    """Raise an error of the device itself again."""
    if isinstance(error, torch.AcceleratorError):
        raise error


# -- memory of the host that devices read and write by themselves ----------------------------------


@cache
def has_pinned_memory(device: torch.device) -> bool:
    """Whether copies from and to pinned memory run in the order of the device's streams."""
    return asynchronous(device) and device.type != MPS


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return new memory of the host from which and into which copies run on a stream.

    Torch's allocator keeps the block, and uses it again when the copies have run.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def empty_pinned() -> None:
    """Give back the pinned memory that torch's allocator holds for nobody."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is None:
        # Torch 2.11 has no public name for it, and builds for some kinds have not this one either.
        empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
