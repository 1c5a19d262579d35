"""What a function has returned: its structure, which travels, and its leaves, which stay.

A structure is plain: "object" for what only a `Held` can hold, a `Leaf`'s fields for a tensor, and lists that
begin with "tuple", "list" or "dict". `distruntime/python/structure.py` is the other end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distruntime.errors import UsageError
from distruntime.wire.messages import Plain

from ..values.objects import Held, spec_fields

OBJECT = "object"
# What `next` returns at the end of an iterator.
END = "end"
# A result that is None as a whole.
NOTHING = "nothing"
# The memory of a result is its own; it is an operand's, from 0 on; or it has a name from `Memories`.
_OWN, _FIRST_NAME = -1, 1 << 20
# Tensors are looked for to this depth; what is further down stays an object.
_DEEPEST = 16
# A tuple without tensors is opened if it has so many items at most.
_MOST = 64


class Memories:
    """The names of memories that a result shares with what the worker's Python holds.

    A name stands for one memory as long as the memory lives.
    """

    def __init__(self) -> None:
        self._named: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next = _FIRST_NAME

    def name(self, storage: torch.UntypedStorage) -> int:
        """Return the name of a memory."""
        known = self._named.get(storage._cdata)
        if known is not None and not known[0].expired():
            return known[1]
        for cdata in [cdata for cdata, (weak, _) in self._named.items() if weak.expired()]:
            del self._named[cdata]
        self._next += 1
        # A storage that is weakly referenced keeps its address, so no other is taken for it.
        self._named[storage._cdata] = StorageWeakRef(storage), self._next
        return self._next


def can_be_proxy(value: object) -> bool:
    """Whether a value is a tensor that the master can have a proxy of. Others stay objects."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and not is_traceable_wrapper_subclass(value)
    )


def _holds_tensors(value: object, depth: int = 0) -> bool:
    if can_be_proxy(value):
        return True
    if depth == _DEEPEST or type(value) not in (tuple, list, dict):
        return False
    assert isinstance(value, (tuple, list, dict))
    if isinstance(value, dict) and not all(isinstance(key, (str, int)) for key in value):
        return False
    return any(
        _holds_tensors(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _opened(value: object) -> bool:
    """Whether a result's parts get refs of their own."""
    return _holds_tensors(value) or (
        isinstance(value, tuple) and type(value) is tuple and len(value) <= _MOST
    )


# What holds the parts of a result, and the key or number of one.
_Parts = Mapping[object, object] | Sequence[object]
_probe = [torch.empty(0)]
# Python counts so many references of a tensor that only its container has, while it is looked at there.
_ALONE = sys.getrefcount(_probe[0])


def described(box: list[object], operands: Sequence[object], memories: Memories, recorded: bool) -> Plain:
    """Return the structure of a result: the one item of `box`, so that nothing else here holds it."""
    given = [
        operand.untyped_storage()._cdata if isinstance(operand, torch.Tensor) else 0 for operand in operands
    ]

    def memory(parts: _Parts, key: object) -> int:
        value: torch.Tensor = parts[key]  # type: ignore[assignment, call-overload]
        storage = value.untyped_storage()
        if storage._cdata in given:
            return given.index(storage._cdata)
        # Besides Python's object for the storage, the tensor holds it. What autograd has saved of a computed
        # value is guarded by its version counter.
        only = torch._C._storage_Use_Count(storage._cdata) <= 2 and _holders(value) == 1
        computed = recorded and value.grad_fn is not None and not value._is_view()
        del value
        if (only or computed) and sys.getrefcount(parts[key]) <= _ALONE:  # type: ignore[call-overload]
            return _OWN
        return memories.name(storage)

    def part(parts: _Parts, key: object) -> Plain:
        kind = type(parts[key])  # type: ignore[call-overload]
        if issubclass(kind, torch.Tensor) and can_be_proxy(parts[key]):  # type: ignore[call-overload]
            # The memory is looked at first: an argument that waits on the stack holds the tensor.
            whose = memory(parts, key)
            tensor: torch.Tensor = parts[key]  # type: ignore[assignment, call-overload]
            return ["tensor", *spec_fields(tensor), tensor.requires_grad, whose]
        if not _opened(parts[key]):  # type: ignore[call-overload]
            return OBJECT
        value: _Parts = parts[key]  # type: ignore[assignment, call-overload]
        if isinstance(value, Mapping):
            return ["dict", [*map(_plain_key, value)], *[part(value, name) for name in value]]
        return [kind.__name__, *[part(value, k) for k in range(len(value))]]

    return NOTHING if box[0] is None else part(box, 0)


def _plain_key(key: object) -> Plain:
    assert isinstance(key, (str, int))
    return key


def _holders(value: torch.Tensor) -> int:
    count: int = value._use_count()  # type: ignore[attr-defined]
    return count


def leaves(value: object, promised: Plain, name: str) -> Iterator[object]:
    """Yield what gets the refs of a result: tensors, and `Held` for anything else.

    Raise `UsageError` where the result is not as `promised`.
    """
    match promised:
        case ["tensor", list(sizes), list(strides), int(offset), str(dtype), int(bits), bool(grad), int(_)]:
            if not isinstance(value, torch.Tensor):
                raise _broken(name, f"a tensor {tuple(sizes)} {dtype}", value)
            yield _as_promised(value, [sizes, strides, offset, dtype, bits], grad, name)
        case ["dict", list(keys), *parts]:
            if type(value) is not dict or [*value] != keys:
                raise _broken(name, f"a dict of {keys}", value)
            for item, part in zip(value.values(), parts):
                yield from leaves(item, part, name)
        case ["tuple" | "list" as kind, *parts]:
            if not isinstance(value, (tuple, list)) or [type(value).__name__, len(value)] != [
                kind,
                len(parts),
            ]:
                raise _broken(name, f"a {kind} of {len(parts)}", value)
            for item, part in zip(value, parts):
                yield from leaves(item, part, name)
        case _:
            yield Held(value)


def _as_promised(value: torch.Tensor, spec: list[Plain], grad: bool, name: str) -> torch.Tensor:
    real = spec_fields(value)
    if real != spec and [real[0], *real[3:]] == [spec[0], *spec[3:]] and real[2] == 0 == spec[2]:
        # What is known of it here are its strides, which the reader of a proxy may ask for.
        laid_out = torch.empty_strided(value.shape, spec[1], dtype=value.dtype, device=value.device)  # type: ignore[arg-type]
        return laid_out.copy_(value)
    if real != spec or value.requires_grad != grad:
        sizes = spec[0] if isinstance(spec[0], list) else []
        wants = f"a tensor {tuple(sizes)} {spec[3]!s}" + (" that requires grad" if grad else "")
        raise _broken(name, wants, value)
    return value


def _broken(name: str, wanted: str, value: object) -> UsageError:
    if isinstance(value, torch.Tensor):
        real = f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" + (
            " that requires grad" if value.requires_grad else ""
        )
    elif isinstance(value, (tuple, list, dict)):
        real = f"a {type(value).__name__} of {len(value)}"
    else:
        real = f"{type(value).__name__} {value!r:.60}"
    return UsageError(
        f"{name} returned {real} where {wanted} was expected: declared, or returned before for operands of "
        'these sizes. Say returns="ask" for a function whose results depend on data, or returns=object'
    )
