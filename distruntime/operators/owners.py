"""Which module a tensor belongs to, by the name that the user has given it: for the text of an error.

It looks through torch's own frames and through globals. The locals of a user's frame would be copied by a
look at them, and the copy would keep what they hold on workers until the function returns.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from itertools import chain, islice
from types import FrameType

import torch

from ..log.line import inside

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
