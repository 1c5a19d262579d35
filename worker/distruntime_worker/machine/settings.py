"""Torch's settings that a master may change (`dr.config`).

They are the whole process's; every session begins with those of its start.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from operator import attrgetter

import torch

from .accelerator import FLAGS

# There may be no more for each core: libgomp ends the process where it cannot make a thread.
_THREADS_PER_CORE = 16
# This is omp_pause_soft of omp.h.
_SOFT = 1


# This is a setting as it travels.
Setting = bool | int | str | None


class PerThread:
    """What torch and the CPU keep for each thread by itself: the number of intra-op threads, and whether
    denormal numbers become zero.

    A new thread takes torch's default number at its first parallel operation and never looks again;
    `set_num_threads` sets that default, and the calling thread's own number. Flushing denormals is a bit in a
    register of each thread, which the threads that it starts inherit. So a thread that executes calls `apply`
    at the start of every stretch of work: 0.1 us when nothing has changed.
    """

    def __init__(self) -> None:
        # It is None until somebody changes one of the two.
        self._wanted: tuple[int, bool] | None = None
        self._applied = threading.local()

    @property
    def num_threads(self) -> int:
        """The number of threads that an operation may use."""
        return torch.get_num_threads() if self._wanted is None else self._wanted[0]

    @property
    def flush_denormal(self) -> bool:
        """Whether denormal numbers become zero."""
        return self._wanted is not None and self._wanted[1]

    def want(self, num_threads: int, flush_denormal: bool) -> None:
        """Set both, for the calling thread at once; raise `RuntimeError` if this machine cannot."""
        most = _THREADS_PER_CORE * (os.cpu_count() or 1)
        if num_threads > most:
            raise RuntimeError(
                f"num_threads={num_threads}: this worker has {os.cpu_count()} cores and takes {most} at most"
            )
        if flush_denormal and not torch.set_flush_denormal(True):
            raise RuntimeError(
                "flush_denormal=True: this worker's CPU, or its torch, cannot flush denormal numbers"
            )
        self._wanted = num_threads, flush_denormal
        self.apply()

    def apply(self) -> None:
        """Bring the calling thread up to date."""
        wanted = self._wanted
        if wanted is None or getattr(self._applied, "settings", None) is wanted:
            return
        num_threads, flush_denormal = wanted
        torch.set_flush_denormal(flush_denormal)
        # This thread's OpenMP threads keep their old bit: without the next lines only its own quarter of a
        # tensor is flushed with four of them (seen on torch 2.13). Where OpenMP cannot be told to drop them
        # (before 5.0), what has run in parallel stays as it is.
        library = ctypes.CDLL(None)
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(_SOFT)
        torch.set_num_threads(num_threads)
        self._applied.settings = wanted


per_thread = PerThread()


def _count(value: Setting) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"num_threads={value!r:.80} is no number")


def _backend(path: str) -> tuple[Callable[[], Setting], Callable[[Setting], None]]:
    """Return what reads and what writes the flag `torch.backends.<path>`."""
    owner, _, flag = path.rpartition(".")
    holder = attrgetter(owner)(torch.backends)
    return lambda: getattr(holder, flag), lambda value: setattr(holder, flag, value)


def _precision() -> str | None:
    """Return the precision of float32 matmul.

    None where TF32 was set apart from it, for which torch has no name and raises.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


# The keys are the names of `dr.config`. The precision of matmul stands before TF32, which it sets too.
_SETTINGS: dict[str, tuple[Callable[[], Setting], Callable[[Setting], object]]] = {
    "num_threads": (
        lambda: per_thread.num_threads,
        lambda value: per_thread.want(_count(value), per_thread.flush_denormal),
    ),
    "flush_denormal": (
        lambda: per_thread.flush_denormal,
        lambda value: per_thread.want(per_thread.num_threads, bool(value)),
    ),
    "float32_matmul_precision": (_precision, lambda value: torch.set_float32_matmul_precision(str(value))),
    **{path.replace(".", "_"): _backend(path) for path in FLAGS},
    "mkldnn_enabled": _backend("mkldnn.enabled"),
    "fill_uninitialized_memory": (
        torch._C._get_deterministic_fill_uninitialized_memory,
        lambda value: torch._C._set_deterministic_fill_uninitialized_memory(bool(value)),
    ),
}

# These are the settings as they were before the first change of this session.
_at_start: dict[str, Setting] = {}
# It counts how often they may have changed.
changes = [0]


def settings() -> list[tuple[str, Setting]]:
    """Return [name, value] of every setting."""
    return [
        *((name, read()) for name, (read, _) in _SETTINGS.items()),
        ("use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled()),
        ("warn_only", torch.is_deterministic_algorithms_warn_only_enabled()),
    ]


def configure(**wanted: Setting) -> None:
    """Change the settings that are named; raise what torch says of a value that cannot be here."""
    if not _at_start:
        _at_start.update({name: value for name, value in settings()})
    _set(wanted)


def restore() -> None:
    """Bring back the settings from before this session's first change."""
    _set(_at_start)
    _at_start.clear()


def _set(wanted: dict[str, Setting]) -> None:
    for name, (_, write) in _SETTINGS.items():
        if wanted.get(name) is not None:
            write(wanted[name])
    if "use_deterministic_algorithms" in wanted:
        torch.use_deterministic_algorithms(
            bool(wanted["use_deterministic_algorithms"]), warn_only=bool(wanted.get("warn_only", False))
        )
    changes[0] += 1
