"""`torch.load(..., map_location="remote")`: tensors of a file at a place of the session."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.utils._pytree import tree_map

from ..errors import without_our_frames
from ..session.session import active_session
from ..session.spelling import is_remote, named


class _Load(Protocol):
    def __call__(self, f: object, map_location: object, *args: object, **kwargs: object) -> object: ...


# torch's own `load` looks at its arguments itself, and this module's stands in its place.
_load: _Load = torch.load  # type: ignore[assignment]


@without_our_frames
def load(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
    """Load as `torch.load` does, where `map_location` may also be "remote" or a place of the session.

    The file is read here and its tensors are sent there, tied ones tied.
    """
    if not is_remote(map_location):
        return _load(f, map_location, *args, **kwargs)
    place = named(active_session().places, map_location)
    assert place is not None
    sent: dict[int, torch.Tensor] = {}

    def send(leaf: object) -> object:
        if isinstance(leaf, torch.nn.Module):
            return leaf.to(place.device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in sent:
            moved = leaf.detach().to(place.device)
            sent[id(leaf)] = (
                torch.nn.Parameter(moved, leaf.requires_grad)
                if isinstance(leaf, torch.nn.Parameter)
                else moved.requires_grad_(leaf.requires_grad)
            )
        return sent[id(leaf)]

    loaded = _load(f, "cpu", *args, **kwargs)
    with active_session().requests.announcer.uploads.together():
        found: object = tree_map(send, loaded)
    return found
