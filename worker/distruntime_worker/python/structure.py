"""What a function has returned: its structure, which travels, and its leaves, which stay.

`distruntime/wire/codec.py` says what a structure is, and `distruntime/python/structure.py` is the other end.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from distruntime.errors import UsageError
from distruntime.wire.codec import (
    DECLARED,
    DEEPEST_RESULT,
    FIRST_NAME,
    NOTHING,
    OBJECT,
    OWN,
    opened,
    parts_of,
)
from distruntime.wire.messages import Plain
from distruntime.wire.shield import Lock

from ..values.memory_set import MemorySet
from ..values.objects import Held, spec_fields
from .handing import Circular

# A tuple without tensors is opened if it has so many items at most.
_MOST = 64


class Memories:
    """The names of memories that a result shares with what the worker's Python holds.

    A name stands for one memory as long as the memory lives.
    """

    def __init__(self, lent: MemorySet) -> None:
        self._lent = lent
        self._named: dict[int, tuple[StorageWeakRef, int]] = {}
        self._next = FIRST_NAME
        # Streams have threads of their own.
        self._lock = Lock()

    def name(self, storage: torch.UntypedStorage) -> int:
        """Return the name of a memory."""
        self._lent.add(storage)
        with self._lock:
            return self._name(storage)

    def _name(self, storage: torch.UntypedStorage) -> int:
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


def _parts_of(value: object) -> Sequence[object] | None:
    """Return the parts of what may be opened; None for any other object."""
    if type(value) is dict:
        return [*value.values()] if all(isinstance(key, (str, int)) for key in value) else None
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return value
    found = opened(value)
    return None if found is None else found.parts


def _holds_tensors(value: object, around: tuple[int, ...] = ()) -> bool:
    """Whether there are tensors in what may be opened; raise `Circular` where it is in itself."""
    if can_be_proxy(value):
        return True
    parts = None if len(around) == DEEPEST_RESULT else _parts_of(value)
    if parts is None:
        return False
    if id(value) in around:
        raise Circular
    inside = (*around, id(value))
    # All parts are looked at, as the last one may be circular.
    return True in [_holds_tensors(part, inside) for part in parts]


def _opened(value: object) -> bool:
    """Whether a result's parts get refs of their own."""
    try:
        holds = _holds_tensors(value)
    except Circular:
        return False
    return holds or (isinstance(value, tuple) and type(value) is tuple and len(value) <= _MOST)


# What holds the parts of a result, and the key or number of one.
_Parts = Mapping[object, object] | Sequence[object]
_probe = [torch.empty(0)]
# Python counts so many references of a tensor that only its container has, while it is looked at there.
_ALONE = sys.getrefcount(_probe[0])


def _operands_memory(operands: Sequence[object]) -> list[int]:
    return [
        operand.untyped_storage()._cdata if isinstance(operand, torch.Tensor) else 0 for operand in operands
    ]


def _memories_of(value: object) -> Counter[int]:
    """Return how many tensors of a result, which is opened, are in each memory."""
    if can_be_proxy(value):
        return Counter([value.untyped_storage()._cdata])  # type: ignore[attr-defined]
    return sum(map(_memories_of, _parts_of(value) or ()), Counter[int]())


def _memory(
    parts: _Parts, key: object, alone: int, given: list[int], recorded: Counter[int] | None
) -> int | None:
    """Return whose memory a tensor is in: its own, or an operand's. None: somebody else holds it.

    `recorded` counts a result's tensors in each memory, where the call was recorded. `alone` is how many
    references a part has that nobody else holds. It is 0 where somebody may.
    """
    value: torch.Tensor = parts[key]  # type: ignore[assignment, call-overload]
    memory = value.untyped_storage()
    storage = memory._cdata
    if storage in given:
        return given.index(storage)
    # torch has not allocated it: an array of numpy's is behind it, which somebody may hold and
    # write. Members of `dr.spmd` give shared memory, which they have made for that.
    if not memory.resizable() and not memory.is_shared():
        return None
    # Besides Python's object for the storage, the tensor holds it. What autograd has saved of a computed
    # value is guarded by its version counter. Another result in this memory is not.
    holders = torch._C._storage_Use_Count(storage)
    only = holders <= 2 and _holders(value) == 1
    computed = (
        recorded is not None
        and recorded[storage] == 1
        and value.grad_fn is not None
        and not value._is_view()
        and (holders <= 2 or (holders == 3 and _is_saved(value)))
    )
    del value, memory
    if (only or computed) and sys.getrefcount(parts[key]) <= alone:  # type: ignore[call-overload]
        return OWN
    return None


def _is_saved(value: torch.Tensor) -> bool:
    """Whether what has computed a value has saved it. That holds the value's memory once more.

    What reads the value later, and saves it, holds the tensor itself.
    """
    node, storage = value.grad_fn, value.untyped_storage()._cdata
    try:
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
    except RuntimeError:
        # It has been freed, or written since.
        return False
    return any(isinstance(one, torch.Tensor) and one.untyped_storage()._cdata == storage for one in saved)


def described(box: list[object], operands: Sequence[object], memories: Memories, recorded: bool) -> Plain:
    """Return the structure of a result: the one item of `box`, so that nothing else here holds it."""
    if box[0] is None:
        return NOTHING
    counts = _memories_of(box[0]) if recorded and _opened(box[0]) else None
    return _described(box, 0, _ALONE, _operands_memory(operands), memories, counts)


def _described(
    parts: _Parts,
    key: object,
    alone: int,
    given: list[int],
    memories: Memories | None,
    recorded: Counter[int] | None,
) -> Plain:
    """Return the structure of a part; without `memories`, what others hold gets no name of its own."""

    def part(inside: _Parts, name: object, alone: int) -> Plain:
        return _described(inside, name, alone, given, memories, recorded)

    kind = type(parts[key])  # type: ignore[call-overload]
    if issubclass(kind, torch.Tensor) and can_be_proxy(parts[key]):  # type: ignore[call-overload]
        # The memory is looked at first: an argument that waits on the stack holds the tensor.
        whose = _memory(parts, key, alone, given, recorded)
        tensor: torch.Tensor = parts[key]  # type: ignore[assignment, call-overload]
        if whose is None:
            whose = FIRST_NAME if memories is None else memories.name(tensor.untyped_storage())
        return ["tensor", *spec_fields(tensor), tensor.requires_grad, whose]
    if not _opened(parts[key]):  # type: ignore[call-overload]
        return OBJECT
    # Whoever else holds a container holds its tensors.
    inner = _ALONE if sys.getrefcount(parts[key]) <= alone else 0  # type: ignore[call-overload]
    value: _Parts = parts[key]  # type: ignore[assignment, call-overload]
    if type(value) is dict:
        return ["dict", [*map(_plain_key, value)], *[part(value, name, inner) for name in value]]
    if type(value) in (tuple, list):
        return [kind.__name__, *[part(value, k, inner) for k in range(len(value))]]
    found = opened(value)
    assert found is not None
    # The object holds its parts as well, if they are not its items.
    within = Counter(map(id, () if found.parts is value else _held_by(value)))
    counts = [inner and inner + within[id(item)] for item in found.parts]
    items = found.parts
    shown = [NOTHING if items[k] is None else part(items, k, count) for k, count in enumerate(counts)]
    return ["class", found.name, found.context, *shown]


def owned(result: object, told: Plain, name: str) -> tuple[object, Plain]:
    """Return a result and its structure, with copies of the tensors that somebody else holds."""
    memories = [*_memories_in(told)]
    if all(memory < FIRST_NAME for memory in memories):
        return result, told
    tensors = [leaf for leaf in leaves(result, told, name) if isinstance(leaf, torch.Tensor)]
    held = {id(leaf) for leaf, memory in zip(tensors, memories) if memory >= FIRST_NAME}

    def apart(leaf: object) -> object:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and id(leaf) in held else leaf

    return tree_map(apart, result), _apart(told)


def _apart(told: Plain) -> Plain:
    """Return a structure in which nobody else holds a tensor."""
    match told:
        case ["tensor", *fields, int(memory)] if memory >= FIRST_NAME:
            return ["tensor", *fields, OWN]
        case ["tuple" | "list" as kind, *parts]:
            return [kind, *map(_apart, parts)]
        case ["dict", list(keys), *parts]:
            return ["dict", keys, *map(_apart, parts)]
        case ["class", str(name), str(context), *parts]:
            return ["class", name, context, *map(_apart, parts)]
    return told


def strangers(
    box: list[object], promised: Plain, operands: Sequence[object], recorded: bool
) -> dict[int, bool]:
    """Return which tensors of a result, in the order of `leaves`, are in other memory than was promised.

    Say of each whether this worker has said so; otherwise it was declared. The result is the one item of
    `box`. Memory of its own does no harm where another one was promised.
    """
    given = _operands_memory(operands)
    counts = _memories_of(box[0]) if recorded and _opened(box[0]) else None
    found, number = dict[int, bool](), count()

    def compare(real: int | None, expected: int) -> None:
        this = next(number)
        if real not in (expected, OWN):
            found[this] = expected != DECLARED

    def look(parts: _Parts, key: object, alone: int, promised: Plain) -> None:
        match promised:
            case ["tensor", *_, int(expected)]:
                if isinstance(parts[key], torch.Tensor):  # type: ignore[call-overload]
                    compare(_memory(parts, key, alone, given, counts), expected)
            case ["class", *_]:
                told = _described(parts, key, alone, given, None, counts)
                for real, expected in zip(_memories_in(told), _memories_in(promised)):
                    compare(real, expected)
            case ["tuple" | "list", *inside] | ["dict", list(_), *inside]:
                inner = _ALONE if sys.getrefcount(parts[key]) <= alone else 0  # type: ignore[call-overload]
                value: _Parts = parts[key]  # type: ignore[assignment, call-overload]
                # What has other parts is an error in `leaves`.
                if isinstance(value, (dict, tuple, list)) and len(value) == len(inside):
                    for name, part in zip(value if isinstance(value, dict) else range(len(inside)), inside):
                        look(value, name, inner, part)

    look(box, 0, _ALONE, promised)
    return found


def _memories_in(structure: object) -> Iterator[int]:
    match structure:
        case ["tensor", *_, int(memory)]:
            yield memory
        case _:
            for part in parts_of(structure) or ():
                yield from _memories_in(part)


def _held_by(value: object) -> Iterator[object]:
    """Yield what an object holds itself: its attributes, and the items of a dict."""
    yield from getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        yield from dict.values(value)


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
        case ["class", str(kind), str(context), *parts]:
            found = opened(value)
            if found is None or (found.name, found.context, len(found.parts)) != (kind, context, len(parts)):
                raise _broken(name, f"a {_short(kind)} of {len(parts)}", value)
            for item, part in zip(found.parts, parts):
                yield from leaves(item, part, name)
        case "nothing":
            if value is not None:
                raise _broken(name, "None", value)
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


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _broken(name: str, wanted: str, value: object) -> UsageError:
    if isinstance(value, torch.Tensor):
        real = f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" + (
            " that requires grad" if value.requires_grad else ""
        )
    elif isinstance(value, (tuple, list, dict)):
        real = f"a {type(value).__name__} of {len(value)}"
    elif (found := opened(value)) is not None:
        real = f"a {_short(found.name)} of {len(found.parts)}"
    else:
        real = f"{type(value).__name__} {value!r:.60}"
    return UsageError(
        f"{name} returned {real} where {wanted} was expected: declared, or returned before for operands of "
        'these sizes. Say returns="ask" for a function whose results depend on data, or returns=object'
    )
