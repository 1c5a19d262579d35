"""Whether a call leaves what it finds, where it puts something else in place of what it has read.

A plan is made of a call and tests what that has left. So what it has left must be like what it has found: it
may be a new object, if that holds the same in the same way, and if nobody has it under another name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from struct import calcsize
from types import MemberDescriptorType, MethodType

import numpy as np
import torch

from ..guards.contents import BUFFERS
from ..guards.reachable import Reachable
from ..guards.seen import MISSING, PLAIN, TENSOR, Key, Seen, content_of, key_of, same

_CONTAINERS = (dict, list, tuple)
UNKNOWN = object()


def left_otherwise(
    before: Reachable,
    after: Reachable,
    changed: Mapping[Key, object],
    found: Mapping[Key, Seen],
    steps: Container[int],
    lasts: Sequence[Mapping[Key, object]],
) -> str:
    """Return the path of something that a call has read, and has left in another way than it found it.

    `changed` has what it read there, and `found` what is there now. `lasts` is what the call has read with
    which it agrees, and the one before it.
    """
    read = {key: value for key, value in changed.items() if value is not TENSOR and key[0] not in steps}
    if not read:
        return ""
    entered, left = _Parts(before), _Parts(after)
    for key, value in read.items():
        path, now = (found[key].path, found[key].value) if key in found else (str(key[2]), MISSING)
        entry = entered.at(key)
        if entry is not UNKNOWN:
            if not _Alike(entered, left).values(entry, now):
                return path
        # Nobody knows what it has found there, if it has written before it has read.
        elif value is MISSING or not same(lasts[0].get(key, MISSING), value):
            return path
        elif any(not same(last.get(key, value), value) for last in lasts):
            return path
    return ""


class _Parts:
    """What stands in each object that was found, and where each of them stands."""

    def __init__(self, reach: Reachable) -> None:
        self._by_key = {key_of(one): one for one in reach.seen}
        self.inside: dict[int, list[Seen]] = {}
        self.paths: dict[int, list[str]] = {}
        for one in reach.seen:
            self.inside.setdefault(id(one.owner), []).append(one)
            self.paths.setdefault(id(one.value), []).append(one.path)

    def at(self, key: Key) -> object:
        """Return what stood there: MISSING if nothing did, and UNKNOWN if nobody has looked there."""
        if key in self._by_key:
            return self._by_key[key].value
        inside = self.inside.get(key[0], ())
        lengths = [one.value for one in inside if one.form == "length"]
        items = sum(one.form == "item" for one in inside)
        return MISSING if key[1] == "item" and lengths == [items] else UNKNOWN

    def of(self, thing: object) -> list[Seen]:
        """Return what was found in an object, in order."""
        space = None if isinstance(thing, _CONTAINERS) else getattr(thing, "__dict__", None)
        return [*self.inside.get(id(thing), ()), *self.inside.get(id(space), ())]


class _Alike:
    """Whether things that were found before a call and behind it are alike."""

    def __init__(self, before: _Parts, after: _Parts) -> None:
        self._before, self._after = before, after
        self._known: set[tuple[int, int]] = set()

    def values(self, one: object, other: object) -> bool:
        """Whether a function would do with one thing what it does with the other."""
        if same(one, other) or (id(one), id(other)) in self._known:
            return True
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            # Tensors of workers are compared by their paths.
            return torch.Tensor not in (type(one), type(other))
        if type(one) is not type(other) or isinstance(one, PLAIN):
            return False
        if isinstance(one, (MethodType, range, slice)):
            return one == other
        if isinstance(one, (*BUFFERS, np.generic)):
            return content_of(one) == content_of(other)
        if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:  # type: ignore[attr-defined]
            return False
        # Whoever has one of them under another name may see which of them it is.
        if self._before.paths.get(id(one)) != self._after.paths.get(id(other)) or not _is_open(one):
            return False
        self._known.add((id(one), id(other)))
        mine, others = self._before.of(one), self._after.of(other)
        return len(mine) == len(others) and all(map(self._parts, mine, others))

    def _parts(self, one: Seen, other: Seen) -> bool:
        keys = one.key is other.key or same(one.key, other.key)
        return one.form == other.form and keys and self.values(one.value, other.value)


def _is_open(thing: object) -> bool:
    """Whether all that decides about an object is found in it."""
    kind = type(thing)
    if isinstance(thing, _CONTAINERS):
        return not getattr(thing, "__dict__", None)
    spaces = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    slots = sum(isinstance(one, MemberDescriptorType) for space in spaces for one in space.values())
    # An object has a word for each slot, for its dictionary and for its weak references. What is larger, or
    # has items, holds what only C sees.
    most = object.__basicsize__ + (slots + 2) * calcsize("P")
    held = bool(spaces) or isinstance(getattr(thing, "__dict__", None), dict)
    return held and kind.__basicsize__ <= most and not kind.__itemsize__
