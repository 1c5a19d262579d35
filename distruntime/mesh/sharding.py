"""The shards of a mesh's tensor: all of them read, or put together to such a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from ..collectives.arguments import handle_of
from ..errors import PlacementError, UsageError, without_our_frames
from ..log.handle import Handle, Place
from ..log.shards import belongs, mesh_of, whole_of
from ..operators.proxies import wrap
from ..operators.transfer import upload
from ..tensors.fetch import fetch
from ..tensors.tensor import DistributedTensor
from ..tensors.uneven import UnevenTensor, members_of
from .mesh import DeviceMesh


def _on_mesh(t: object) -> DistributedTensor:
    if isinstance(t, DTensor):
        raise UsageError(
            "this takes a tensor on a mesh, got a DTensor: t.to_local() is one, of its shards, "
            "t.full_tensor() one of the whole"
        )
    if not isinstance(t, DistributedTensor) or not t._handle.place.node.members:
        got = f"one on {t.place}" if isinstance(t, DistributedTensor) else f"a local {type(t).__name__}"
        raise UsageError(
            f"this takes a tensor on a mesh, got {got}: x.to(mesh.device) puts it on all members"
        )
    return t


@without_our_frames
def shards(t: torch.Tensor) -> list[torch.Tensor]:
    """Return every member's shard as a local tensor, by rank.

    Block until they are here; raise what poisoned one.
    """
    return [*fetch(members_of(t if isinstance(t, UnevenTensor) else _on_mesh(t)))]


@without_our_frames
def from_shards(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor on a mesh made of its members' shards. Return at once.

    Where the shards differ in shape, every operator on it runs once for each member.

    Shards are local tensors, which are sent, or proxies at the members' places. Proxies are not copied,
    unless some of them are shards of another tensor on this mesh.

    Raises:
        UsageError: not one for each member, or dimensions or dtypes that differ. PlacementError: a proxy
        lives elsewhere.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"from_shards takes the mesh itself, from_shards(tensors, mesh), got {mesh!r}")
    given = list(tensors)
    if len(given) != len(mesh.places):
        raise UsageError(
            f"from_shards takes one tensor for each of the {len(mesh.places)} members of {mesh!r}, "
            f"got {len(given)}"
        )
    for k, t in enumerate(given):
        if not isinstance(t, torch.Tensor):
            raise UsageError(
                f"the shards of a mesh's tensor are tensors, shard {k} is {type(t).__name__}: "
                "torch.tensor(...) makes one"
            )
        if (t.ndim, t.dtype) != (given[0].ndim, given[0].dtype):
            raise UsageError(
                "the shards of a mesh's tensor have as many dimensions and one dtype: shard 0 is "
                f"{tuple(given[0].shape)} {given[0].dtype}, "
                f"shard {k} is {tuple(t.shape)} {t.dtype}. Keep a list of tensors"
            )
    for k, (t, place) in enumerate(zip(given, mesh.places)):
        if isinstance(t, DistributedTensor) and t.place != place:
            move = (
                f"t.member({k})"
                if t._handle.place.node.members
                else f"t.to(dr.place({place.node}, {place.local_device!r}))"
            )
            raise PlacementError(
                f"shard {k} lives on {t.place}, member {k} of {mesh!r} is {place}: give what is there, {move}"
            )
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _FromShards.apply(mesh, *given)  # type: ignore[no-any-return, no-untyped-call]
    return _put_together(mesh, given)


def _put_together(mesh: DeviceMesh, given: Sequence[torch.Tensor]) -> torch.Tensor:
    handles: list[Handle] = []
    for t, place in zip(given, mesh.places):
        if isinstance(t, DistributedTensor):
            handles.append(handle_of(t.detach().contiguous()))
        else:
            home = mesh.session.places.residence(place, numbered=False)
            handles.append(upload(t, home))
    if len({h.spec.size for h in handles}) > 1:
        return UnevenTensor([wrap(DistributedTensor, h) for h in handles], mesh._home)
    # The log would not know that two of its tensors share memory, so the second is a copy.
    if whole_of(mesh._mesh_log, handles) is None:
        handles = [
            handle_of(wrap(DistributedTensor, h).clone()) if belongs(mesh._mesh_log, h) else h
            for h in handles
        ]
    found: DistributedTensor = wrap(DistributedTensor, mesh_of(mesh._mesh_log, mesh._home, handles))
    return found


class _Context(FunctionCtx):
    # For each shard whether it was a proxy.
    remote: list[bool]


class _FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, mesh: DeviceMesh, *given: torch.Tensor) -> torch.Tensor:
        ctx.remote = [isinstance(t, DistributedTensor) for t in given]
        return _put_together(mesh, given)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = members_of(grad if isinstance(grad, UnevenTensor) else _on_mesh(grad))
        return None, *(part if remote else part.cpu() for part, remote in zip(parts, ctx.remote))


def at_place(t: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a remote tensor at a place; a local one stays, as it is sent there later."""
    return t.to(place) if isinstance(t, DistributedTensor) and t.place != place else t
