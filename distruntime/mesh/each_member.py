"""What runs once for each member of a mesh: the steps of torch that depend on the rank, and operators on
shards of different shapes.

Each member's call has its shards and its numbers. The results become one tensor on the mesh again. Where one
instruction runs for all members, shards of different shapes are padded to one: for collectives, as the
members of a line have one shape and other lines have others, and for what draws random numbers, as each
member draws from its own generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import NotSupportedError, PlacementError, UsageError
from ..log.current import current_member
from ..log.handle import BARE, REMOTE_TYPES, Residence
from ..log.mesh_log import MeshLog
from ..log.shards import member_of
from ..operators.proxies import wrap
from ..session.session import active_session
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, members_of, shapes_of, together
from .line_groups import Lines
from .varying import numbers, varies, varying

Shape = tuple[int, ...]


def largest(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that all of these fit into."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def padded(t: UnevenTensor, parts: int = 1) -> DistributedTensor:
    """Return shards of one shape: zeros stand behind each of the `parts` of a shard's rows."""
    shards = [shard.unflatten(0, (parts, shard.shape[0] // parts)) for shard in t._shards]
    whole = largest([tuple(shard.shape) for shard in shards])
    found = [
        pad(shard, [n for size, own in zip(whole[::-1], shard.shape[::-1]) for n in (0, size - own)])
        for shard in shards
    ]
    even = together([shard.flatten(0, 1) for shard in found], t._residence)
    assert isinstance(even, DistributedTensor)
    return even


def cut(
    t: DistributedTensor, shapes: Sequence[Shape], home: Residence | None, parts: int = 1
) -> torch.Tensor:
    """Return what `padded` had put zeros behind: each of the `parts` of a shard's rows in its own shape."""
    found = []
    for shard, shape in zip(members_of(t), shapes):
        rows = shard.unflatten(0, (parts, shard.shape[0] // parts))
        for dim, size in enumerate(shape):
            rows = rows.narrow(dim + 1, 0, size)
        found.append(rows.flatten(0, 1))
    return together(found, home)


def require_alike(lines: Lines, t: UnevenTensor) -> None:
    """Raise `UsageError` unless the members of each line have shards of one shape."""
    for row in lines.rows:
        if len({t._shards[k].shape for k in row}) > 1:
            raise UsageError(
                f"a collective takes tensors of one shape from the members of a line, and members "
                f"{', '.join(map(str, row))} are a line: {shapes_of(t._shards)}. Pad them, or use lists of "
                "tensors, dr.functional"
            )


_MOST_RESULTS = 1024


def home_of(value: Any) -> Residence | None:
    """Return where the members of a mesh's tensor are; None of anything else."""
    if isinstance(value, UnevenTensor):
        return value._residence
    if not isinstance(value, DistributedTensor) or not value._handle.place.node.members:
        return None
    home: Residence = value._handle.place
    return home


def _at(value: Any, k: int, member: Residence | None, devices: Sequence[torch.device]) -> Any:
    if isinstance(value, UnevenTensor):
        return value._shards[k]
    if isinstance(value, DistributedTensor) and value._handle.place.node.members:
        return wrap(type(value), member_of(value._handle, k))
    if varies(value):
        return value.node._local_ints[k]
    if member is None or not isinstance(value, torch.device):
        return value
    # "remote" alone means the mesh that the shards are on, or go to.
    alone = value.type in REMOTE_TYPES and (value.index is None or value.type == BARE)
    return member.device if alone or value in devices else value


def run_for_each(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    residence: Residence | None = None,
) -> Any:
    """Call a function once for each member, on its shards and its numbers; return the results as a mesh's.

    For a factory, `residence` says which mesh.
    """
    flat, shape = tree_flatten((list(args), kwargs))
    home = next((at for t in flat if (at := home_of(t)) is not None), residence)
    uneven = [t for t in flat if isinstance(t, UnevenTensor)]
    if home is None and uneven:
        # It goes from the meta device to a mesh.
        target = next((d for d in flat if isinstance(d, torch.device) and d.type in REMOTE_TYPES), None)
        home = None if target is None else active_session().places.meant(target)
        if home is not None and not home.node.members:
            raise PlacementError(
                f"shards of different shapes ({shapes_of(uneven[0]._shards)}) do not fit {home.place}: "
                "name their mesh, device=mesh.device"
            )
    name = getattr(function, "__qualname__", str(function))
    if home is None and all(value is None or isinstance(value, int) or varies(value) for value in flat):
        return _computed_once(function, flat, shape, name)
    once = _AT_ONCE.get(name)
    if once is not None and home is not None:
        done = once(function, *args, **kwargs)
        if done is not NotImplemented:
            return done
    if home is not None:
        members: list[Any] = [_member(home, k) for k in range(len(home.node.members))]
    else:
        count = len(uneven[0]._shards if uneven else next(v for v in flat if varies(v)).node._local_ints)
        members = [None] * count
    if home is not None and torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        return _drawn(function, args, kwargs, home)
    devices: Sequence[torch.device] = () if home is None else (home.lazy, home.device)
    goal = home
    for device in flat if uneven else ():
        there = _mesh_meant(device, devices, uneven[0])
        if there is not None:
            # The shards go to another mesh, each to the member of its number.
            devices, goal = (device,), there
            members = [_member(there, k) for k in range(len(members))]
    found = []
    with torch.no_grad():
        for k, member in enumerate(members):
            own, named = tree_unflatten([_at(value, k, member, devices) for value in flat], shape)
            if residence is not None:
                named["device"] = member.device
            token = current_member.set(member)
            try:
                found.append(function(*own, **named))
            finally:
                current_member.reset(token)
    return _joined(found, goal, name, uneven)


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any], home: Residence) -> Any:
    """Draw random numbers for the largest shard on each member, and cut them to its own shape.

    Only so does each member draw from its own generator, as it does for other tensors on the mesh.
    """
    flat, shape = tree_flatten((list(args), kwargs))
    given = next((t for t in flat if isinstance(t, UnevenTensor)), None)
    if given is None:
        sizes = next(value for value in args if isinstance(value, (list, tuple)))
        shapes = [tuple(_at(n, k, None, ()) for n in sizes) for k in range(len(home.node.members))]
    else:
        shapes = [tuple(shard.shape) for shard in given._shards]
    whole = largest(shapes)
    even = [
        padded(t) if isinstance(t, UnevenTensor) else max(t.node._local_ints.values()) if varies(t) else t
        for t in flat
    ]
    # What has another shape is no number for each element, and would count the zeros behind a shard.
    meta = [torch.empty_like(t, device="meta") if isinstance(t, torch.Tensor) else t for t in even]
    own, named = tree_unflatten(meta, shape)
    if "device" in named or given is None:
        named["device"] = "meta"
    if any(tuple(t.shape) != whole for t in tree_leaves(func(*own, **named))):
        raise NotSupportedError(
            f"{func} returns random numbers of another shape than it was given, and the members' shards have "
            f"different ones ({', '.join(map(str, shapes[:4]))}): call it for each, x.member(k)"
        )
    own, named = tree_unflatten(even, shape)
    if "device" in named or given is None:
        named["device"] = home.device
    found = func(*own, **named)
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    cuts = [cut(t, shapes, home) for t in results]
    if given is not None and func._schema.is_mutable:
        return given.copy_(cuts[0])
    return type(found)(cuts) if isinstance(found, (list, tuple)) else cuts[0]


def _mesh_meant(device: Any, own: Sequence[torch.device], t: UnevenTensor) -> Residence | None:
    """Return the other mesh that a device means; raise `PlacementError` for what shards do not fit."""
    if not isinstance(device, torch.device) or device.type not in REMOTE_TYPES or device in own:
        return None
    # "remote" alone means that a mesh's tensor stays.
    if device.index is None:
        return None
    there = active_session().places.meant(device)
    if len(there.node.members) != len(t._shards):
        raise PlacementError(
            f"{t.place} have shards of different shapes ({shapes_of(t._shards)}), which do not fit "
            f"{there.place}: take a member's, x.member(k), and move that"
        )
    return there


def _member(home: Any, k: int) -> Any:
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    return mesh_log.session.places.residence(mesh_log.members[k], numbered=False)


# -- where shards are uneven ---------------------------------------------------------------------------------


def _on(value: Any, t: Any) -> Any:
    """Return a number that differs as a tensor where `t` is."""
    home = home_of(t)
    assert home is not None
    return numbers(home, tuple(value.node._local_ints.values())) if varies(value) else value


def pick(tensor: Any, dim: int, parts: int, index: Any, stretches: int = 1) -> Any:
    """Return each member's part of an even cut of a dimension, or of its stretches; or NotImplemented."""
    if isinstance(tensor, UnevenTensor) or tensor.size(dim) % (parts * stretches):
        return NotImplemented
    with torch.no_grad():
        rows = tensor.unflatten(dim, (stretches, parts, tensor.size(dim) // (parts * stretches)))
        return rows.index_select(dim + 1, _on(index, tensor).reshape(1)).flatten(dim, dim + 2)


def _select_split(function: Any, shard: Any, tensor: Any, num_chunks: int, index: Any, **options: Any) -> Any:
    return pick(tensor, shard.dim, num_chunks, index, getattr(shard, "split_factor", 1))


def _unpad_new_dim(
    function: Any, shape: Any, tensor: Any, num_chunks: int, old: int, new: int, rank: Any
) -> Any:
    return NotImplemented if any(varies(n) or n % num_chunks for n in (shape[old], shape[new])) else tensor


def _unpad_sizes(function: Any, dim: int, tensor: Any, pads: Any, rank: Any, make_contiguous: bool) -> Any:
    return NotImplemented if any(varies(n) or n for n in pads) else tensor


def _mask(function: Any, tensor: Any, offset: Any, size: Any) -> Any:
    offset, size = _on(offset, tensor), _on(size, tensor)
    mask = (tensor < offset) | (tensor >= offset + size)
    # torch's own function writes by the mask, and would ask each member where it is true.
    return mask, (tensor - offset).masked_fill(mask, 0)


_AT_ONCE: dict[str, Callable[..., Any]] = {
    "Shard._select_split_tensor": _select_split,
    "_StridedShard._select_split_tensor": _select_split,
    "Shard._unpad_for_new_shard_dim": _unpad_new_dim,
    "Shard._maybe_unpad_tensor_with_sizes": _unpad_sizes,
    "_MaskPartial._mask_tensor": _mask,
}

# DTensor does the same arithmetic on ranks and sizes with every operator.
_results: dict[Any, Any] = {}


def _computed_once(function: Callable[..., Any], flat: list[Any], shape: Any, name: str) -> Any:
    values = [tuple(v.node._local_ints.values()) if varies(v) else v for v in flat]
    key = function, shape, tuple(values)
    found = _results.get(key)
    if found is None:
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        each = []
        for k in range(len(next(v for v in values if type(v) is tuple))):
            own, named = tree_unflatten([v[k] if type(v) is tuple else v for v in values], shape)
            each.append(function(*own, **named))
        found = _joined(each, None, name, ())
        _results[key] = found
    return found


def _joined(found: list[Any], home: Residence | None, name: str, given: Sequence[UnevenTensor]) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor):
        for t in given:
            # An operator in place returns what it was given.
            if all(one is shard for one, shard in zip(found, t._shards)):
                return t
        even = len({t.shape for t in found}) == 1
        # A model on the meta device has no memory yet.
        if all(t.device.type == "meta" for t in found):
            return first if even else UnevenTensor(found, None)
        if home is not None and all(isinstance(t, DistributedTensor) for t in found):
            return together(found, home)
        if even and all(t.device.type == "cpu" and torch.equal(first, t) for t in found):
            return first
        if given:
            raise UsageError(
                f"{name} would bring a tensor to this process for each of the members, whose shards have "
                f"different shapes ({shapes_of(given[0]._shards)}): dr.shards(x) brings all of them, "
                "x.member(k) is one"
            )
        raise NotSupportedError(
            f"{name}: torch asks for this process's own part here, and this process speaks for all members "
            "of a mesh. distruntime.fetch(x) gives the whole of a DTensor, "
            "distruntime.fetch(model.state_dict()) of a model"
        )
    if isinstance(first, int) and not isinstance(first, bool):
        return varying(found)
    if isinstance(first, (list, tuple)):
        counts = [len(items) for items in found]
        if len(set(counts)) > 1 and name == "aten::split.Tensor":
            # torch.chunk: a shard without a row has as many parts without a row as the others have parts.
            found = [
                items * max(counts) if len(items) == 1 and not items[0].numel() else items for items in found
            ]
            counts = [len(items) for items in found]
        if len(set(counts)) > 1:
            shown = ", ".join(f"member {k}: {n}" for k, n in enumerate(counts[:8]))
            raise UsageError(
                f"{name} returns another number of tensors on each member ({shown}), since the members' "
                "shards have different shapes: call it for each, x.member(k)"
            )
        return type(first)(_joined(list(items), home, name, given) for items in zip(*found))
    if isinstance(first, (bool, float)) and any(value != first for value in found):
        raise UsageError(
            f"{name} is {', '.join(map(str, found[:8]))} on the members, and one answer is needed: call it "
            "for each, x.member(k)"
        )
    return first


def per_member(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that depends on the rank, and runs for each member of a mesh."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        if any(varies(value) or isinstance(value, UnevenTensor) for value in flat):
            return run_for_each(function, args, kwargs)
        return function(*args, **kwargs)

    return choose
