"""How plans hold a tensor, or an object with tensors in it.

A replay gives a tensor in an object another value, so nobody else may hold it, and that is seen by its count
of references. All plans of all programs hold it by one anchor, which is one reference.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Anchor(Generic[T]):
    """The one reference that plans have to a thing."""

    __slots__ = ("__weakref__", "thing")

    def __init__(self, thing: T) -> None:
        self.thing = thing


# The key is the id of a thing, which is its own as long as its anchor is there.
_anchors: weakref.WeakValueDictionary[int, Anchor[object]] = weakref.WeakValueDictionary()


def anchored(thing: T) -> Anchor[T]:
    """Return the anchor of a thing."""
    found = _anchors.get(id(thing))
    if found is None:
        found = Anchor(thing)
        _anchors[id(thing)] = found
    return found  # type: ignore[return-value]
