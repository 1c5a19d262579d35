"""Copies between places, and between a place and this process: which way the bytes take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PlacementError, of_caller
from ..log.handle import BARE, REMOTE_TYPES, Handle, Residence, new_value
from ..log.mesh_log import MeshLog
from ..log.shards import member_of, mesh_of
from ..log.spec import spec_of
from ..operators.alias_info import Operator
from ..operators.new_calls import call
from ..operators.proxies import wrap
from ..operators.signatures import count_writes
from ..operators.special import Special
from ..operators.transfer import download, owns_whole, upload
from ..session.session import active_session, session_of_log
from ..tensors.tensor import DistributedTensor
from .groups import groups_of
from .operation import Operands, issue_operation, require_operation


def move(proxy: torch.Tensor, place: Residence) -> DistributedTensor:
    """Return a copy of a proxy at another place. Return at once.

    Within a node the worker makes it. Between nodes it goes from worker to worker.
    """
    assert isinstance(proxy, DistributedTensor)
    handle = proxy._handle
    cls = type(proxy)
    if handle.place.node.members or place.node.members:
        return _move_members(cls, handle, place)
    if handle.place.node is place.node:
        func = torch.ops.aten._to_copy.default
        handle.place.node.session.require_open()
        handle.place.node.require_alive()
        near: DistributedTensor = call(cls, func, [proxy], {"device": place.lazy}, place, None)
        return near
    spec = spec_of(torch.empty_like(handle.spec.meta()))
    copy = new_value(spec, place)
    _across(handle, copy)
    far: DistributedTensor = wrap(cls, copy)
    return far


def _move_members(cls: type[DistributedTensor], handle: Handle, place: Residence) -> DistributedTensor:
    """Return a copy of a mesh's tensor on another mesh, or of one tensor on every member of a mesh."""
    mesh_log = place.node
    if not isinstance(mesh_log, MeshLog) or (
        handle.place.node.members and len(handle.place.node.members) != len(mesh_log.members)
    ):
        into = "name the shards that it is to have, dr.from_shards([x.member(k), ...], mesh)"
        raise PlacementError(
            f"{handle.place.place} have a shard each, which does not fit {place.place}: "
            + (into if mesh_log.members else "take a member's, x.member(k), and move that")
        )
    moved: list[DistributedTensor] = []
    for k, member in enumerate(mesh_log.members):
        source = member_of(handle, k) if handle.place.node.members else handle
        home = mesh_log.session.places.residence(member, numbered=False)
        value = wrap(cls, source)
        moved.append(value.clone() if source.place is home else move(value, home))
    found: DistributedTensor = wrap(cls, mesh_of(mesh_log, place, [t._handle for t in moved]))
    return found


def _across(source: Handle, target: Handle, inplace: bool = False) -> None:
    """Issue a copy from one node to another: into a new value, or over one that is there."""
    session = session_of_log(source.place.node)
    session.require_open()
    # After a restart the group is of the node that there is now. A tensor of the one before would take the
    # other side's part in it.
    for handle in (source, target):
        handle.place.node.require_alive()
    group = groups_of(session).between(source.place, target.place)
    require_operation(group, "send")
    sends: Operands = (source,), ()
    receives: Operands = (), (target,)
    issue_operation(
        group,
        "copy",
        (sends, receives) if group.homes[0].node is source.place.node else (receives, sends),
        inplace=inplace,
    )


def _to_copy(cls: type, func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    source, target = args[0], kwargs.get("device")
    if type(source) is not cls:
        return NotImplemented
    assert isinstance(source, DistributedTensor)
    assert target is None or isinstance(target, torch.device)
    here = source._handle.place
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    if target is not None and target.type not in REMOTE_TYPES:
        if target.type == "meta":
            return func(source._handle.spec.meta(), **{**rest, "device": target})
        local = download(source._handle)
        same = all(
            v is None
            or (k == "dtype" and v == local.dtype)
            or (k == "memory_format" and v == torch.preserve_format)
            for k, v in rest.items()
            if k != "layout"
        )
        return local if same and target.type == "cpu" else func(local, **{**rest, "device": target})
    # A bare "remote" is the current place. For a tensor on a mesh, DTensor means by it that the tensor stays.
    bare = target is not None and (target.index is None or target.type == BARE)
    stays = target is None or (bare and bool(here.node.members))
    there = here if stays else active_session().places.meant(target)
    if there is here:
        return NotImplemented if target is None else func(source, **rest)
    moved = move(source, there)
    return func(moved, **rest) if any(v is not None for k, v in rest.items() if k != "layout") else moved


def _copy(cls: type, func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    target, source = args[0], args[1]
    assert isinstance(target, torch.Tensor)
    if not isinstance(source, torch.Tensor):
        # A number goes into every element.
        assert isinstance(source, (bool, int, float, complex))
        return func(target, torch.tensor(source, device="cpu"))
    if type(target) is not cls:
        assert isinstance(source, DistributedTensor)
        local = download(source._handle)
        try:
            return target.copy_(local)
        except RuntimeError as error:
            # Their shapes do not fit.
            raise of_caller(error) from None
    assert isinstance(target, DistributedTensor)
    place = target._handle.place
    place.node.session.require_open()
    place.node.require_alive()
    if type(source) is cls:
        assert isinstance(source, DistributedTensor)
        here = source._handle.place
        here.node.session.require_open()
        if here is place:
            return NotImplemented
        if here.node is place.node:
            return call(cls, func, args, kwargs, place, None)
        if here.node.members or place.node.members:
            return func(target, move(source, place))
        if source.shape != target.shape or source.dtype != target.dtype or target._handle.spec.expanded:
            return func(target, move(source, place))
        _across(source._handle, target._handle, inplace=True)
        return target
    source = source if source.device.type == "cpu" else source.cpu()
    handle = target._handle
    if (
        source.dtype == target.dtype
        and source.shape == target.shape
        and owns_whole(target)
        and not source.is_conj()
        and not source.is_neg()
    ):
        upload(source, place, into=handle, non_blocking=len(args) > 2 and bool(args[2]))
        return target
    return func(target, wrap(cls, upload(source, place)))


def _copy_of_graphs(cls: type, func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    """Return the target as `copy_` would leave it: the graphs of AOTAutograd have this instead."""
    target, source = args[0], args[1]
    assert isinstance(source, torch.Tensor)
    if not isinstance(target, DistributedTensor):
        assert isinstance(source, DistributedTensor)
        return func(target, download(source._handle), *args[2:], **kwargs)
    place = target._handle.place
    if not isinstance(source, DistributedTensor):
        source = source if source.device.type == "cpu" else source.cpu()
        return func(target, wrap(cls, upload(source, place)), *args[2:], **kwargs)
    if source._handle.place is place:
        return NotImplemented
    return func(target, move(source, place), *args[2:], **kwargs)


def _copy_lists(cls: type, func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
    targets, sources, *rest = args
    assert isinstance(targets, (list, tuple)) and isinstance(sources, (list, tuple))
    everything = [*targets, *sources]
    places = {id(t._handle.place) if isinstance(t, DistributedTensor) else 0 for t in everything}
    if len(places) == 1:
        return NotImplemented
    if len(targets) != len(sources):
        counts = f"got {len(targets)} and {len(sources)}"
        raise of_caller(RuntimeError(f"Tensor lists must have the same number of tensors, {counts}"))
    # Where places are mixed, torch copies one after the other, too.
    for target, source in zip(targets, sources):
        torch.ops.aten.copy_.default(target, source, *rest, **kwargs)
    # Autograd counts the writes to no list.
    count_writes(targets)
    return None


# `operators/special.py` takes these: copies between nodes are operations of groups, which stand on operators.
COPIES: dict[str, Special] = {
    "aten::_to_copy": _to_copy,
    "aten::copy": _copy_of_graphs,
    "aten::copy_": _copy,
    "aten::_foreach_copy_": _copy_lists,
}
