"""Objects that a worker has taken apart, made again of the classes of this process.

A worker names a class. It is taken if this process has it by that name, as a named tuple or in torch's
pytree. Nothing is imported because a worker names it, so a name runs no code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from torch.utils._pytree import SUPPORTED_NODES

from ..errors import ProtocolError, UsageError
from ..wire.codec import PLAIN_TREES, Opened, class_text, is_named_tuple, opened


def is_here(name: str, context: str) -> bool:
    """Whether this process has the class of an object, with these fields where it is a named tuple."""
    kind = _class(name)
    return kind is not None and (not is_named_tuple(kind) or _fields(kind) == _plain(context))


def remade(found: Opened) -> object:
    """Return the object of which these are the parts; raise `UsageError` where its class is gone."""
    kind = _class(found.name)
    if kind is None or not is_here(found.name, found.context):
        raise UsageError(
            f"the class {found.name.replace(':', '.')} of a result is another one now, or is gone: define it "
            "again, and call a new dr.remote(f)"
        )
    if is_named_tuple(kind):
        return kind(*found.parts)
    return SUPPORTED_NODES[kind].unflatten_fn([*found.parts], _plain(found.context))


def _fields(kind: type) -> list[object]:
    return [*kind._fields]  # type: ignore[attr-defined]


def _plain(context: str) -> object:
    try:
        found: object = ast.literal_eval(context)
        return found
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ProtocolError(f"not plain values: {context!r:.60}") from None


def _class(name: str) -> type | None:
    """Return the class of this name, if it is a tree; None where there is none."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        # A module that imports what is asked of it is not asked.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if isinstance(found, type) and class_text(found) == name:
        if is_named_tuple(found) or (found in SUPPORTED_NODES and found not in PLAIN_TREES):
            return found
    # A class inside a function has no place where it is found. The one that was registered last counts.
    known = [
        kind
        for kind in SUPPORTED_NODES
        if isinstance(kind, type) and kind not in PLAIN_TREES and class_text(kind) == name
    ]
    return known[-1] if known else None


def joined(found: Sequence[object], join: Callable[[list[object]], object]) -> object:
    """Return the results of a mesh's members as one. What all have in one form is opened, part by part.

    A part is None where it is None at all members. Else it is what `join` makes of the members' parts.
    """
    first, kind = found[0], type(found[0])
    if all(one is None for one in found):
        return None
    rows = [one for one in found if isinstance(one, (tuple, list)) and type(one) is kind]
    if kind in (tuple, list) and len(rows) == len(found) and len({len(row) for row in rows}) == 1:
        items = [joined(parts, join) for parts in zip(*rows)]
        return items if kind is list else tuple(items)
    dicts = [one for one in found if isinstance(one, dict) and type(one) is kind]
    if isinstance(first, dict) and kind is dict and len(dicts) == len(found):
        if all(one.keys() == first.keys() for one in dicts):
            return {key: joined([one[key] for one in dicts], join) for key in first}
    trees = [tree for tree in map(opened, found) if tree is not None]
    if len(trees) < len(found) or len({(t.name, t.context, len(t.parts)) for t in trees}) > 1:
        return join([*found])
    parts = [joined(row, join) for row in zip(*[tree.parts for tree in trees])]
    return remade(trees[0]._replace(parts=parts))
