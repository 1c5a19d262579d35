"""`torch.remote`, the device module that torch asks about the device type "remote", and `torch.accelerator`.

`torch.remote` answers that no accelerator is available. So code for local tensors (pinned loaders, optimizers
of torch 2.15) does not take the workers for an accelerator of this machine. Factories, checkpointing and
seeds work all the same. In a session the functions of `torch.accelerator` answer as these do: torch's own ask
C++ for devices and allocators of this process. `is_available()` stays torch's own.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..errors import without_our_frames
from ..log.current import asked_by_fakes, mesh_context, node_context
from ..log.handle import Residence
from ..session.session import active, active_session
from ..session.spelling import Where, indexed, set_place
from ..streams.stream import Event, Stream, current_stream, default_stream, stream
from ..streams.synchronize import synchronize_device
from ..tensors.figures import DeviceProperties, figures, properties
from ..tensors.tensor import DistributedTensor
from ..tensors.worker_functions import issue_function
from .random import get_rng_state, manual_seed, set_rng_state


def _residence(device: Where) -> Residence:
    return indexed(active_session().places, device)


class RemoteModule:
    """The functions of `torch.remote`, named as those of `torch.cuda`."""

    __name__ = "torch.remote"
    # Checkpointing saves the random state only of modules that say so.
    _initialized = True

    def is_available(self) -> bool:
        """False: there is no accelerator *here*."""
        return False

    def is_initialized(self) -> bool:
        """Whether there is a session."""
        return bool(active)

    def _is_in_bad_fork(self) -> bool:
        return bool(active) and active[0].foreign

    def device_count(self) -> int:
        """Return how many places have a number: `remote:k` is one for each k below. 0 without a session."""
        return len(active[0].places.own) if active and active[0].closed is None else 0

    def current_device(self) -> int:
        """Return the number of the current place, that of "remote" alone."""
        if asked_by_fakes.get():
            return 0
        return active_session().places.current().number

    def device(self, device: Where) -> AbstractContextManager[None]:
        """Return the context that makes a place current: a place, "remote:1", its number, or `x.device`."""
        residence = _residence(device)
        if residence.node.members:
            return mesh_context(residence, default=False)
        return node_context(residence.place.node, residence.place.local_device)

    @without_our_frames
    def set_device(self, device: Where) -> None:
        """Make a place the one that new tensors go to."""
        set_place(_residence(device).place)

    @without_our_frames
    def synchronize(self, device: Where = None) -> None:
        """Block until a device has done everything issued to it so far."""
        synchronize_device(_residence(device), None)

    def stream(self, stream_: Stream | None) -> AbstractContextManager[object]:
        """Return the context in which a stream is current."""
        return stream(stream_)

    def current_stream(self, device: Where = None) -> Stream:
        """Return the current stream of a device."""
        return current_stream(_residence(device).place)

    def default_stream(self, device: Where = None) -> Stream:
        """Return the stream that a device's instructions go to when no other is current."""
        return default_stream(_residence(device).place)

    def get_device_properties(self, device: Where = None) -> DeviceProperties:
        """Return what kind of device a place is. Block until all that was issued to its node has run."""
        return properties(_residence(device))

    @without_our_frames
    def get_device_name(self, device: Where = None) -> str:
        """Return the name of a place's GPU, or of its CPU. Block as `get_device_properties` does."""
        return properties(_residence(device)).name

    def get_device_capability(self, device: Where = None) -> tuple[int, int]:
        """Return the compute capability of a GPU, (0, 0) of a CPU. Block as `get_device_properties` does."""
        found = properties(_residence(device))
        return found.major, found.minor

    @without_our_frames
    def mem_get_info(self, device: Where = None) -> tuple[int, int]:
        """Return the free and the total memory of a place: of its GPU, or of the machine for a CPU.

        Block until all that was issued to its node has run, as the other figures of memory do.
        """
        return figures(_residence(device))[:2]

    @without_our_frames
    def memory_allocated(self, device: Where = None) -> int:
        """Return the bytes that are given out at a place.

        For a GPU torch's allocator on the worker says so, for all sessions. For a CPU it is what this
        session's values hold. Block as `mem_get_info` does.
        """
        return figures(_residence(device)).allocated

    def max_memory_allocated(self, device: Where = None) -> int:
        """Return the most that `memory_allocated` has been since the start or the last reset.

        For a CPU it is the most main memory that the worker's process has had: with torch itself, with all
        sessions, and with the memory that was freed and that `empty_cache` has not given back. Block as
        `mem_get_info` does.
        """
        return figures(_residence(device)).most_allocated

    def memory_reserved(self, device: Where = None) -> int:
        """Return the bytes that the allocator of a place holds. Block as `mem_get_info` does.

        For a CPU it is the same as `memory_allocated`.
        """
        return figures(_residence(device)).reserved

    def max_memory_reserved(self, device: Where = None) -> int:
        """Return the most that `memory_reserved` has been, as `max_memory_allocated`. Block as that does."""
        return figures(_residence(device)).most_reserved

    def reset_peak_memory_stats(self, device: Where = None) -> None:
        """Let the peaks of a place begin anew, for all sessions there. Block as `mem_get_info` does.

        For a CPU the peak begins at what the worker's process has then, and Linux alone can reset it.
        """
        figures(_residence(device), reset=True)

    def empty_cache(self) -> None:
        """Have every node give back the memory that its allocators hold for nobody. Return at once."""
        if active and active[0].closed is None:
            for node in active[0].nodes:
                if node.failed is None:
                    issue_function(node, "empty_cache", ())

    def manual_seed(self, seed: int) -> None:
        """Seed the workers."""
        manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the workers; `torch.manual_seed` calls this."""
        if active and active[0].closed is None and not active[0].foreign:
            manual_seed(seed)

    def get_rng_state(self, device: Where = None) -> DistributedTensor:
        """Return a snapshot of a place's random state. Return at once."""
        return get_rng_state(_residence(device))

    def set_rng_state(self, new_state: torch.Tensor, device: Where = None) -> None:
        """Set a place's random state. Return at once."""
        set_rng_state(new_state, _residence(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that `torch.autocast("remote")` takes: a CPU's and a GPU's."""
        return [torch.bfloat16, torch.float16]


# If they stood in the class body, they would hide the types.
RemoteModule.Stream, RemoteModule.Event = Stream, Event  # type: ignore[attr-defined]


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
