"""The groups of meshes that torch.distributed knows by name, and the master's rank among them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import UsageError
from ..log.mesh_log import MeshLog
from .line_groups import Lines
from .torch_process_group import BACKEND, MastersRank, MeshGroup

_c10d: Any = distributed_c10d
_dist: Any = dist


def register(name: str, first: Sequence[int], ranks: Sequence[int], lines: Callable[[], Lines]) -> MeshGroup:
    """Make a group known to torch.distributed by its name.

    `first` are the members in the first one's line, `ranks` each one's rank.
    """
    group = MeshGroup(name, len(first), lines, ranks)
    _c10d._register_process_group(name, group)
    _c10d._world.pg_map[group] = (BACKEND, None)
    _c10d._world.pg_names[group] = name
    _c10d._world.pg_group_ranks[group] = {rank: k or MastersRank(0) for k, rank in enumerate(first)}
    return group


def forget(group: MeshGroup) -> None:
    """Undo `register`."""
    _c10d._unregister_process_group(group.group_name)
    for table in (_c10d._world.pg_map, _c10d._world.pg_names, _c10d._world.pg_group_ranks):
        table.pop(group, None)


def begin(size: int, lines: Callable[[], Lines]) -> bool:
    """Initialise torch.distributed in this process, as rank 0, unless it is. Return whether it was done here.

    Raises `UsageError` in a process that is another rank of its own job: the master speaks for every
    member, and so as their first.
    """
    if dist.is_initialized():
        if dist.get_rank() != 0:
            raise UsageError(
                f"this process is rank {dist.get_rank()} of a torch.distributed job; meshes are for "
                "rank 0, or for a process of its own"
            )
        return False
    if BACKEND.upper() not in _c10d.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["remote"])
    _world[:] = [lines]
    hook = sys.excepthook
    dist.init_process_group(BACKEND, rank=0, world_size=size, store=_dist.HashStore())
    # torch's hook puts "[rank0]: " before every line of a traceback.
    sys.excepthook = hook
    return True


_world: list[Callable[[], Lines]] = []


def _made(opts: Any, backend_options: Any) -> MeshGroup:
    return MeshGroup(
        f"{BACKEND}:{opts.group_id}", opts.group_size, _unplaced if opts.global_ranks_in_group else _world[0]
    )


def _unplaced() -> Lines:
    raise UsageError(
        "this process group is of no mesh of distruntime's: make the mesh by distruntime.init_device_mesh"
    )


_numbers = itertools.count()
# The ranks of groups that torch makes are members of the last of these meshes.
_speaking: list[MeshLog] = []
# torch has just made groups of these ranks. It keeps the group with rank 0 only.
_rows: list[list[int]] = []


@contextmanager
def speaking_for(mesh_log: MeshLog) -> Iterator[None]:
    """Let the groups that torch makes meanwhile be of this mesh's members."""
    _speaking.append(mesh_log)
    try:
        yield
    finally:
        _speaking.pop()


def around(choose: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return what puts `choose` around one of torch's functions. It gets that one, and its arguments."""

    def put(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return choose(function, *args, **kwargs)

        return chosen

    return put


@around
def noting(new_group: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Note the ranks of each group that torch makes."""
    ranks = kwargs.get("ranks", args[0] if args else None)
    if ranks is not None:
        _rows.append(list(ranks))
    return new_group(*args, **kwargs)


@around
def placing(init_one: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make the groups along a dimension for all lines of members."""
    _rows.clear()
    name = init_one(*args, **kwargs)
    if not _speaking:
        return name
    mesh_log, rows = (
        _speaking[-1],
        [list(row) for row in _rows] or [list(range(len(_speaking[-1].members)))],
    )
    at = {k: rank for row in rows for rank, k in enumerate(row)}
    ranks = [at[k] for k in range(len(mesh_log.members))]
    group = _c10d._resolve_process_group(name)
    lines = functools.partial(mesh_log.lines_of, rows, Lines)
    if isinstance(group, MeshGroup) and _rows:
        group.use(lines, ranks)
        return name
    # These lines cover all members, so torch has given its default group for them.
    return register(f"{name}:{next(_numbers)}", rows[0], ranks, lines).group_name


def end() -> None:
    """Undo `begin`."""
    if dist.is_initialized() and dist.get_backend() == BACKEND:
        dist.destroy_process_group()
    _world.clear()
    _forget_meshes()


def _forget_meshes() -> None:
    """Empty the caches in which DTensor holds each mesh that it has met, and so its session, for ever."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    tensor, propagator = "torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator"
    for module, name in (
        (f"{tensor}._redistribute", "clear_redistribute_planner_cache"),
        (f"{tensor}._redistribute", "_gen_transform_infos.cache_clear"),
        (f"{tensor}._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
        (f"{tensor}._api", f"{propagator}.propagate_op_sharding.cache_clear"),
        (f"{tensor}._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
        ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # Other versions of torch have other caches.
        if found is not None:
            found()


def lines_named(group: Any) -> Lines:
    """Return the lines of what a functional collective names: a group's name, or the group itself."""
    found = group
    if isinstance(group, str):
        found = _c10d._resolve_process_group(group)
    if not isinstance(found, MeshGroup):
        raise UsageError(
            f"this collective names the process group {group!r}, which is not of a mesh: mesh.get_group(dim)"
        )
    return found.lines
