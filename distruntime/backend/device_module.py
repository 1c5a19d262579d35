"""`torch.remote`: the device module that torch asks about the device type "remote".

It answers that no accelerator is available. So code for local tensors (pinned loaders, optimizers of torch
2.15) does not take the workers for an accelerator of this machine. Factories, checkpointing and seeds work
all the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..log.current import MeshContext, asked_by_fakes, node_context
from ..log.handle import Residence
from ..session.placing import set_place
from ..session.session import active, active_session
from ..session.spelling import indexed
from ..streams.stream import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    stream,
    synchronize_device,
)
from ..tensors.tensor import DistributedTensor
from .random import get_rng_state, manual_seed, set_rng_state

Where = int | str | torch.device | None


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
            return MeshContext(residence, default=False)
        return node_context(residence.place.node, residence.place.local_device)

    def set_device(self, device: Where) -> None:
        """Make a place the one that new tensors go to."""
        set_place(_residence(device).place)

    def synchronize(self, device: Where = None) -> None:
        """Block until a device has done everything issued to it so far."""
        synchronize_device(_residence(device), None)

    def stream(self, stream_: Stream | None) -> StreamContext:
        """Return the context in which a stream is current."""
        return stream(stream_)

    def current_stream(self, device: Where = None) -> Stream:
        """Return the current stream of a device."""
        return current_stream(_residence(device).place)

    def default_stream(self, device: Where = None) -> Stream:
        """Return the stream that a device's instructions go to when no other is current."""
        return default_stream(_residence(device).place)

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


# In the class body they would hide the types.
RemoteModule.Stream, RemoteModule.Event = Stream, Event  # type: ignore[attr-defined]
