"""Something that a function reads: where it stands, what it was, and how it is looked at again."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import is_of_handler
from .anchors import Anchor

PLAIN = (
    *(int, float, bool, str, bytes, complex, type(None)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Nothing stands there.
MISSING = object()
# A tensor stands there. It is not held, since the function may have made it.
TENSOR = object()
SIMPLE = frozenset(PLAIN)
# The type's flag says that Python code, or C code at run time, has made it, and that it may change.
HEAP = 1 << 9
# What tells a read from others: the owner's id, the form, and the key or its id.
Key = tuple[int, str, object]
# What these give is compared object by object.
LISTED = ("keys", "elements")


@dataclass(slots=True)
class Seen:
    """Something that was found: where, and what it was then.

    `form` says how it is read again: "item", "attribute", "cell", "length", "version", and

    - "class": what a class or a base of it has under a name,
    - "keys", "elements": all keys of a dictionary, all values of a container, in order,
    - "bytes": what a buffer holds,
    - "given": what a function gives for the arguments in `key`.

    `holder` and `held` are the owner and the value, or anchors of them.
    """

    path: str
    form: str
    holder: object
    key: object
    held: object

    @property
    def owner(self) -> object:
        """What it was found in."""
        return self.holder.thing if isinstance(self.holder, Anchor) else self.holder

    @property
    def value(self) -> object:
        """What it was."""
        return self.held.thing if isinstance(self.held, Anchor) else self.held

    def now(self) -> object:
        """Return what it is now; raise `LookupError`, `AttributeError` or `ValueError` if it is gone."""
        owner, key = self.owner, self.key
        match self.form:
            case "item":
                gone = self.held is MISSING and key not in owner  # type: ignore[operator]
                return MISSING if gone else owner[key]  # type: ignore[index]
            case "attribute":
                return getattr(owner, str(key), MISSING) if self.held is MISSING else getattr(owner, str(key))
            case "cell":
                return owner.cell_contents  # type: ignore[attr-defined]
            case "length":
                return len(owner)  # type: ignore[arg-type]
            case "class":
                return looked_up(owner, str(key))
            case "keys":
                return list(keys_of(owner))
            case "elements":
                return list(elements_of(owner))
            case "bytes":
                return content_of(owner)
            case "given":
                return ask(owner, key)  # type: ignore[arg-type]
        return owner._version  # type: ignore[attr-defined]

    def is_as(self, value: object, now: object) -> bool:
        """Whether what stands there is what has stood there."""
        if self.form in LISTED:
            return len(value) == len(now) and all(map(operator.is_, value, now))  # type: ignore[arg-type, call-overload]
        return same(value, now) or (self.form == "bytes" and value == now)

    def put(self, value: object) -> None:
        """Put something else there."""
        if self.form == "item":
            self.owner[self.key] = value  # type: ignore[index]
        elif self.form == "cell":
            self.owner.cell_contents = value  # type: ignore[attr-defined]
        else:
            setattr(self.owner, str(self.key), value)


def key_of(one: Seen) -> Key:
    """Return what tells a read from others, as long as its owner lives."""
    key = one.key
    if one.form == "given":
        return id(one.owner), one.form, tuple(map(id, key))  # type: ignore[call-overload]
    return id(one.owner), one.form, key if type(key) in SIMPLE else id(key)


def ask(function: Callable[..., object], arguments: Sequence[object]) -> object:
    """Return what a function gives. One that raises now does not give what it gave."""
    try:
        return function(*arguments)
    except Exception as error:
        # What a signal's handler raises meanwhile says nothing of the function.
        if is_of_handler(error):
            raise
        return MISSING


def keys_of(owner: object) -> Iterable[object]:
    """Return the keys of a dictionary in their order, whatever a class of the user's does."""
    kind = OrderedDict if isinstance(owner, OrderedDict) else dict
    return kind.keys(owner)  # type: ignore[arg-type]


def elements_of(owner: object) -> Iterable[object]:
    """Return what a container holds, whatever a class of the user's does when one asks it."""
    if isinstance(owner, dict):
        return map(functools.partial(dict.__getitem__, owner), keys_of(owner))
    kinds: tuple[type[Iterable[object]], ...] = (list, set, frozenset, deque)
    kind = next(kind for kind in kinds if isinstance(owner, kind))
    return kind.__iter__(owner)  # type: ignore[arg-type]


def same(one: object, other: object) -> bool:
    """Whether two plain values are the same: 1, 1.0 and True are not, and NaN is itself."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, PLAIN):
        return False
    if isinstance(one, (float, complex)):
        # Zeros have a sign.
        return repr(one) == repr(other)
    return bool(one == other)


def looked_up(kind: object, name: str) -> object:
    """Return what a class has under a name, without calling what it is."""
    for base in kind.__mro__:  # type: ignore[attr-defined]
        if name in vars(base):
            return vars(base)[name]
    return MISSING


def content_of(owner: object) -> tuple[object, ...] | None:
    """Return what a buffer holds: its form, and its bytes. None if it holds objects."""
    try:
        if isinstance(owner, torch.Tensor):
            shown = owner.detach().resolve_conj().resolve_neg()
            # Not every dtype is one of numpy's.
            return owner.dtype, owner.shape, bytes(shown.contiguous().view(-1).view(torch.uint8).numpy())
        if isinstance(owner, np.ndarray):
            return None if owner.dtype.hasobject else (owner.dtype.str, owner.shape, owner.tobytes())
        view = memoryview(owner)  # type: ignore[arg-type]
        return view.format, view.shape, view.tobytes()
    # It has no bytes that can be looked at: a sparse tensor, an array of objects.
    except (TypeError, ValueError, RuntimeError, BufferError):
        return None
