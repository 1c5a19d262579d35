"""What two calls have read besides floats, compared without holding any of it.

A number that changes from one call to the next follows the floats that have changed, if nothing else has.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from .seen import LISTED, SIMPLE, TENSOR, Key, Seen, key_of, same

# Each read has its path, and what it has given: a plain value, or marks.
Marks = Mapping[Key, tuple[str, object]]
_FLOAT = object()


@dataclass(frozen=True, slots=True)
class _Object:
    """Stands for an object by its id, which is its own as long as it lives."""

    number: int
    # Lists and dictionaries have no weak references.
    alive: weakref.ref[object] | None


def marks(reads: Mapping[Key, Seen], steps: Container[int], renewed: Container[Key]) -> Marks:
    """Return the marks of what was read.

    An optimizer counts its steps in the tensors `steps`, and the call itself has renewed what was read at
    `renewed`. Neither says that anybody else has changed something.
    """
    found: dict[Key, tuple[str, object]] = {}
    for key, one in reads.items():
        if id(one.owner) not in steps and key not in renewed:
            value = one.value
            plain = one.form == "bytes" or value is TENSOR
            listed = tuple(value) if one.form in LISTED else value  # type: ignore[arg-type]
            found[_key(one)] = one.path, value if plain else _mark(listed)
    return found


def changed(before: Marks, after: Marks) -> str:
    """Return the path of something that one call has read and the other has not, or not so."""
    for key, (path, value) in after.items():
        if key not in before or not _alike(before[key][1], value):
            return path
    return next((path for key, (path, _) in before.items() if key not in after), "")


def _key(one: Seen) -> Key:
    """Return what tells a read from others. A function may be asked about another float by each call."""
    if one.form != "given":
        return key_of(one)
    asked: Iterable[object] = one.key  # type: ignore[assignment]
    about = (_FLOAT if type(x) is float else (type(x), x) if type(x) in SIMPLE else id(x) for x in asked)
    return id(one.owner), one.form, tuple(about)


def _mark(value: object) -> object:
    if type(value) is float:
        return _FLOAT
    if type(value) in SIMPLE:
        return value
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    if isinstance(value, torch.Tensor):
        # torch swaps no tensor that has a weak reference.
        return TENSOR if type(value) is not torch.Tensor else _Object(id(value), None)
    try:
        return _Object(id(value), weakref.ref(value))
    except TypeError:
        return _Object(id(value), None)


def _alike(before: object, after: object) -> bool:
    if isinstance(before, _Object):
        lives = before.alive is None or before.alive() is not None
        return isinstance(after, _Object) and before.number == after.number and lives
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_alike, before, after))
    return same(before, after)
