"""Messages, operator arguments and tensors to bytes and back.

What comes in is checked before anyone uses it.
"""

from __future__ import annotations

import ast
import mmap
import reprlib
import types
import typing
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgpack
import numpy as np
import torch
from torch.utils._pytree import SUPPORTED_NODES

from ..errors import ProtocolError
from .messages import MESSAGES, DaemonRecord, Failure, Message, Plain, Question

Buffer = bytes | bytearray | memoryview

_NUMBER: dict[type, int] = {cls: number for number, cls in enumerate(MESSAGES)}


def _accepted(annotation: object) -> tuple[type, ...]:
    """The classes that a field's value may have once it is unpacked."""
    if isinstance(annotation, types.UnionType):
        return tuple(cls for part in typing.get_args(annotation) for cls in _accepted(part))
    cls = typing.get_origin(annotation) or annotation
    assert isinstance(cls, type)
    return (cls,)


_FIELDS = {
    cls: tuple((f.name, _accepted(typing.get_type_hints(cls)[f.name])) for f in fields(cls))
    for cls in MESSAGES
}

# By the numbers of the messages.
_ACCEPTED = [tuple(accepted for _, accepted in _FIELDS[cls]) for cls in MESSAGES]


def _only(name: str) -> Callable[[object], tuple[object, ...]]:
    return lambda message: (getattr(message, name),)


def _values_of(names: list[str]) -> Callable[[object], tuple[object, ...]]:
    return attrgetter(*names) if len(names) > 1 else _only(names[0])


_VALUES: dict[type, Callable[[object], tuple[object, ...]]] = {
    cls: _values_of([name for name, _ in rows]) for cls, rows in _FIELDS.items()
}


def encode(message: Message | Question[object]) -> bytes:
    """Return the first frame of `message`; raise `ValueError` or `OverflowError` for what cannot travel."""
    cls = type(message)
    try:
        number = _NUMBER[cls]
    except KeyError:
        raise ValueError(f"{cls.__name__} is not in the union Message of messages.py") from None
    packed: bytes = msgpack.packb((number, *_VALUES[cls](message)))
    return packed


def decode(frame: Buffer) -> Message:
    """Return the message in `frame`.

    Raise `ProtocolError` unless it is a known message with fields of the right classes.
    """
    try:
        body = msgpack.unpackb(frame, strict_map_key=True)
    except Exception as error:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes is not a message: {type(error).__name__}"
        ) from None
    if not isinstance(body, list) or not body or type(body[0]) is not int or not 0 <= body[0] < len(MESSAGES):
        raise ProtocolError("a frame does not start with the number of a message")
    number, *values = body
    cls = MESSAGES[number]
    accepted = _ACCEPTED[number]
    if len(values) != len(accepted):
        raise ProtocolError(f"{cls.__name__} has {len(accepted)} fields, got {len(values)}")
    # Both loops are C's: a mesh of 1,024 members decodes 1,024 acknowledgements.
    if not all(map(isinstance, values, accepted)):
        raise ProtocolError(_misfit(cls, values))
    return cls(*values)


def _misfit(cls: type[Message], values: Sequence[object]) -> str:
    """Say which field of a message got a value of a wrong class."""
    name, accepted, value = next(
        (name, accepted, value)
        for value, (name, accepted) in zip(values, _FIELDS[cls])
        if not isinstance(value, accepted)
    )
    return (
        f"{cls.__name__}.{name} must be {' or '.join(c.__name__ for c in accepted)}, got "
        f"{type(value).__name__}"
    )


def failure_from(row: object) -> Failure:
    """Return the failure that a worker sent; raise `ProtocolError` if it is none."""
    if not isinstance(row, list) or [type(f) for f in row] != [int, int, str, str, str, str, str, int, int]:
        raise ProtocolError("what should be a failure is none")
    return Failure(*row)


def failure_fields(cause: Failure) -> list[Plain]:
    """Return a failure in its wire form."""
    return list(astuple(cause))


def daemons_from(rows: Sequence[object]) -> list[DaemonRecord] | None:
    """Return the daemons that rows of a message stand for; None if some row stands for none.

    Masters of other sessions are told of them.
    """
    found: list[DaemonRecord] = []
    for row in rows:
        match row:
            case [str(identity), int(node), str(host), int(pid), list(devices)]:
                names = [device for device in devices if isinstance(device, str)]
                if len(names) < len(devices):
                    return None
                found.append(DaemonRecord(identity, node, host, pid, names))
            case _:
                return None
    return found


# -- plain values: arguments of operators, and results that are no tensors -------------------------
# What msgpack has travels as it is, and everything else as a list that starts with its tag.

# It stands where an operand word of the instruction goes.
OPERAND: list[Plain] = ["operand"]
# In the plain arguments of a call of the user's Python, msgpack's extension of this code is an operand.
OPERAND_CODE = 1
# The parts of a large pickle begin at multiples of so many bytes, as torch's own memory does.
ALIGNED = 64
# Stands in a template for the results of an instruction that returns nothing and only checks: its last word
# lists the refs of its operands' kin, or is None.
KIN: list[Plain] = ["kin"]

# Lists may be nested so deep. A thousand levels would end in a RecursionError.
_DEEPEST = 64
# So many characters say what a class wants to know besides an object's parts: the keys of a state dict, say.
_LONGEST_CONTEXT = 1 << 20
# An integer may have so many digits. Python itself refuses more than 4300.
_LONGEST = 4000
Constant: TypeAlias = (
    "bool | int | float | complex | str | bytes | torch.dtype | torch.memory_format | torch.layout"
    " | torch.device | list[Constant] | None"
)


def pack_constant(value: object) -> Plain:
    """Return the msgpack form of one plain value; raise `TypeError` for what has none."""
    kind = type(value)
    if value is None or (isinstance(value, (bool, str, float, bytes)) and kind in (bool, str, float, bytes)):
        return value
    if isinstance(value, int) and kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", str(value)]
    if isinstance(value, complex) and kind is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, (list, tuple)) and kind in (list, tuple, torch.Size):
        return ["list", *map(pack_constant, value)]
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise TypeError(f"a value of class {kind.__module__}.{kind.__qualname__} cannot travel")


def unpack_constant(value: Plain, depth: int = 0) -> Constant:
    """Return the value that `pack_constant` packed; raise `ProtocolError` for anything else."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    match value:
        case ["list", *items] if depth < _DEEPEST:
            return [unpack_constant(item, depth + 1) for item in items]
        case ["int", str(text)] if len(text) <= _LONGEST and text.removeprefix("-").isdecimal():
            return int(text)
        case ["complex", int() | float() as real, int() | float() as imag]:
            return complex(real, imag)
        case ["dtype" | "memory_format" | "layout" as kind, str(name)]:
            found: object = getattr(torch, name, None)
            if (
                isinstance(found, (torch.dtype, torch.memory_format, torch.layout))
                and type(found).__name__ == kind
            ):
                return found
        case ["device", str(name)]:
            try:
                return torch.device(name)
            except RuntimeError as error:
                raise ProtocolError(f"not a device: {error!s:.200}") from None
    raise ProtocolError(f"not a plain value: {reprlib.repr(value):.80}")


# -- objects that are trees ------------------------------------------------------------------------
# Both sides know classes by their names, and torch's pytree says of both what the parts of an object are.


PLAIN_TREES = {tuple, list, dict, torch.Size, deque}


class Opened(NamedTuple):
    """An object that is a tree: "module:class", what its class wants to know besides the parts, and these.

    `context` is a text, of plain values as Python writes them.
    """

    name: str
    context: str
    parts: Sequence[object]


def opened(value: object) -> Opened | None:
    """Return the parts of a named tuple, or of an object whose class torch's pytree has registered.

    Return None for plain tuples, lists and dicts, for queues, which are there to be written, and for any
    other object.
    """
    kind = type(value)
    if isinstance(value, Opened):
        return value
    if is_named_tuple(kind):
        assert isinstance(value, tuple)
        return Opened(class_text(kind), repr([*kind._fields]), value)  # type: ignore[attr-defined]
    node = SUPPORTED_NODES.get(kind)
    if node is None or kind in PLAIN_TREES:
        return None
    try:
        parts, context = node.flatten_fn(value)
        text = repr(context)
        plain = len(text) <= _LONGEST_CONTEXT and bool(ast.literal_eval(text) == context)
    # The user's function may raise anything, and a context that is not plain is no text of Python's.
    except Exception:
        return None
    return Opened(class_text(kind), text, [*parts]) if plain else None


def is_named_tuple(kind: type) -> bool:
    """Whether a class is one of `typing.NamedTuple` or `collections.namedtuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def class_text(kind: type) -> str:
    """Return what a class is called on both sides: "module:class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


# -- tensors ---------------------------------------------------------------------------------------


# The structure of a function's result is plain: `OBJECT`, `NOTHING` for None, or a list that begins with
# "tensor", "tuple", "list", "dict" or "class". The last one is for named tuples, and what torch's pytree has.
OBJECT = "object"
# What `next` returns at the end of an iterator.
END = "end"
# A result that is None as a whole, or None in an object of a class that is opened.
NOTHING = "nothing"
# The memory of a result's tensor is its own, as its example says or as the worker has said. It is an
# operand's, from 0 on. Or it has a name.
DECLARED, OWN, FIRST_NAME = -2, -1, 1 << 20
# Tensors are looked for to this depth. What is further down stays an object.
DEEPEST_RESULT = 16


def parts_of(structure: object) -> list[object] | None:
    """Return the parts of a structure; None for what is one leaf, or nothing."""
    match structure:
        case ["tuple" | "list", *parts] | ["dict", list(_), *parts] | ["class", str(_), str(_), *parts]:
            return parts
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype)[6:]


def dtype_named(name: str) -> torch.dtype:
    """Return `torch.float32` for "float32"; raise `ProtocolError` for an unknown name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"not a dtype: {name[:40]!r}")
    return found


class _Memory:
    """A tensor's memory as numpy takes it.

    `Tensor.numpy` would leave behind a tensor that nobody may resize any more.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.__array_interface__ = {
            "data": (flat.data_ptr(), False),
            "shape": (flat.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def tensor_bytes(tensor: torch.Tensor, lasting: bool = False) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous; the view keeps the memory alive.

    It is good until the tensor is resized; a `lasting` one keeps it from being resized, for good.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return memoryview(b"")
    # `view(-1)` would not do: a dimension of size 1 keeps whatever stride it had.
    flat = dense.as_strided((dense.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy() if lasting else np.asarray(_Memory(flat)))  # type: ignore[arg-type]


def bytes_tensor(dtype: str, sizes: list[int], data: Buffer | mmap.mmap) -> torch.Tensor:
    """Return a tensor over `data` (writable buffers are shared, read-only ones copied).

    Raise `ProtocolError` if they do not fit.
    """
    kind = dtype_named(dtype)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ProtocolError(f"not sizes: {str(sizes)[:80]}")
    count = 1
    for n in sizes:
        count *= n
    # The tensor keeps alive exactly the view it is made from: one of kept memory is told apart by its own
    # death.
    view = data if isinstance(data, memoryview) else memoryview(data)
    if view.nbytes != count * kind.itemsize:
        raise ProtocolError(f"{view.nbytes} bytes for a tensor of {count * kind.itemsize}")
    if not count:
        return torch.empty(sizes, dtype=kind, device="cpu")
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=kind).view(sizes)


def copy_bytes(target: memoryview, source: Buffer | mmap.mmap) -> None:
    """Copy `source` over `target`, of equal length.

    Lets other threads run meanwhile, which a slice assignment would not.
    """
    if len(target):
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))
