"""`torch.load(..., map_location="remote")`: tensors of a file at a place of the session."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..session.session import active_session
from ..session.spelling import is_remote, named

_load = torch.load


# torch's own signature has `Any` for these, and this function stands in its place.
def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
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
    return tree_map(send, loaded)
