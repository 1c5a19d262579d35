"""Where a call with tensors runs: at the place of its operands, or why there is none.

The error names the module that a tensor belongs to, by the name that the user has given it. The search looks
through torch's own frames and through globals. The locals of a user's frame would be copied by a look at
them, and the copy would keep what they hold on workers until the function returns.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import PlacementError
from ..log.handle import REMOTE_TYPES, Residence
from ..log.line import inside
from ..log.spec import Spec
from ..session.session import active_session
from .alias_info import aliases
from .proxies import wrap
from .transfer import upload

_CALL = torch.nn.Module._call_impl.__code__
_WRAPPED = torch.nn.Module._wrapped_call_impl.__code__
_LONGEST = 60


def owner(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return the name of a module's parameter or buffer, as "`model.0.bias`", and that of the module.

    The tensor may be a view of it. Return None if no such module is found.
    """
    frames = list(_frames())
    # The outermost call is that of the model as a whole.
    for frame in reversed(frames):
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            path = _path(module, tensor)
            if path is not None:
                name = _name_at(frame, module)
                return (
                    (f"`{name}.{path}`", name)
                    if name is not None
                    else (f"`{path}` of a module {type(module).__name__}", "module")
                )
    for frame in frames:
        if not inside(frame.f_code):
            for name, value in list(frame.f_globals.items()):
                if isinstance(value, torch.nn.Module) and (path := _path(value, tensor)) is not None:
                    return f"`{name}.{path}`", name
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _path(module: torch.nn.Module, tensor: torch.Tensor) -> str | None:
    for path, held in chain(module.named_parameters(), module.named_buffers()):
        if held is tensor:
            return path
        if _shared(held, tensor):
            return path
    return None


def _shared(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of what a module holds."""
    handles = [t._handle for t in (held, tensor) if hasattr(t, "_handle")]
    if handles:
        return len(handles) == 2 and handles[0].storage is handles[1].storage
    # Other subclasses may have no memory here, and asking them for some raises.
    if any(
        type(t) not in (torch.nn.Parameter, torch.Tensor) or t.layout is not torch.strided
        for t in (held, tensor)
    ):
        return False
    memory = held.untyped_storage().data_ptr()
    return memory != 0 and memory == tensor.untyped_storage().data_ptr()


def _name_at(call: FrameType, module: torch.nn.Module) -> str | None:
    """Return what the caller of a module calls it: by its source, or by its globals."""
    caller = call.f_back
    if caller is not None and caller.f_code is _WRAPPED:
        caller = caller.f_back
    # torch calls modules too, for instance when it computes activations again.
    if caller is None or inside(caller.f_code):
        return None
    names = (name for name, value in list(caller.f_globals.items()) if value is module)
    return _callee(caller) or next(names, None)


def _callee(frame: FrameType) -> str | None:
    """Return the expression that a frame is calling just now, as "self.model", if its source is known.

    Python 3.10 does not know where in a line a call stands.
    """
    if sys.version_info < (3, 11):
        return None
    nowhere = None, None, None, None
    first, last, start, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), nowhere)
    if first is None or last is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, k).encode() for k in range(first, last + 1)]
    # The columns are bytes.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"".join(lines).decode().strip(), mode="eval").body
    except (SyntaxError, ValueError):
        # The file has changed since, or there is none.
        return None
    if not isinstance(call, ast.Call):
        return None
    name = ast.unparse(call.func)
    return name if len(name) <= _LONGEST else None


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
