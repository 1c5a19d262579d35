"""Where a call with tensors runs: at the place of its operands, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import PlacementError
from ..log.handle import REMOTE_TYPES, Residence
from ..log.spec import Spec
from ..session.session import active_session
from .alias_info import aliases
from .owners import owner
from .proxies import wrap
from .transfer import upload

# These operators take index tensors from anywhere, as CUDA's do.
_INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
}


def common_place(
    cls: Any, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Residence:
    """Return the place that all remote operands share.

    Raise `PlacementError` if they do not share one, or the session's own error.
    """
    remote = [(name, t) for name, t in named_tensors(func, args, kwargs) if type(t) is cls]
    first_name, first = remote[0]
    place: Residence = first._handle.place
    place.node.session.require_open()
    for name, t in remote[1:]:
        other: Residence = t._handle.place
        other.node.session.require_open()
        if other is not place:
            place.node.require_alive()
            other.node.require_alive()
            whose = [(word, owner(operand)) for word, operand in ((first_name, first), (name, t))]
            raise PlacementError(
                _different(func, first_name, place, name, other, t._handle.spec)
                + "".join(f"\n  `{word}` is {owned[0]}" for word, owned in whose if owned is not None)
            )
    place.node.require_alive()
    return place


def _different(
    func: torch._ops.OpOverload, one: str, here: Residence, two: str, there: Residence, moved: Spec
) -> str:
    if here.node.members or there.node.members:
        return _different_members(func, one, here, two, there)
    apart = here.node is not there.node
    hosts = f" ({here.node.host})", f" ({there.node.host})"
    return (
        f"{func}: operands live on different {'nodes' if apart else 'devices'}: "
        f"`{one}` on {here.place}{hosts[0]}, `{two}` on {there.place}{hosts[1]}\n"
        f"  move one of them, for instance {two}.to({one}.device)      "
        f"(copies {moved.nbytes:,} B from {there.place} to {here.place})"
    )


def _different_members(
    func: torch._ops.OpOverload, one: str, here: Residence, two: str, there: Residence
) -> str:
    """Say which members two operands do not share."""
    sides = [list(home.node.members or [home.place]) for home in (here, there)]
    only = [[place for place in mine if place not in other] for mine, other in (sides, sides[::-1])]
    lines = [f"{func}: operands live on different members: `{one}` on {here.place}, `{two}` on {there.place}"]
    for name, places in zip((one, two), only):
        if places:
            lines.append(
                f"  only `{name}` is on {', '.join(map(str, places[:4]))}"
                + (f" and {len(places) - 4} more" if len(places) > 4 else "")
            )
    if not any(only):
        lines.append("  they are the same members in another order")
    if here.node.members and there.node.members:
        lines.append(
            "  tensors of meshes combine where all members match; make one of the other's: "
            "dr.from_shards([x.member(k), ...], mesh)"
        )
    else:
        mesh, plain = (one, two) if here.node.members else (two, one)
        lines.append(
            f"  send it to all of them, {plain}.to({mesh}.device), "
            f"or take one member's shard, {mesh}.member(k)"
        )
    return "\n".join(lines)


def named_tensors(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Return the tensors of a call with the names that the operator's schema gives them, list members as
    `tensors[2]`.
    """
    found: list[tuple[str, Any]] = []
    names = [a.name for a in func._schema.arguments]
    for k, value in enumerate(args):
        _collect(found, names[k] if k < len(names) else f"argument {k}", value)
    for name, value in kwargs.items():
        _collect(found, name, value)
    return found


def _collect(found: list[tuple[str, Any]], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.append((name, value))
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            _collect(found, f"{name}[{k}]", item)


def send_along(
    cls: type, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], place: Residence
) -> tuple[Any, Any]:
    """Return the arguments with local tensors sent to `place` where torch lets devices mix: zero-dimensional
    ones and indices.
    """
    written = set(aliases(func, args, kwargs)[1])
    for k, (name, t) in enumerate(named_tensors(func, args, kwargs)):
        if type(t) is cls:
            continue
        indexed = func._schema.name in _INDEXED and name.startswith("indices")
        if k in written or not (t.dim() == 0 or indexed) or t.device.type != "cpu":
            raise PlacementError(f"{func}: {_local(name, t, k in written, place)}")
    sent: tuple[Any, Any] = tree_map_only(
        torch.Tensor,
        lambda t: t if type(t) is cls else wrap(cls, upload(t, place)),
        (list(args), dict(kwargs)),
    )
    return sent


def _local(name: str, t: torch.Tensor, written: bool, place: Residence) -> str:
    """Say of a local operand what it is, and how it comes to where the others are."""
    others = f"the other operands live on {place.place}" + (
        "" if place.node.members else f" ({place.node.host})"
    )
    read = "or read the remote ones: dr.fetch(...)"
    owned = owner(t)
    if owned is not None:
        whose, module = owned
        return (
            f"`{name}` is {whose}: the module is still local, {others}\n"
            f'  send it there: {module}.to("{place.device}")      {read}'
        )
    if isinstance(t, torch.nn.Parameter):
        return (
            f"`{name}` {tuple(t.shape)} is a parameter of a module that is still local, {others}\n"
            f'  send the module there: module.to("{place.device}")      {read}'
        )
    what = "is local and written by this call" if written else f"is a local tensor on {t.device}"
    return (
        f"`{name}` {tuple(t.shape)} {what}, {others}\n"
        f'  send it there: {name}.to("{place.device}")      {read}'
    )


def elsewhere(
    cls: type,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    place: Residence,
    target: torch.device,
) -> Any:
    """Issue a `_like` or `new_` factory whose device is not its operand's.

    Only the operand's metadata counts.
    """
    if target.type in REMOTE_TYPES:
        there = active_session().places.meant(target)
        if there is place:
            if target == place.lazy:
                return NotImplemented
            return func(*args, **{**kwargs, "device": place.lazy})

        def twin(t: Any) -> torch.Tensor:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=there.lazy)

        kwargs = {**kwargs, "device": there.lazy}
    else:

        def twin(t: Any) -> torch.Tensor:
            meta: torch.Tensor = t._handle.spec.meta()
            return meta

    margs, mkwargs = tree_map_only(cls, twin, (list(args), dict(kwargs)))
    return func(*margs, **mkwargs)
