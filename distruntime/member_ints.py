"""Numbers that differ from member to member, and the few steps of torch that depend on the rank.

In a program of one rank per process, a rank is an int. Here one process speaks for all members, so what depends on the rank is a
symbolic int that knows each member's value: torch has one, for its single-process debugging class LocalTensor, and marks the functions
of DTensor that are to run once for each rank (`maybe_run_for_local_tensor`). On a mesh's tensors these run once for each member, on the
members' own shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import _local_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import NotSupportedError
from .shards import member_of, mesh_of
from .tensor import DistributedTensor
from .wrap import wrap


def varying(values: Sequence[int]) -> Any:
    """Return the int that is `values[k]` on member k; a plain one where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return torch.SymInt(_local_tensor.LocalIntNode(dict(enumerate(values))))


def varies(value: Any) -> bool:
    """Whether a value is an int that differs from member to member."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, _local_tensor.LocalIntNode)


def _at(value: Any, k: int) -> Any:
    if isinstance(value, DistributedTensor) and value._handle.place.node.members:
        return wrap(type(value), member_of(value._handle, k))
    return value.node._local_ints[k] if varies(value) else value


def run_for_each(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function once for each member, on its shards and its numbers; return the results as a mesh's."""
    flat, shape = tree_flatten((list(args), kwargs))
    homes = [t._handle.place for t in flat if isinstance(t, DistributedTensor) and t._handle.place.node.members]
    count = len(homes[0].node.members) if homes else len(next(v for v in flat if varies(v)).node._local_ints)
    found = []
    with torch.no_grad():
        for k in range(count):
            own, named = tree_unflatten([_at(value, k) for value in flat], shape)
            found.append(function(*own, **named))
    return _joined(found, homes[0] if homes else None)


def _joined(found: list[Any], home: Any) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor):
        shapes = [tuple(t.shape) for t in found]
        if len(set(shapes)) > 1:
            shown = ", ".join(f"member {k}: {shape}" for k, shape in enumerate(shapes[:4])) + (", ..." if len(shapes) > 4 else "")
            raise NotSupportedError(
                f"the members' shards would have different shapes ({shown}), and a mesh's tensor has one. Make the size a multiple "
                "of the number of members, or use lists of tensors, which may be uneven: distruntime.primitives"
            )
        handles = [t.contiguous()._handle for t in found]
        return wrap(DistributedTensor, mesh_of(home.node, home, handles))
    if isinstance(first, int) and not isinstance(first, bool):
        return varying(found)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items), home) for items in zip(*found))
    return first


def per_member(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that depends on the rank, so that on a mesh's tensors it runs for each member."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        if any(varies(value) for value in flat):
            return run_for_each(function, args, kwargs)
        return function(*args, **kwargs)

    return choose
