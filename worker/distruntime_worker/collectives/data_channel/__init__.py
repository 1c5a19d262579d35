"""The data channels that come with a worker, one a file, and how one is found by its name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys

import torch
import torch.distributed

from distruntime.errors import ConfigurationError
from distruntime.wire.data_channel import (
    Factory,
    checked_class,
    entry_point,
    entry_point_names,
    registered,
    registered_names,
)
from distruntime.wire.messages import ChannelOffer

from ...machine import accelerator

log = logging.getLogger("distruntime.worker")

# Every mpirun puts one of these into the environment.
_MPIRUN = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")

# Torch reads by either name how many operations its flight recorder keeps.
_RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

# By default torch ends the whole process when a collective of NCCL fails or takes too long, when a device
# reports an error, or when its own watching thread is held up. One lost worker would cost all of its groups
# their workers. This runtime ends the group and says why, and it limits the time itself. Torch reads these
# when a group is made.
_PROCESS_LIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}

# Each name has its module and its class. The module is imported on demand: mpi4py starts MPI when it is
# imported.
_SHIPPED = {
    "gloo": (".gloo", "Gloo"),
    "nccl": (".torch_group", "NCCL"),
    "xccl": (".torch_group", "XCCL"),
    "tcp": (".tcp", "TCP"),
    "tcp+tls": (".tls", "TLS"),
    "mpi": (".mpi", "MPI"),
    "relay": (".relay", "Relay"),
}


def _missing(name: str) -> str:
    """Return why a shipped channel cannot be had here, or nothing."""
    if name in ("gloo", "nccl", "xccl") and not torch.distributed.is_available():
        return f"torch {torch.__version__} was built without torch.distributed"
    if name == "gloo" and not torch.distributed.is_gloo_available():
        return f"torch {torch.__version__} was built without gloo"
    if name == "nccl" and not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if name == "nccl" and accelerator.find().kind != "cuda":
        return "no CUDA device is here"
    if name == "xccl" and not torch.distributed.is_xccl_available():
        return f"torch {torch.__version__} was built without XCCL"
    if name == "xccl" and accelerator.find().kind != "xpu":
        return "no XPU is here"
    if name == "tcp+tls" and importlib.util.find_spec("cryptography") is None:
        return "cryptography is not installed: pip install cryptography"
    if name == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py, and start the workers by mpirun"
    if name == "mpi" and not any(variable in os.environ for variable in _MPIRUN):
        return "it was not started by mpirun: mpirun -n 2 distruntime-worker --master ADDRESS"
    return ""


def find(name: str) -> Factory:
    """Return the data channel of that name.

    Raise `ConfigurationError`, saying why, if it cannot be had here.
    """
    found = registered(name)
    if found is not None:
        return found
    if name in _SHIPPED:
        why = _missing(name)
        if why:
            raise ConfigurationError(f"the data channel {name!r} is not available on this worker: {why}")
        module, cls = _SHIPPED[name]
        try:
            return checked_class(name, getattr(importlib.import_module(module, __package__), cls))
        except (ImportError, OSError, RuntimeError) as error:
            # A library does not load.
            raise ConfigurationError(
                f"the data channel {name!r} does not load on this worker: {error}"
            ) from error
    found = entry_point(name)
    if found is None:
        raise ConfigurationError(
            f"there is no data channel {name!r} on this worker: it has {', '.join(names())}"
        )
    return found


def prepare() -> None:
    """Make this process ready for groups, and let it outlive their failures. Start MPI.

    What the user has set in the environment stays. MPI is started if `mpirun` has started this worker. It
    waits there for all that `mpirun` starts, and the master would wait with it.
    """
    # Members on one worker use torch's groups from several threads at once. The recorder of torch 2.11 writes
    # into a table without its lock when a group runs its first operation, and the worker dies by SIGSEGV.
    if not any(variable in os.environ for variable in _RECORDED):
        os.environ[_RECORDED[0]] = "0"
    for variable, value in _PROCESS_LIVES.items():
        os.environ.setdefault(variable, value)
    if not _missing("mpi"):
        try:
            find("mpi")
        except ConfigurationError as error:
            log.warning("%s", error)


def names() -> list[str]:
    """Return the names of the data channels that this worker has."""
    shipped = [name for name in _SHIPPED if not _missing(name)]
    return [*shipped, *(n for n in [*registered_names(), *entry_point_names()] if n not in shipped)]


def report(name: str) -> ChannelOffer:
    """Return whether a data channel can be had here, and what it can do."""
    python = list(sys.version_info[:2])
    try:
        return ChannelOffer("", find(name).capabilities.wire(), python)  # type: ignore[attr-defined]
    except ConfigurationError as error:
        return ChannelOffer(str(error), None, python)
