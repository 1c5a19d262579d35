"""`torch.load(..., map_location="remote")`: tensors of a file at a place of the session.

torch asks for each storage of a file where it is to go, whatever form `map_location` has. One that is to go
to a place stays here, with a note of that. When torch makes a tensor of it, the memory is sent, once, and the
tensor becomes a view of it there. So it does not matter what the tensor stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

import torch

from ...errors import without_our_frames
from ...log.handle import Residence
from ...operators.proxies import wrap
from ...session.session import active, active_session
from ...session.spelling import is_remote, named
from ...tensors.tensor import DistributedTensor


class _Load(Protocol):
    def __call__(self, f: object, map_location: object, *args: object, **kwargs: object) -> object: ...


# torch's own `load` looks at its arguments itself, and this module's stands in its place.
_load: _Load = torch.load  # type: ignore[assignment]
_made: Callable[[torch.Tensor], torch.Tensor] = torch._utils._restore_device_fake_mode
_to: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.to  # type: ignore[explicit-any]
# torch's own functions for devices begin with 10.
_PRIORITY = 9


class _Memory:
    """A memory of a file that goes to a place."""

    def __init__(self, storage: torch.UntypedStorage, place: Residence) -> None:
        # Files of the old form bring the bytes behind everything else.
        self.late = getattr(storage, "_torch_load_uninitialized", False)
        self._place = place
        self._sent: DistributedTensor | None = None
        self._local: torch.Tensor | None = None

    def tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a file as one at the place."""
        if self._sent is None:
            storage = local.untyped_storage()
            size = storage.nbytes() // local.element_size(), 1
            self._local = torch.empty(0, dtype=local.dtype, device="cpu").set_(storage, 0, size[:1], size[1:])
            self._sent = self._local.to(self._place.device)  # type: ignore[assignment]
        sent = self._sent
        assert sent is not None
        with torch.no_grad():
            whole = sent if sent.dtype == local.dtype else sent.view(local.dtype)
            view = whole.as_strided(local.size(), local.stride(), local.storage_offset())
            view = view.conj() if local.is_conj() else view
            view = torch._neg_view(view) if local.is_neg() else view
        # It is a tensor of its own, as torch's are, and no view to autograd.
        assert isinstance(view, DistributedTensor)
        found: torch.Tensor = wrap(DistributedTensor, view._handle)
        return found.requires_grad_(local.requires_grad)

    def fill(self) -> None:
        """Send the bytes that came late."""
        if self.late and self._sent is not None and self._local is not None:
            self._sent.copy_(self._local)

    def forget(self) -> None:
        """Let go of both. The memory here holds this by way of C++, where no collector sees the cycle."""
        self._sent = self._local = None


# While `load` runs in this thread, this has the memories that go to places.
_loading: ContextVar[list[_Memory] | None] = ContextVar("loading", default=None)


class _Noted(Protocol):
    """A storage of a file, with the note of where it goes."""

    _distruntime_memory: _Memory


def restore(storage: torch.UntypedStorage, location: object) -> torch.UntypedStorage | None:
    """Note that a storage goes to a place, if its location names one; torch asks for each storage."""
    memories = _loading.get()
    if memories is None or not is_remote(location):
        return None
    place = named(active_session().places, location)
    assert place is not None
    noted: _Noted = storage  # type: ignore[assignment]
    noted._distruntime_memory = _Memory(storage, place)
    memories.append(noted._distruntime_memory)
    return storage


def _to_place(
    self: torch.UntypedStorage, *, device: torch.device | str, non_blocking: bool = False
) -> torch.UntypedStorage:
    # A function that is given as `map_location` says so where a storage goes.
    noted = restore(self, device)
    return _to(self, device=device, non_blocking=non_blocking) if noted is None else noted


def _make(tensor: torch.Tensor) -> torch.Tensor:
    """Return what torch has made of a file's storage: at a place, if the storage goes there."""
    made = _made(tensor)
    if _loading.get() is None or type(made) is not torch.Tensor or made.device.type != "cpu":
        return made
    memory: _Memory | None = getattr(made.untyped_storage(), "_distruntime_memory", None)
    return made if memory is None else memory.tensor(made)


@without_our_frames
def load(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
    """Load as `torch.load` does, where `map_location` may also name places, in each of its forms.

    The file is read here and its tensors are sent there, tied ones tied, and views with one memory.
    """
    if is_remote(map_location):
        place = named(active_session().places, map_location)
        assert place is not None
        map_location = place.device
    if not active or active[0].closed is not None:
        return _load(f, map_location, *args, **kwargs)
    memories: list[_Memory] = []
    token = _loading.set(memories)
    try:
        with active_session().requests.announcer.uploads.together():
            found = _load(f, map_location, *args, **kwargs)
            for memory in memories:
                memory.fill()
        return found
    finally:
        _loading.reset(token)
        for memory in memories:
            memory.forget()


# So it travels to a worker as what it stands for.
load.__module__ = "torch.serialization"


def install_load() -> None:
    """Put these in torch's place."""
    torch.load = load
    torch._utils._restore_device_fake_mode = _make
    torch.UntypedStorage.to = _to_place  # type: ignore[method-assign, assignment]
    torch.serialization.register_package(_PRIORITY, lambda storage: None, restore)  # type: ignore[arg-type]
