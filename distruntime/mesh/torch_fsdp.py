"""PyTorch's FSDP2 on a mesh's tensors: the few steps of it that depend on the rank. See torch_dtensor.py."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import _fully_shard
from torch.overrides import TorchFunctionMode

from ..errors import NotSupportedError, UsageError
from ..log.mesh_log import MeshLog
from ..log.shards import whole_of
from ..streams.stream import Event
from ..tensors.uneven import UnevenTensor
from .each_member import home_of, pick, run_for_each
from .torch_process_group import BACKEND, MeshGroup
from .torch_world import around, speaking_for
from .varying import varies, varying

# Its private parts have no stubs.
_fsdp: Any = _fully_shard


def prepare() -> None:
    """Let what depends on the rank run for each member, where tensors are a mesh's.

    Raises `AttributeError` for what torch has moved.
    """
    _fsdp._fsdp_param._chunk_with_empty = _chunks_of(_fsdp._fsdp_param._chunk_with_empty)
    group, parameter = _fsdp._fsdp_param_group.FSDPParamGroup, _fsdp._fsdp_param.FSDPParam
    group.finalize_backward = _waiting(group.finalize_backward)
    parameter._init_sharded_post_forward_param_metadata = _of_rows(
        parameter._init_sharded_post_forward_param_metadata
    )
    parameter._init_sharded_param = _with_sizes(parameter._init_sharded_param)
    parameter.reset_sharded_param = _padded(parameter.reset_sharded_param)
    replace("_get_dim0_padded_size", _of_each_size(_fsdp._fsdp_common._get_dim0_padded_size))
    replace("_get_device_from_mesh", _device_of(_fsdp._fsdp_init._get_device_from_mesh))
    replace("_get_post_forward_mesh_info", _of_members(_fsdp._fsdp_init._get_post_forward_mesh_info))
    replace("fully_shard", _of_modules_there(_fsdp.fully_shard))
    info = _fsdp._fsdp_common.FSDPMeshInfo
    info.__post_init__ = _with_ranks(info.__post_init__)


def replace(name: str, wrapper: Any) -> None:
    """Put a wrapper in the place of what it wraps, wherever a program has imported that by name."""
    # Libraries put other things than modules there, without a dictionary.
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if vars(module).get(name) is wrapper.__wrapped__:
            vars(module)[name] = wrapper


class _Chunks(list[Any]):
    """The chunks of a parameter, of which each member keeps its own."""

    def __init__(self, chunks: list[Any], whole: Any, dim: int) -> None:
        super().__init__(chunks)
        self._whole, self._dim = whole, dim

    def __getitem__(self, index: Any) -> Any:
        if not varies(index):
            return super().__getitem__(index)
        found = (
            NotImplemented if home_of(self._whole) is None else pick(self._whole, self._dim, len(self), index)
        )
        if found is NotImplemented:
            found = run_for_each(list.__getitem__, [list(self), index], {})
        return _Chunk(found._shards, found._residence) if isinstance(found, UnevenTensor) else found


class _Chunk(UnevenTensor):
    """A member's chunk of a parameter. FSDP2 asks whether it is empty."""

    def numel(self) -> int:
        """Return the number of the first member's, which is the largest."""
        return int(self._shards[0].numel())


@around
def _chunks_of(chunk: Callable[..., list[Any]], /, tensor: Any, num_chunks: int, dim: int) -> list[Any]:
    chunks = chunk(tensor, num_chunks, dim)
    if home_of(tensor) is not None or tensor.is_meta:
        # torch makes the empty ones of one dimension.
        chunks = [c if c.ndim == tensor.ndim else tensor.narrow(dim, 0, 0) for c in chunks]
    return _Chunks(chunks, tensor, dim)


class _Narrowing(TorchFunctionMode):
    """Lets a size that differs from member to member into functions of tensors on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(varies(value) for value in (*args, *kwargs.values())):
            return run_for_each(func, args, kwargs)
        return func(*args, **kwargs)


@around
def _with_sizes(init: Callable[..., None], /, self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
    """FSDP2 narrows its padded shards to each rank's size, also on the meta device."""
    with _Narrowing() if param.is_meta else contextlib.nullcontext():
        init(self, param, *args, **kwargs)


class _Size(tuple[Any, ...]):
    """A size that differs from member to member: `torch.Size` counts only in one number."""

    __slots__ = ()

    def numel(self) -> Any:
        """Return the number of elements, which is each member's."""
        return math.prod(self)


@around
def _of_each_size(padded_size: Callable[..., Any], /, size: Any, factor: int) -> Any:
    """FSDP2 rounds a size up, which may differ where tensor parallelism has cut unevenly."""
    if not any(varies(n) for n in size):
        return padded_size(size, factor)

    def padded(first: int) -> int:
        return int(padded_size(torch.Size([first]), factor)[0])

    # The weight of a layer that is cut in columns has as many rows everywhere.
    rows = run_for_each(padded, [size[0]], {}) if varies(size[0]) else padded(size[0])
    return _Size([rows, *size[1:]])


@around
def _padded(reset: Callable[[Any], None], /, parameter: Any) -> None:
    """FSDP2 gathers from shards that it has padded, and pads those anew that somebody has put in their place.

    It would ask an uneven shard for its size.
    """
    owner = parameter._module_info
    mine = getattr(owner.module, owner.param_name)
    local = getattr(mine, "_local_tensor", None)
    home = home_of(local)
    if home is None or not isinstance(local, UnevenTensor):
        reset(parameter)
        return
    parameter.sharded_param, parameter._sharding_spec = mine, mine._spec
    mesh_log = home.node
    assert isinstance(mesh_log, MeshLog)
    kept = getattr(parameter._sharded_param_data, "_handle", None)
    if kept is not None and whole_of(mesh_log, [t._handle for t in local._shards]) is kept.storage:
        return
    dim = parameter.fsdp_placement.dim
    with torch.no_grad():
        padded = local.new_zeros(parameter.padded_sharded_param_size)
        shards = padded.narrow(dim, 0, local.size(dim))
        shards.copy_(local)
    parameter._sharded_param_data, mine._local_tensor = padded.view(-1), shards


@around
def _of_rows(init: Callable[..., None], /, parameter: Any, param: Any) -> None:
    """FSDP2 cuts rows to learn what it would reshard to, also for parameters that it never reshards so."""
    if home_of(getattr(param, "_local_tensor", param)) is None or not parameter.fsdp_placement.dim:
        init(parameter, param)
    else:
        parameter.sharded_post_forward_size = parameter.sharded_size
        parameter.contiguous_sharded_post_forward_stride = parameter.contiguous_sharded_stride


@around
def _waiting(finalize: Callable[[Any], None], /, group: Any) -> None:
    """Until torch 2.15 FSDP2 waits in vain: the C++ of `torch.Stream` takes any object for its event."""
    gathered = group._all_gather_result
    if gathered is not None and isinstance(gathered.all_gather_event, Event):
        group.device_handle.current_stream().wait_event(gathered.all_gather_event)
        group._all_gather_result = gathered._replace(all_gather_event=None)
    finalize(group)


@around
def _of_modules_there(
    shard: Callable[..., Any], /, module: Any, *args: Any, mesh: Any = None, **kwargs: Any
) -> Any:
    """Say of FSDP2 what torch would say in words about its own insides, or not before the first step."""
    if mesh is None and torch.distributed.is_initialized() and torch.distributed.get_backend() == BACKEND:
        raise UsageError("fully_shard does not know which mesh: fully_shard(module, mesh=mesh)")
    if hasattr(mesh, "_home"):
        if isinstance(kwargs.get("offload_policy"), _fsdp.CPUOffloadPolicy):
            raise NotSupportedError(
                "CPUOffloadPolicy would move shards to this process, which is not where they "
                "are used: leave it out"
            )
        ignored = kwargs.get("ignored_params") or ()
        for one in module if isinstance(module, (list, tuple)) else [module]:
            for name, value in itertools.chain(one.named_parameters(), one.named_buffers()):
                if value.device.type not in ("remote", "meta") and value not in ignored:
                    raise UsageError(
                        f"{name!r} is in this process: module.to(mesh.device) first, then "
                        "fully_shard(module, mesh=mesh)"
                    )
    return shard(module, *args, mesh=mesh, **kwargs)


@around
def _device_of(device: Callable[..., torch.device], /, mesh: Any) -> torch.device:
    # Only our meshes have a home. For others torch finds the device.
    home = getattr(mesh, "_home", None)
    return device(mesh) if home is None else home.device


@around
def _of_members(make: Callable[..., Any], /, reshard: Any, mesh_info: Any) -> Any:
    """FSDP2 makes a smaller mesh to reshard to, of the members of the one that it was given."""
    mesh_log = getattr(mesh_info.mesh, "_mesh_log", None)
    if mesh_log is None:
        return make(reshard, mesh_info)
    with speaking_for(mesh_log):
        return make(reshard, mesh_info)


@around
def _with_ranks(post_init: Callable[[Any], None], /, info: Any) -> None:
    """FSDP2 takes its rank from the process group, which has one for all members."""
    post_init(info)
    group = getattr(info, "shard_process_group", None)
    if isinstance(group, MeshGroup):
        info.shard_mesh_rank = varying(group.ranks)
