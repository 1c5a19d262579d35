"""Trees of values as JSON and back, exactly. Nothing is pickled.

What JSON does not have is a list that starts with its tag, and so are lists themselves. ["tensor", ...] holds
what `leaf` makes of a tensor. The other tags are below.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable

import torch

from ..errors import UsageError
from ..log.handle import Place

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
# It gets a tensor and the tensor's path in the tree ("model.0.weight").
Pack = Callable[[torch.Tensor, str], list[Json]]
Unpack = Callable[[list[Json]], object]

_HOLDS = (
    "a checkpoint holds dicts whose keys are str or int, lists, tuples, tensors, numbers, strings, bytes, "
    "None, and objects with state_dict() and load_state_dict()"
)


def packed(tree: object, leaf: Pack) -> Json:
    """Return a tree as JSON values, with the state_dict of each object that has one.

    Raises `UsageError` for what a tree cannot hold.
    """
    try:
        return _packed(tree, leaf, "", ())
    except RecursionError:
        raise UsageError(
            f"the tree is nested too deeply: {_HOLDS}, some hundred of them within each other at most"
        ) from None


def _packed(value: object, leaf: Pack, path: str, above: tuple[int, ...]) -> Json:
    if isinstance(value, torch.Tensor):
        return ["tensor", *leaf(value, path)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not isinstance(value, Place):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    if id(value) in above:
        raise UsageError(f"{_named(path)} holds itself: {_HOLDS}, none of them within itself")
    above = (*above, id(value))
    if isinstance(value, (list, tuple)):
        return [
            "tuple" if isinstance(value, tuple) else "list",
            *(_packed(v, leaf, _below(path, k), above) for k, v in enumerate(value)),
        ]
    if isinstance(value, dict):
        strange = next((key for key in value if type(key) not in (str, int)), None)
        if strange is not None:
            raise UsageError(
                f"{_named(path)} has the key {strange!r:.80}, of class {_class(strange)}: {_HOLDS}"
            )
        if all(type(key) is str for key in value):
            return {key: _packed(item, leaf, _below(path, key), above) for key, item in value.items()}
        return [
            "dict",
            *([key, _packed(item, leaf, _below(path, key), above)] for key, item in value.items()),
        ]
    state_dict = getattr(value, "state_dict", None)
    if (
        not isinstance(value, type)
        and callable(state_dict)
        and callable(getattr(value, "load_state_dict", None))
    ):
        return _packed(state_dict(), leaf, path, above)
    raise UsageError(
        f"{_named(path)} is of class {_class(value)}: {_HOLDS}. Leave it out, or save what it is made of"
    )


def _below(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _named(path: str) -> str:
    return f"tree {path!r}" if path else "the tree"


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def unpacked(form: Json, leaf: Unpack) -> object:
    """Return the tree that `packed` packed; raise `ValueError` for anything else."""
    if isinstance(form, dict):
        return {key: unpacked(item, leaf) for key, item in form.items()}
    if not isinstance(form, list):
        return form
    match form:
        case ["tensor", *rest]:
            return leaf(rest)
        case ["list", *items]:
            return [unpacked(item, leaf) for item in items]
        case ["tuple", *items]:
            return tuple([unpacked(item, leaf) for item in items])
        case ["dict", *pairs]:
            return dict(_unpacked_pair(pair, leaf) for pair in pairs)
        case ["float", str(text)]:
            return float(text)
        case ["complex", str(real), str(imag)]:
            return complex(float(real), float(imag))
        case ["bytes", str(text)]:
            return base64.b64decode(text, validate=True)
    raise ValueError(f"not a part of a tree: {str(form)[:80]}")


def _unpacked_pair(pair: Json, leaf: Unpack) -> tuple[str | int, object]:
    match pair:
        case [(str() | int()) as key, item]:
            return key, unpacked(item, leaf)
    raise ValueError(f"not a key and a value: {str(pair)[:80]}")
