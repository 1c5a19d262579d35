"""`torch.load(..., map_location="remote")`: tensors of a file at a place of the session."""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar, Token
from typing import Protocol

import torch
from torch.utils._pytree import tree_map

from ..errors import without_our_frames
from ..session.session import active_session
from ..session.spelling import is_remote, named
from ..tensors.tensor import DistributedTensor


class _Load(Protocol):
    def __call__(self, f: object, map_location: object, *args: object, **kwargs: object) -> object: ...


# torch's own `load` looks at its arguments itself, and this module's stands in its place.
_load: _Load = torch.load  # type: ignore[assignment]
_current: ContextVar[Sending | None] = ContextVar("sending", default=None)


class Sending:
    """What a file's tensors are sent to once all are read here, tied ones tied.

    All go to `everything`. Without it, those go whose storage was marked while the file was read.
    """

    def __init__(self, everything: torch.device | None = None) -> None:
        self._everything = everything
        # The storage stays, so that no other gets its number.
        self._marked: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._tokens: list[Token[Sending | None]] = []

    def __enter__(self) -> Sending:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())

    @staticmethod
    def current() -> Sending | None:
        """Return what is being read in this thread, if its storages can be marked."""
        return _current.get()

    def mark(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        """Have the tensors of a storage sent to a device."""
        self._marked[storage._cdata] = storage, device
        return storage

    def sent(self, loaded: object) -> object:
        """Return what was read, with the tensors that go to places there."""
        if self._everything is None and not self._marked:
            return loaded
        with active_session().requests.announcer.uploads.together():
            return self._all(loaded)

    def _all(self, loaded: object) -> object:
        return tree_map(self._send, loaded, is_leaf=lambda part: isinstance(part, OrderedDict))

    def _send(self, leaf: object) -> object:
        if isinstance(leaf, OrderedDict):
            # The state of a module carries the versions of its parts.
            found = type(leaf)((name, self._all(value)) for name, value in leaf.items())
            vars(found).update(vars(leaf))
            return found
        if isinstance(leaf, torch.nn.Module):
            whither = {self._whither(tensor) for tensor in (*leaf.parameters(), *leaf.buffers())} - {None}
            return leaf.to(whither.pop()) if whither else leaf
        whither_it = self._whither(leaf)
        if whither_it is None:
            return leaf
        assert isinstance(leaf, torch.Tensor)
        if id(leaf) not in self._sent:
            moved = leaf.detach().to(whither_it)
            self._sent[id(leaf)] = (
                torch.nn.Parameter(moved, leaf.requires_grad)
                if isinstance(leaf, torch.nn.Parameter)
                else moved.requires_grad_(leaf.requires_grad)
            )
        return self._sent[id(leaf)]

    def _whither(self, leaf: object) -> torch.device | None:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DistributedTensor):
            return None
        if self._everything is not None:
            return self._everything
        marked = self._marked.get(leaf.untyped_storage()._cdata)
        return None if marked is None else marked[1]


@without_our_frames
def load(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
    """Load as `torch.load` does, where `map_location` may also be "remote" or a place of the session.

    The file is read here and its tensors are sent there, tied ones tied.
    """
    if not is_remote(map_location):
        return _load(f, map_location, *args, **kwargs)
    place = named(active_session().places, map_location)
    assert place is not None
    return Sending(place.device).sent(_load(f, "cpu", *args, **kwargs))
