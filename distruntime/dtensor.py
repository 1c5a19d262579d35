"""PyTorch's DTensor, tensor parallelism and FSDP2 on a mesh's tensors: the few steps of theirs that depend on the rank.

Everything else of them runs as it is: their operators are operators, their collectives are in functional_collectives.py and
process_group.py. `prepare` changes torch once per process, when the first mesh is made, and only for a mesh's tensors. docs/meshes.md
says what of torch's own is touched here, for which versions it is tested, and what happens when torch changes it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed.tensor
import torch.distributed.tensor._random
from torch.distributed import _local_tensor
from torch.distributed.fsdp import _fully_shard
from torch.distributed.tensor import _collective_utils, _utils, placement_types

from . import functional_collectives
from .context import current_mesh
from .member_ints import per_member, run_for_each, varies, varying
from .process_group import MeshGroup
from .tensor import DistributedTensor

_tensor: Any = torch.distributed.tensor
_fsdp: Any = _fully_shard  # whose private parts have no stubs
_MARK = _local_tensor.maybe_run_for_local_tensor(lambda: None).__code__  # of the functions that torch marks as depending on the rank
_done: list[bool] = []


def prepare() -> None:
    """Let what depends on the rank run for each member, where tensors are a mesh's. Does its work once."""
    if _done:
        return
    _done.append(True)
    functional_collectives.prepare()
    owners: list[Any] = [placement_types, _utils, _collective_utils, torch.distributed.tensor._random]
    owners += [found for name in ("Shard", "_StridedShard", "_MaskPartial") if (found := getattr(placement_types, name, None)) is not None]
    for owner in owners:
        _wrap_marked(owner)
    _fsdp._fsdp_param._chunk_with_empty = _chunks_of(_fsdp._fsdp_param._chunk_with_empty)
    for module in (_fsdp._fsdp_init, _fsdp._fully_shard):
        if hasattr(module, "_get_device_from_mesh"):
            module._get_device_from_mesh = _device_of(module._get_device_from_mesh)
    _tensor.DTensor.device = property(_device)  # in C++ it has the wrappers' own
    distribute = _tensor.distribute_tensor
    wrapped = _at_members(distribute)
    for module in list(sys.modules.values()):  # whoever has imported it by name, as programs do at their top
        if vars(module).get("distribute_tensor") is distribute:
            vars(module)["distribute_tensor"] = wrapped
    _tensor._api._dtensor_init_helper = _at_members(_tensor._api._dtensor_init_helper)
    info = _fsdp._fsdp_common.FSDPMeshInfo
    info.__post_init__ = _with_ranks(info.__post_init__)


def _wrap_marked(owner: ModuleType | type) -> None:
    for name, value in list(vars(owner).items()):
        function: Any = value.__func__ if isinstance(value, staticmethod) else value
        if getattr(function, "__code__", None) is _MARK:
            wrapped = per_member(function.__wrapped__)
            setattr(owner, name, staticmethod(wrapped) if isinstance(value, staticmethod) else wrapped)


class _Chunks(list[Any]):
    """The chunks of a parameter, of which each member keeps its own."""

    def __getitem__(self, index: Any) -> Any:
        if varies(index):
            return run_for_each(list.__getitem__, [list(self), index], {})
        return super().__getitem__(index)


def _chunks_of(chunk: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(chunk)
    def choose(tensor: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return _Chunks(chunk(tensor, *args, **kwargs))

    return choose


def _at_members(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a function of torch puts on the mesh's device type, "remote", go to the members of the mesh that it is called with."""

    @functools.wraps(function)
    def choose(*args: Any, **kwargs: Any) -> Any:
        home = next((found for value in (*args, *kwargs.values()) if (found := getattr(value, "_home", None)) is not None), None)
        if home is None:
            return function(*args, **kwargs)
        token = current_mesh.set(home)
        try:
            return function(*args, **kwargs)
        finally:
            current_mesh.reset(token)

    return choose


def _device(dtensor: Any) -> torch.device:
    """The device of a DTensor: as its local tensor says, where that is a proxy."""
    local = dtensor._local_tensor
    own: Any = torch.Tensor.device
    found: torch.device = local.device if isinstance(local, DistributedTensor) else own.__get__(dtensor)
    return found


def _device_of(device: Callable[..., torch.device]) -> Callable[..., torch.device]:
    @functools.wraps(device)
    def choose(mesh: Any) -> torch.device:
        home = getattr(mesh, "_home", None)  # of our meshes; of others what torch finds
        return device(mesh) if home is None else home.device

    return choose


def _with_ranks(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """FSDP2 takes its rank from the process group, which has one for all members."""

    @functools.wraps(post_init)
    def choose(info: Any) -> None:
        post_init(info)
        group = getattr(info, "shard_process_group", None)
        if isinstance(group, MeshGroup):
            info.shard_mesh_rank = varying(group.ranks)

    return choose


__all__ = ["DistributedTensor", "prepare"]
