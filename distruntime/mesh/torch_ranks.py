"""What of torch.distributed takes the share of one rank, or asks which rank calls.

One process speaks for all members, and torch knows it as rank 0. What computes a rank's share would leave the
shares of all others out, in silence, so it is refused here. What only asks whether the caller is the source
goes to the group without that question. What one member's number would decide, the numbers of all decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.utils.data import DistributedSampler

from ..backend.on_import import when_imported
from ..errors import NotSupportedError, UsageError
from ..log.mesh_log import MeshLog
from ..tensors.uneven import UnevenTensor
from . import lines
from .line_groups import Lines
from .operation import issue_along, permuted, reduction_named
from .torch_fsdp import replace
from .torch_process_group import BACKEND, Issued, MastersRank, MeshGroup, is_on_mesh
from .torch_world import around, lines_named

_c10d: Any = distributed_c10d
_functional: Any = _functional_collectives
_Sampler: Any = DistributedSampler
_Join: Any = Join
_Scaler: Any = GradScaler


def prepare() -> None:
    """Change these parts of torch. They act as before where the group is not a mesh's."""
    _Sampler.__init__ = _of_all_data(_Sampler.__init__)
    when_imported("torch.distributed.optim.zero_redundancy_optimizer", _refuse_shares)
    when_imported("torch.distributed.checkpoint.state_dict_saver", _refuse_parts)
    replace("scatter", _scatter(dist.scatter))
    replace("barrier", _barrier(dist.barrier))
    replace("monitored_barrier", _monitored(dist.monitored_barrier))
    replace("new_group", _of_members(dist.new_group))
    when_imported("torch.distributed.nn.functional", _with_gradients)
    replace("permute_tensor", _permute(_functional.permute_tensor))
    # Later torch may do without it, and asks all members by itself from 2.13 on.
    if hasattr(_functional, "_maybe_view_chunk_cat"):
        replace("_maybe_view_chunk_cat", _of_each_shape(_functional._maybe_view_chunk_cat))
    _Scaler._unscale_grads_ = _of_all_members(_Scaler._unscale_grads_)
    _Join.notify_join_context = staticmethod(_lasting(_Join.notify_join_context))


def mesh_group(group: Any) -> MeshGroup | None:
    """Return the mesh's group that torch means by `group`, or None where it means another one."""
    if group is None and dist.is_initialized():
        group = _c10d._get_default_group()
    return group if isinstance(group, MeshGroup) else None


@around
def _of_all_data(
    init: Callable[..., None],
    /,
    self: Any,
    dataset: Any,
    num_replicas: Any = None,
    rank: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    asked = num_replicas is None or rank is None or isinstance(rank, MastersRank)
    if asked and mesh_group(None) is not None:
        raise UsageError(
            "DistributedSampler would take the share of rank 0 and leave out the data of all other "
            "ranks: this process has no rank, since it speaks for all members. Leave the sampler out, "
            "and give each member its part of a batch: dr.from_shards(batch.chunk(n), mesh). For one "
            "member's share name it: DistributedSampler(data, num_replicas=n, rank=k)"
        )
    init(self, dataset, num_replicas, rank, *args, **kwargs)


def _refuse_shares(module: ModuleType) -> None:
    optimizer: Any = module.ZeroRedundancyOptimizer
    init = optimizer.__init__

    @functools.wraps(init)
    def choose(
        self: Any, params: Any, optimizer_class: Any, process_group: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if mesh_group(process_group) is not None:
            name = getattr(optimizer_class, "__name__", "torch.optim.AdamW")
            raise NotSupportedError(
                "ZeroRedundancyOptimizer would update the parameters of rank 0 and leave out those of all "
                "other ranks: this process has no rank, since it speaks for all members. "
                "fully_shard(model, mesh=mesh, reshard_after_forward=False) keeps a share of the state at "
                f"each member. Without shares, use the optimizer itself: {name}(model.parameters())"
            )
        init(self, params, optimizer_class, process_group, *args, **kwargs)

    optimizer.__init__ = choose


def _refuse_parts(module: ModuleType) -> None:
    for name in ("save", "async_save"):
        replace(name, _of_whole_states(getattr(module, name)))


@around
def _of_whole_states(
    save: Callable[..., Any], /, state_dict: Any, *args: Any, process_group: Any = None, **kwargs: Any
) -> Any:
    if mesh_group(process_group) is not None and not kwargs.get("no_dist"):
        raise NotSupportedError(
            "torch.distributed.checkpoint writes the parts of each rank, and this process has no rank, "
            "since it speaks for all members. Write the whole state: save(dr.fetch(state), "
            "checkpoint_id=path, no_dist=True), or torch.save(dr.fetch(state), path)"
        )
    return save(state_dict, *args, process_group=process_group, **kwargs)


@around
def _scatter(
    scatter: Callable[..., Any],
    /,
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """torch refuses a list on every rank but the source's. Here the process of all ranks calls."""
    found = mesh_group(group)
    if found is None:
        return scatter(tensor, scatter_list, src, group, async_op, group_src)
    if not scatter_list:
        raise UsageError(
            "scatter needs the source's list, got none: one process speaks for all members, and so for "
            "the source. Give scatter_list= one tensor on the mesh for each member of a line"
        )
    options = dist.ScatterOptions()
    options.rootRank = _root(found, src, group_src)
    work = found.scatter([tensor], [list(scatter_list)], options)
    return work if async_op else None


def _root(group: MeshGroup, src: int | None, group_src: int | None) -> int:
    if src is None and group_src is None:
        return 0
    found: int = _c10d._canonicalize_group_rank(group, src, group_src, return_global=False)
    return found


@around
def _barrier(
    barrier: Callable[..., Any], /, group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """torch's C++ asks for hooks of the device type, which a device without C++ code has not."""
    found = mesh_group(group)
    if found is None:
        return barrier(group, async_op, *args, **kwargs)
    work = found.barrier()
    return work if async_op else None


@around
def _monitored(monitored_barrier: Callable[..., Any], /, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    if mesh_group(group) is not None:
        raise NotSupportedError(
            "monitored_barrier asks each rank, and this process has no rank, since it speaks for all "
            "members. dr.distributed.barrier(dr.distributed.new_group(mesh.places), timeout=30) names "
            "who is late, and with what"
        )
    return monitored_barrier(group, *args, **kwargs)


@around
def _of_members(
    new_group: Callable[..., Any],
    /,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """torch would wait for ranks that never come: gloo's meet when the group is made."""
    if mesh_group(None) is not None and backend not in (None, BACKEND):
        raise NotSupportedError(
            f"a group with the backend {str(backend)!r} would wait for its other ranks, and this process "
            f"is the only one: it speaks for all members. Leave backend= out, or make "
            f"dr.distributed.new_group(places, backend={str(backend)!r}), which is one of the workers"
        )
    return new_group(ranks, timeout, backend, *args, **kwargs)


@around
def _permute(
    permute_tensor: Callable[..., Any], /, self: Any, src_dst: Any, group: Any, tag: str = ""
) -> Any:
    """torch computes the splits of the calling rank alone."""
    if not is_on_mesh(self) and not isinstance(self, UnevenTensor):
        return permute_tensor(self, src_dst, group, tag)
    found = lines_named(_functional._resolve_group_name(group, tag))
    targets = [int(target) for target in src_dst]
    if sorted(targets) != list(range(found.size)):
        raise UsageError(
            f"permute_tensor along a line of {found.size} members takes each rank once as a target, "
            f"got {targets}"
        )
    return permuted(found, self, targets)


@around
def _of_each_shape(put_together: Callable[..., Any], /, res: Any, group_size: int, gather_dim: int) -> Any:
    """torch views what it has gathered where its shape allows that, and may find so for some members only."""
    if not isinstance(res, UnevenTensor):
        return put_together(res, group_size, gather_dim)
    return torch.cat(torch.chunk(res, group_size, 0), gather_dim)


@around
def _of_all_members(unscale: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """torch reads of the first member whether to skip a step. Another one's gradients may have overflowed."""
    found = unscale(*args, **kwargs)
    for overflows in found.values():
        log = overflows._handle.place.node if is_on_mesh(overflows) else None
        if isinstance(log, MeshLog) and len(log.members) > 1:
            everybody = log.lines_of([[*range(len(log.members))]], Lines)
            by = reduction_named("max")
            issue_along(everybody, "all_reduce", [overflows], into=[overflows], reduction=by)
    return found


@around
def _lasting(notify: Callable[..., Any], /, joinable: Any) -> Any:
    """DistributedDataParallel gives what this returns to its C++ code, which alone keeps it."""
    work = notify(joinable)
    return work.lasting() if isinstance(work, Issued) else work


def _with_gradients(module: ModuleType) -> None:
    own: Any = module
    replace("broadcast", _broadcast(own.broadcast))


@around
def _broadcast(broadcast: Callable[..., Any], /, tensor: Any, src: int, group: Any = dist.group.WORLD) -> Any:
    """torch's gradient is zero on every rank but the source's, and it asks the caller's rank for that."""
    found = mesh_group(group)
    if found is None:
        return broadcast(tensor, src, group)
    return lines.broadcast(found.lines, tensor, _root(found, src, None))
