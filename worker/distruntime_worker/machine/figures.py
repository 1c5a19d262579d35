"""What a device has, and what it has given out: the figures that `torch.remote` tells its users.

Also the pages of memory that malloc keeps, and those that it gives back to the machine."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

from . import hardware
from .devices import memory


def keep_pages() -> None:
    """Let glibc's malloc keep the pages of large blocks: fresh ones cost more than the transfer that fills
    them.

    The three settings together bring a 64 MiB frame over loopback from 1.1 to 4.0 GiB/s; two of them do not
    (measured 2026-11, 2 shared cores, glibc 2.36). Elsewhere than on glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        # malloc.h calls these M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX.
        for option, setting in ((-4, 0), (-1, (1 << 31) - 1), (-8, 1)):
            libc.mallopt(option, setting)


def give_pages_back() -> None:
    """Give the pages that malloc has kept back to the machine: what an ended session held, and the holes that
    sessions leave in the heap.

    Without it a worker of sessions that came and went, each with tensors of 4 MB, grew by 4 to 6 MiB with
    every other one, all of it free.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


_PEAK = "VmHWM:"
# The word that makes the kernel begin the peak anew.
_RESET = "5"


def _peak_of_process() -> int:
    """Return the most main memory that this process has had, in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(_PEAK)), 0)
    except OSError:
        return 0


def _cpu_name() -> str:
    """Return the processor's name, or its architecture where the system does not say more."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        found = ""
    return found or platform.processor() or platform.machine()


def memory_figures(device: torch.device) -> list[int]:
    """Return [free, total, allocated, most allocated, reserved, most reserved] of a device, in bytes.

    A CPU has no allocator that counts: it has [free, total, 0, this process's peak, 0, 0].
    """
    if device.type == "cpu":
        total, free = memory()
        return [free, total, 0, _peak_of_process(), 0, 0]
    total, free = hardware.memory(device, hardware.properties(device))
    return [free, total, *hardware.allocated(device)]


def reset_peak(device: torch.device) -> list[int]:
    """Let the peaks of a device begin anew at what it holds now; return its `memory_figures`.

    Raise `OSError` where the system cannot do that for a process's main memory.
    """
    if device.type == "cpu":
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write(_RESET)
    else:
        hardware.reset_peak(device)
    return memory_figures(device)


def empty_cache() -> None:
    """Give back what the allocators hold for nobody: torch's to the devices, and malloc's to the machine."""
    give_pages_back()
    hardware.empty_cache()


def device_properties(device: torch.device) -> list[str | int]:
    """Return [name, total memory, major, minor, multiprocessors] of a device.

    A CPU has its name, the main memory, 0, 0, and its cores.
    """
    if device.type == "cpu":
        return [_cpu_name(), memory()[0], 0, 0, os.cpu_count() or 1]
    found = hardware.properties(device)
    return [found.name, found.total, found.major, found.minor, found.processors]
