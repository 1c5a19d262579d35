"""Numbers that differ from member to member, and the few steps of torch that depend on the rank.

In a program of one rank per process, a rank is an int. Here one process speaks for all members, so what depends on the rank is a
symbolic int that knows each member's value: torch has one, for its single-process debugging class LocalTensor, and marks the functions
of DTensor that are to run once for each rank (`maybe_run_for_local_tensor`). On a mesh's tensors these run once for each member, on the
members' own shards, but for those that every training step needs: they are operators with the members' numbers as a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import _local_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import NotSupportedError
from .handle import Residence
from .shards import member_of, mesh_of
from .tensor import DistributedTensor
from .transfer import upload
from .wrap import wrap

_MOST_KEPT = 256


def varying(values: Sequence[int]) -> Any:
    """Return the int that is `values[k]` on member k; a plain one where all are equal."""
    if len(set(values)) == 1:
        return values[0]
    return torch.SymInt(_local_tensor.LocalIntNode(dict(enumerate(values))))


def varies(value: Any) -> bool:
    """Whether a value is an int that differs from member to member."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, _local_tensor.LocalIntNode)


def _kept(value: Any) -> dict[Any, Any]:
    """What has been made of an int that varies; it lives as long as the int, which a mesh keeps."""
    found: dict[Any, Any] = value.node.__dict__.setdefault("_kept", {})
    if len(found) >= _MOST_KEPT:
        found.clear()
    return found


def as_tensor(value: Any, home: Residence) -> Any:
    """Return an int that varies as a tensor of one int64 on a mesh; sent to the members at the first use."""
    kept = _kept(value)
    team: Any = home.node
    if team not in kept:
        session, numbers = team.session, value.node._local_ints.values()
        places = [session.places.residence(place, numbered=False) for place in team.members]
        handles = [upload(torch.tensor(n, device="cpu"), place) for n, place in zip(numbers, places)]
        kept[team] = wrap(DistributedTensor, mesh_of(team, home, handles))
    return kept[team]


def home_of(value: Any) -> Residence | None:
    """Return where the members of a mesh's tensor are; None of anything else."""
    if not isinstance(value, DistributedTensor) or not value._handle.place.node.members:
        return None
    home: Residence = value._handle.place
    return home


def pick(tensor: Any, dim: int, parts: int, index: Any, stride: int = 1) -> Any:
    """Return, on each member, the part with its index of a dimension cut evenly; with `stride`, of each of as many stretches of it."""
    rows = tensor.unflatten(dim, (stride, parts, tensor.size(dim) // (parts * stride)))
    chosen = rows.index_select(dim + 1, as_tensor(index, tensor._handle.place).reshape(1))
    return chosen.flatten(dim, dim + 2)


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
    name = getattr(function, "__qualname__", str(function))
    return _joined(found, homes[0] if homes else None, name)


def _joined(found: list[Any], home: Any, name: str) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor) and not isinstance(first, DistributedTensor):
        if all(torch.equal(first, t) for t in found):
            return first
        raise NotSupportedError(
            f"{name}: its numbers differ from member to member, in tensors of this process; redistribute to Replicate() before"
        )
    if isinstance(first, torch.Tensor):
        shapes = [tuple(t.shape) for t in found]
        if len(set(shapes)) > 1:
            shown = ", ".join(f"member {k}: {shape}" for k, shape in enumerate(shapes[:4])) + (", ..." if len(shapes) > 4 else "")
            raise NotSupportedError(
                f"{name}: the members' shards would have different shapes ({shown}), and a mesh's tensor has one. Make the size a multiple "
                "of the number of members, or use lists of tensors, which may be uneven: distruntime.primitives"
            )
        handles = [t.contiguous()._handle for t in found]
        return wrap(DistributedTensor, mesh_of(home.node, home, handles))
    if isinstance(first, int) and not isinstance(first, bool):
        return varying(found)
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items), home, name) for items in zip(*found))
    return first


def per_member(function: Callable[..., Any], at_once: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function of torch that depends on the rank, so that on a mesh's tensors it runs for each member.

    With `at_once` it is first tried to do it for all of them with a mesh's own operators; that may return NotImplemented.
    """

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        given = next((value for value in flat if varies(value)), None)
        if given is None:
            return function(*args, **kwargs)
        if at_once is not None:
            with torch.no_grad():
                found = at_once(function, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if any(isinstance(value, (torch.Tensor, list, tuple)) for value in (*args, *kwargs.values())):
            return run_for_each(function, args, kwargs)
        # Of numbers alone: DTensor asks for the same ones with every call.
        kept = _kept(given)
        key = (function, *(tuple(v.node._local_ints.values()) if varies(v) else v for v in flat), *kwargs)
        if key not in kept:
            kept[key] = run_for_each(function, args, kwargs)
        return kept[key]

    return choose
