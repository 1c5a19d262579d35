"""What an object's proxy calls by name; everything else that is called was sent."""

from __future__ import annotations

import copy
import operator
from functools import partial

from ..values.step import Operator
from . import hosting, iteration


def named(name: str) -> Operator:
    """Return what an object's proxy names: "getitem", "method step", "getattr count"."""
    what, _, attribute = name.partition(" ")
    found = _NAMED[what]
    return partial(found, attribute) if attribute else found


def _method(name: str, thing: object, *args: object, **kwargs: object) -> object:
    return getattr(thing, name)(*args, **kwargs)


def _call(thing: Operator, *args: object, **kwargs: object) -> object:
    return thing(*args, **kwargs)


def _getattr(name: str, thing: object) -> object:
    return getattr(thing, name)


def _setattr(name: str, thing: object, value: object) -> None:
    setattr(thing, name, value)


def _delattr(name: str, thing: object) -> None:
    delattr(thing, name)


def _reflected(what: str, right: object, left: object) -> object:
    return _NAMED[what](left, right)


def _callable(name: str, thing: object) -> bool:
    return callable(getattr(thing, name))


# What an object's proxy calls by name. Everything else that is called was sent.
_NAMED: dict[str, Operator] = {
    **hosting.NAMED,
    **iteration.NAMED,
    "method": _method,
    "reflected": _reflected,
    "call": _call,
    "getattr": _getattr,
    "setattr": _setattr,
    "delattr": _delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "callable": _callable,
    "len": len,
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
    "str": str,
    "repr": repr,
    **{
        name: getattr(operator, name)
        for name in (
            "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos abs invert "
            "lt le eq ne gt ge"
        ).split()
    },
}
