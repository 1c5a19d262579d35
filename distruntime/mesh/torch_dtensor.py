"""PyTorch's DTensor and tensor parallelism on a mesh's tensors: their few steps that depend on the rank.

Everything else of them runs as it is. Their operators are operators. Their collectives are in
torch_collectives.py, torch_process_group.py and torch_world.py, and FSDP2's steps in torch_fsdp.py. `prepare`
changes torch once per process, when the first mesh is made, and only for a mesh's tensors. docs/meshes.md
says what of torch's own is touched here, for which versions it is tested, and what happens when torch changes
it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed._state_dict_utils
import torch.distributed.device_mesh
import torch.distributed.tensor
import torch.distributed.tensor._random
from torch.distributed import _local_tensor
from torch.distributed.tensor import _collective_utils, _utils, placement_types

from ..backend.attention import of_dtensors
from ..errors import NotSupportedError, PlacementError
from ..log.current import asked_by_fakes, mesh_context
from ..operators.new_calls import for_each_member
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, varying_int
from . import torch_collectives, torch_context, torch_fsdp, torch_operators, torch_ranks
from .each_member import cut, home_of, largest, per_member, run_for_each
from .torch_fsdp import replace
from .torch_world import around, noting, placing
from .varying import varies, varying

_tensor: Any = torch.distributed.tensor
_state_dict: Any = torch.distributed._state_dict_utils
_device_mesh: Any = torch.distributed.device_mesh
# All functions that torch marks as depending on the rank have this code.
_MARK = _local_tensor.maybe_run_for_local_tensor(lambda: None).__code__
# After `prepare`, this has the text of what went wrong, or an empty text.
_done: list[str] = []


def prepare() -> None:
    """Let what depends on the rank run for each member, where tensors are a mesh's. Does its work once.

    Raises:
        NotSupportedError: this torch does not have some part of what is changed.
    """
    if not _done:
        try:
            _prepare()
            _done.append("")
        # Half of the work is done, and no later mesh may take that for all of it.
        except AttributeError as error:
            _done.append(
                f"torch {torch.__version__} has moved a part of its own that meshes need: {error}. "
                "docs/meshes.md has versions that fit"
            )
    if _done[0]:
        raise NotSupportedError(_done[0])


def _prepare() -> None:
    torch_collectives.prepare()
    torch_fsdp.prepare()
    torch_ranks.prepare()
    torch_context.prepare()
    of_dtensors.append(_attention)
    for_each_member.append(run_for_each)
    varying_int.append(varying)
    _state_dict._iterate_state_dict = _where_it_is(_state_dict._iterate_state_dict)
    owners: list[Any] = [placement_types, _utils, _collective_utils]
    owners += [
        found
        for name in ("Shard", "_StridedShard", "_MaskPartial")
        if (found := getattr(placement_types, name, None)) is not None
    ]
    for owner in owners:
        _wrap_marked(owner)
    # torch splits what all ranks hold. With a second cut the members' parts have sizes of their own.
    for placement in (_tensor.Shard, _tensor.placement_types._StridedShard):
        placement._split_tensor = per_member(placement._split_tensor)
    buffer = _tensor.placement_types.MaskBuffer
    buffer.apply_mask = _masking(buffer.apply_mask)
    handlers = _tensor.DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.equal.default] = _equal_dtensors
    for op in (torch.ops.aten.argmax.default, torch.ops.aten.argmin.default):
        handlers[op] = functools.partial(_index_of, handlers[op])
    torch_operators.prepare(handlers)
    propagator = _tensor._sharding_prop.ShardingPropagator
    propagator._propagate_tensor_meta_non_cached = _nowhere(propagator._propagate_tensor_meta_non_cached)
    # In C++, a DTensor has the device of its wrapper.
    _tensor.DTensor.device = property(_device)
    replace("distribute_tensor", _at_members(_tensor.distribute_tensor))
    _tensor._api._dtensor_init_helper = _of_sizes(_at_members(_tensor._api._dtensor_init_helper))
    _tensor.DTensor.from_local = staticmethod(_of_shards(_tensor.DTensor.from_local))
    _device_mesh.DeviceMesh.__eq__ = _same_members(_device_mesh.DeviceMesh.__eq__)
    if hasattr(_device_mesh.DeviceMesh, "_concatenate"):
        _device_mesh.DeviceMesh._concatenate = staticmethod(_joined(_device_mesh.DeviceMesh._concatenate))
    _device_mesh.new_group = noting(_device_mesh.new_group)
    _device_mesh.DeviceMesh._init_one_process_group = staticmethod(
        placing(_device_mesh.DeviceMesh._init_one_process_group)
    )
    if _tensor._random._rng_tracker is None:
        _tensor._random._rng_tracker = _Draws()


def _wrap_marked(owner: ModuleType | type) -> None:
    found = 0
    for name, value in list(vars(owner).items()):
        function: Any = value.__func__ if isinstance(value, staticmethod) else value
        if getattr(function, "__code__", None) is _MARK:
            wrapped = per_member(function.__wrapped__)
            setattr(owner, name, staticmethod(wrapped) if isinstance(value, staticmethod) else wrapped)
            found += 1
    # Without this error, every member would quietly do what the first one does.
    if not found:
        raise AttributeError(f"no function of {owner.__name__} is marked maybe_run_for_local_tensor")


@around
def _joined(concatenate: Callable[..., Any], /, device_mesh_list: Any) -> Any:
    """FSDP2 joins its dimension and that of tensor parallelism to one mesh.

    A plain mesh of torch's would give every member the first one's part of what is cut along it.
    """
    made = concatenate(device_mesh_list)
    if all(hasattr(mesh, "_home") for mesh in device_mesh_list):
        made = device_mesh_list[0]._joined(device_mesh_list[1:], made)
    return made


@around
def _same_members(equal: Callable[[Any, Any], bool], /, one: Any, other: Any) -> bool:
    """torch takes meshes of equal ranks for equal, and remembers the results of operators by mesh.

    Two meshes of ours with equal ranks have other members, or belong to sessions of which one has ended.
    """
    if one is other:
        return True
    if not isinstance(other, _device_mesh.DeviceMesh):
        return False
    mine, theirs = (getattr(mesh._get_root_mesh(), "_mesh_log", None) for mesh in (one, other))
    return mine is theirs and equal(one, other)


@around
def _nowhere(propagate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """torch puts fakes on the current place, but remembers what their operators return for any place.

    What returns nothing needs no fakes. Fused optimizers with a tensor as learning rate have no meta kernel,
    and torch would run the CPU's kernel on its fakes.
    """
    if not args[-1].op._schema.returns:
        return None
    token = asked_by_fakes.set(True)
    try:
        return propagate(*args, **kwargs)
    finally:
        asked_by_fakes.reset(token)


@around
def _masking(apply: Callable[..., None], /, buffer: Any, tensor: Any) -> None:
    """torch indexes by the mask of rows that are others'.

    One of no dimension, of a lone index, it would read here, for all members.
    """
    if home_of(tensor) is None or buffer.data is None or buffer.data.ndim:
        apply(buffer, tensor)
    else:
        tensor.masked_fill_(buffer.data, 0.0)


def _equal_dtensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch compares the shards, then asks all ranks with a tensor on the mesh's device type.

    Here comparing has asked all members.
    """
    one, other = args
    if (
        not all(home_of(getattr(t, "_local_tensor", None)) for t in args)
        or one.device_mesh != other.device_mesh
    ):
        return torch_operators.as_torch(func, args, kwargs)
    if one.shape != other.shape:
        return False
    with torch.no_grad():
        layout = [_tensor.Replicate() if p.is_partial() else p for p in one.placements]
        return torch.equal(*(t.redistribute(one.device_mesh, layout)._local_tensor for t in args))


def _index_of(handler: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch finds the largest of each rank, and whose it is by numbers of its own rank.

    Here the dimension is gathered first.
    """
    t = args[0]
    if home_of(t._local_tensor) is None:
        return handler(func, args, kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    cut = [
        not p.is_replicate() and (p.is_partial() or dim is None or p.dim == dim % t.ndim)
        for p in t.placements
    ]
    if any(cut):
        t = t.redistribute(
            t.device_mesh, [_tensor.Replicate() if gather else p for gather, p in zip(cut, t.placements)]
        )
    return handler(func, (t, *args[1:]), kwargs)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, *options: Any, **named: Any
) -> Any:
    """Attention over DTensors, each member its own batches and heads, as DTensor has it of CUDA's kernels.

    The formula would make a mask of "what the queries are", and what torch's C++ makes of that is no DTensor.
    """
    given = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if not all(isinstance(t, _tensor.DTensor) and home_of(t._local_tensor) is not None for t in given):
        return NotImplemented
    mesh = query.device_mesh
    if any(t.device_mesh != mesh for t in given):
        return NotImplemented
    found = torch_context.in_parts(query, key, value, attn_mask, dropout_p, *options, **named)
    if found is not None:
        return found
    layout = [_tensor.Replicate()] * mesh.ndim
    for dim in range(query.ndim - 2):
        along = [k for k, p in enumerate(query.placements) if type(p) is _tensor.Shard and p.dim == dim]
        count = math.prod(mesh.size(k) for k in along)
        if all(t.ndim == query.ndim and t.size(dim) % count == 0 for t in (query, key, value)):
            for k in along:
                layout[k] = _tensor.Shard(dim)
    local = [t.redistribute(mesh, layout).to_local() for t in (query, key, value)]
    if attn_mask is not None:
        ahead = query.ndim - attn_mask.ndim
        cut = [p.is_shard() and p.dim >= ahead and attn_mask.size(p.dim - ahead) > 1 for p in layout]
        own = [
            _tensor.Shard(p.dim - ahead) if of_mask else _tensor.Replicate()
            for p, of_mask in zip(layout, cut)
        ]
        summed = [
            _tensor.Partial() if p.is_shard() and not of_mask else q
            for p, q, of_mask in zip(layout, own, cut)
        ]
        attn_mask = attn_mask.redistribute(mesh, own).to_local(grad_placements=summed)
    with mesh.drawing(layout, None) if dropout_p else contextlib.nullcontext():
        found = torch.ops.aten.scaled_dot_product_attention(*local, attn_mask, dropout_p, *options, **named)
    return _tensor.DTensor.from_local(found, mesh, layout, run_check=False)


@around
def _at_members(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Let what torch puts on "remote" go to the members of the mesh that the function is called with."""
    home = next(
        (
            found
            for value in (*args, *kwargs.values())
            if (found := getattr(value, "_home", None)) is not None
        ),
        None,
    )
    if home is None:
        return function(*args, **kwargs)
    with mesh_context(home, default=False):
        return function(*args, **kwargs)


@around
def _of_sizes(
    make: Callable[..., Any], /, factory: Any, size: Any, device_mesh: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Let a factory of a DTensor run once for each member, where their shards differ in size."""
    home = getattr(device_mesh, "_home", None)
    laid = (args[0] if args else kwargs.get("placements")) or ()
    count = 1 if home is None else math.prod(device_mesh.shape)
    if not any(p.is_shard() and size[p.dim] % count for p in laid):
        return make(factory, size, device_mesh, *args, **kwargs)

    def each(shape: Any, **options: Any) -> Any:
        # The DTensor is what autograd sees.
        options["requires_grad"] = False
        if factory not in (torch.rand, torch.randn):
            return run_for_each(factory, [shape], options, home)
        members = range(count)
        shapes = [tuple(n.node._local_ints[k] if varies(n) else n for n in shape) for k in members]
        with device_mesh.drawing(laid, None):
            return cut(factory(largest(shapes), **options), shapes, home)

    return make(each, size, device_mesh, *args, **kwargs)


@around
def _of_shards(
    from_local: Callable[..., Any], /, local_tensor: Any, device_mesh: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Send a local tensor to all members of the mesh, as torch sends it to its device.

    Refuse one of another place.
    """
    home = getattr(device_mesh, "_home", None)
    if home is not None and isinstance(local_tensor, torch.Tensor):
        if not isinstance(local_tensor, (DistributedTensor, UnevenTensor)):
            local_tensor = local_tensor if local_tensor.is_meta else local_tensor.to(home.device)
        elif getattr(home_of(local_tensor), "node", None) is not home.node:
            raise PlacementError(
                f"a DTensor on {home.place} is made of a tensor there, or of a local one, which is sent "
                f"to all members; this one lives on {local_tensor.place}: make it there, or by "
                "dr.from_shards([...], mesh)"
            )
        if isinstance(local_tensor, UnevenTensor) and kwargs.get("shape") is None:
            # torch multiplies one rank's sizes.
            size = _size_of_all(local_tensor, device_mesh, args[0] if args else kwargs.get("placements"))
            meta = torch.empty(size, device="meta")
            kwargs.update(shape=meta.shape, stride=meta.stride())
    return from_local(local_tensor, device_mesh, *args, **kwargs)


def _size_of_all(t: UnevenTensor, mesh: Any, placements: Any) -> list[int]:
    """Return the size of what has these shards: along a dimension that is cut, the sum of its parts."""
    size = []
    for dim in range(t.ndim):
        cut_along = {k for k, p in enumerate(placements or ()) if p.is_shard(dim)}
        at_first = [
            shard.shape[dim]
            for shard, at in zip(t._shards, mesh.coordinates())
            if not any(n for k, n in enumerate(at) if k not in cut_along)
        ]
        size.append(sum(at_first))
    return size


@around
def _where_it_is(iterate: Callable[..., Any], /, value: Any, *args: Any, **kwargs: Any) -> Any:
    """torch moves what it gathers for a state dict to the mesh's device type.

    Of a mesh's tensors that is where they are.
    """
    home = home_of(getattr(value, "_local_tensor", None))
    with contextlib.nullcontext() if home is None else mesh_context(home, default=False):
        return iterate(value, *args, **kwargs)


def _device(dtensor: Any) -> torch.device:
    """The device of a DTensor: as its local tensor says, where that is a proxy."""
    local = dtensor._local_tensor
    own: Any = torch.Tensor.device
    found: torch.device = (
        local.device if isinstance(local, (DistributedTensor, UnevenTensor)) else own.__get__(dtensor)
    )
    return found


class _Draws:
    """What DTensor calls around an operator that draws random numbers."""

    distribute_region_enabled = True

    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Any:
        drawing = getattr(spec.mesh, "drawing", None)
        return contextlib.nullcontext() if drawing is None else drawing(spec.placements, generator)
