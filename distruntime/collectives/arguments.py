"""The arguments that users give collectives, checked: a group, tensors of its members, a root.

Nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PlacementError, UsageError
from ..log.handle import Handle, Place
from ..log.spec import Spec
from ..session.session import Session, active_session, session_of_log
from ..tensors.tensor import DistributedTensor
from .group import ProcessGroup
from .groups import groups_of


def _group(value: object) -> ProcessGroup:
    """Return `value`; raise `UsageError` if it is no group."""
    if not isinstance(value, ProcessGroup):
        raise UsageError(
            f"group must be what distruntime.distributed.new_group returned, got {type(value).__name__}"
        )
    return value


def session_of(group: ProcessGroup | None) -> Session:
    """Return the session that a call is for; raise `UsageError` if `group` is none."""
    return active_session() if group is None else _group(group).session


def tensor(value: object, what: str) -> DistributedTensor:
    """Return `value`; raise `UsageError` if it is no remote tensor."""
    if isinstance(value, DistributedTensor):
        return value
    if isinstance(value, torch.Tensor):
        raise PlacementError(
            f"{what} is a local tensor; send it to its member first: "
            'x.to("remote"), x.to(device=other.device)'
        )
    raise UsageError(f"{what} must be a remote tensor, got {type(value).__name__}")


def handle_of(value: torch.Tensor) -> Handle:
    """Return the handle of a tensor that is known to be remote."""
    assert isinstance(value, DistributedTensor)
    return value._handle


def group_for(group: ProcessGroup | None, tensors: Sequence[DistributedTensor]) -> ProcessGroup:
    """Return the group; where none is given, the one of the places of these tensors, in their order."""
    if group is None:
        session = session_of_log(tensors[0]._handle.place.node)
        session.require_open()
        return groups_of(session).of_places(tuple([t._handle.place.place for t in tensors]))
    _group(group).require()
    return group


def one_each(
    group: ProcessGroup | None, value: object, name: str
) -> tuple[ProcessGroup, list[DistributedTensor]]:
    """Return the group and one tensor per member, by rank; raise what a list that is none raises."""
    tensors = _listed(value, name)
    return _at_members(group, tensors, name), tensors


def alike_each(
    group: ProcessGroup | None, value: object, name: str
) -> tuple[ProcessGroup, list[DistributedTensor], Spec]:
    """As `one_each`, for tensors of one shape and dtype, which it returns too.

    It looks at them first, because a group that has yet to meet takes seconds.
    """
    tensors = _listed(value, name)
    spec = same(tensors, name)
    return _at_members(group, tensors, name), tensors, spec


def _listed(value: object, name: str) -> list[DistributedTensor]:
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence):
        raise UsageError(
            f"{name} must be a list with one tensor for each member of the group, got {_described(value)}"
        )
    if not value:
        raise UsageError(
            f"{name} must be a list with one tensor for each member of the group, got an empty list"
        )
    return [t if isinstance(t, DistributedTensor) else tensor(t, f"{name}[{k}]") for k, t in enumerate(value)]


def _at_members(group: ProcessGroup | None, tensors: Sequence[DistributedTensor], name: str) -> ProcessGroup:
    """Return the group of these tensors, one at each member."""
    found = group_for(group, tensors)
    if len(tensors) != found.size():
        raise UsageError(
            f"{name} must have one tensor for each of the {found.size()} members of {found!r}, "
            f"got {len(tensors)}"
        )
    for rank, (t, place) in enumerate(zip(tensors, found.places)):
        # Tensors share the object of their place, so that few of them need the check.
        if t._handle.place.place is not place:
            at(found, rank, t, f"{name}[{rank}]")
    return found


def lists_each(
    group: ProcessGroup | None, value: object, name: str, like: Sequence[DistributedTensor]
) -> list[list[DistributedTensor]]:
    """Return one list of tensors per member, each at its member.

    Without a group, `like` shows the members' places.
    """
    found = group_for(group, like)
    if not isinstance(value, Sequence) or isinstance(value, torch.Tensor) or len(value) != found.size():
        raise UsageError(
            f"{name} must be a list with one list of tensors for each of the {found.size()} members of "
            f"{found!r}, got {_described(value)}"
        )
    lists = []
    for rank, row in enumerate(value):
        if not isinstance(row, Sequence) or isinstance(row, torch.Tensor) or len(row) != found.size():
            raise UsageError(
                f"{name}[{rank}] must be a list of {found.size()} tensors, one for each member, "
                f"got {_described(row)}"
            )
        lists.append(
            [
                at(found, rank, tensor(t, f"{name}[{rank}][{k}]"), f"{name}[{rank}][{k}]")
                for k, t in enumerate(row)
            ]
        )
    return lists


def at(group: ProcessGroup, rank: int, t: DistributedTensor, what: str) -> DistributedTensor:
    """Return `t`; raise `PlacementError` unless it lives at the member of that rank."""
    place, wanted = t.place, group.places[rank]
    if place is wanted:
        return t
    if t._handle.place.node.session is not group.session:
        raise UsageError(f"{what} is of another session than {group!r}")
    if place != wanted:
        where = f"is rank {group.rank(place)} of it" if place in group.ranks else "is not in it"
        raise PlacementError(
            f"{what} is on {place}, which {where}, where {group!r} has {wanted}: give the tensors in the "
            f"order of the ranks, or move it: x.to(dr.place({wanted.node}, {wanted.local_device!r}))"
        )
    return t


def same(tensors: Sequence[DistributedTensor], name: str) -> Spec:
    """Return the spec of the first; raise `UsageError` unless all have its shape and dtype."""
    first: Spec = tensors[0]._handle.spec
    for k, t in enumerate(tensors):
        spec: Spec = t._handle.spec
        if spec.size != first.size or spec.dtype != first.dtype:
            raise UsageError(f"{name} must be of one shape and dtype: [0] is {first}, [{k}] is {spec}")
    return first


def expect(t: DistributedTensor, size: Sequence[int], dtype: torch.dtype, what: str) -> None:
    """Raise `UsageError` unless `t` has this shape and dtype."""
    if tuple(t.shape) != tuple(size) or t.dtype != dtype:
        raise UsageError(f"{what} must be {tuple(size)} {str(dtype)[6:]}, got {t._handle.spec}")


def rows_of(value: object, name: str) -> list[DistributedTensor]:
    """Return the first tensor of each list of a list of lists; raise `UsageError` for what is none."""
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence) or not value:
        raise UsageError(
            f"{name} must be a list with one list of tensors for each member, got {_described(value)}"
        )
    for k, row in enumerate(value):
        if isinstance(row, torch.Tensor) or not isinstance(row, Sequence) or not row:
            raise UsageError(
                f"{name}[{k}] must be a list of tensors, one for each member, got {_described(row)}"
            )
    return [tensor(row[0], f"{name}[{k}][0]") for k, row in enumerate(value)]


def root_of(group: ProcessGroup, node: object, rank: int | None, names: tuple[str, str]) -> int:
    """Return the rank of a root.

    Users name it by a node number or place, or by its rank; the default is 0.
    """
    plain, ranked = names
    if node is not None and rank is not None:
        raise UsageError(
            f"{plain}= names a node or place and {ranked}= a rank of the group: give one of the two"
        )
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.size():
            raise UsageError(f"{ranked} must be a rank of the group, 0 to {group.size() - 1}, got {rank!r}")
        return rank
    if node is None:
        return 0
    if isinstance(node, Place):
        if node not in group.ranks:
            raise PlacementError(f"{plain}={node} is not in {group!r}")
        return group.ranks[node]
    if isinstance(node, bool) or not isinstance(node, int):
        raise UsageError(f"{plain} must be a node number or a place of the group, got {node!r}")
    found = [k for k, place in enumerate(group.places) if place.node == node]
    if not found:
        raise PlacementError(f"{plain}={node}: no member of {group!r} is on node {node}")
    if len(found) > 1:
        raise UsageError(
            f"{plain}={node}: {len(found)} members of {group!r} are on node {node}: "
            f"give the place, or {ranked}="
        )
    return found[0]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"one tensor, {tuple(value.shape)}"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    return type(value).__name__
